"""The commands convert and export: output, and errors for invalid input without partial output."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.checkpoints.folder import whole_folder
from implicit_blocks.hf import published

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM  # after importorskip

SPEC = """
model:
  kind: implicit_lm
  vocab_size: 19
  d_model: 16
  n_layers: 1
  mixer: {kind: mamba2, d_state: 4, head_dim: 8}
data: {kind: tokens, path: null, seq_len: 64}
training:
  max_steps: 1
  batch_size: 2
  optimizer: {kind: adamw, learning_rate: 0.001}
  schedule: {kind: warmup_linear}
"""


@pytest.fixture
def source(tmp_path):
    """Create a folder of the published implementation with a sharded pickle."""
    folder = tmp_path / "source"
    folder.mkdir()
    mlp, mixer = ib.SwiGLUSpec(d_ff=24), ib.AttentionSpec(n_heads=2)
    spec = ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=1, mixer=mixer, mlp=mlp)
    (folder / "config.json").write_text(json.dumps(published.export_config(spec)))
    tensors = published.export_tensors(ib.build(spec).state_dict(), spec)
    names = sorted(tensors)
    weight_map = {}
    for number, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name].clone() for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refused(source, tmp_path, capsys, *more):
    """Return the command's error message; check that no output remains."""
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(source), str(tmp_path / "destination"), *more]) == 2
    assert sorted(tmp_path.iterdir()) == before
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


def test_the_valid_source_is_converted(source, tmp_path):
    assert main(["convert", str(source), str(tmp_path / "destination")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "destination")


def test_a_missing_folder_or_configuration_is_named(tmp_path, source, capsys):
    assert "is not a directory" in refused(tmp_path / "nowhere", tmp_path, capsys)
    (source / "config.json").rename(source / "other.json")
    assert "config.json" in refused(source, tmp_path, capsys)
    (source / "config.json").write_text("{")
    assert "is not JSON" in refused(source, tmp_path, capsys)


def test_an_unknown_model_type_is_named(tmp_path, source, capsys):
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    message = refused(source, tmp_path, capsys)
    assert "unknown model_type 'gpt2'" in message
    assert "implicit_llama3, implicit_mamba2, llama, mamba2" in message


def test_missing_and_unknown_fields_are_named(tmp_path, source, capsys):
    config = json.loads((source / "config.json").read_text())
    config["backbone_config"]["block_cfg"]["qk_norm"] = True
    config["head_bias"] = True
    (source / "config.json").write_text(json.dumps(config))
    message = refused(source, tmp_path, capsys)
    assert "head_bias is True" in message
    assert "qk_norm" in message
    del config["deq_params"], config["backbone_config"]["block_cfg"]["qk_norm"], config["head_bias"]
    (source / "config.json").write_text(json.dumps(config))
    assert "has no 'deq_params'" in refused(source, tmp_path, capsys)


def test_missing_weights_are_named(tmp_path, source, capsys):
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    assert "1 of 2 shards are missing" in refused(source, tmp_path, capsys)
    for path in source.glob("pytorch_model*"):
        path.unlink()
    assert "has no weights" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize("kind", ["pickle", "safetensors"])
def test_a_truncated_file_is_named(kind, tmp_path, source, capsys):
    path = source / "pytorch_model-00001-of-00002.bin"
    if kind == "safetensors":
        tensors: dict[str, torch.Tensor] = {}
        for file in source.glob("*.bin"):
            tensors |= torch.load(file)
        path = source / "model.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    message = refused(source, tmp_path, capsys)
    assert path.name in message
    assert "truncated" in message


def test_a_shard_that_lacks_tensors_of_the_index_is_an_error(tmp_path, source, capsys):
    path = source / "pytorch_model-00001-of-00002.bin"
    tensors = torch.load(path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    torch.save(tensors, path)
    assert f"lack tensors of the index: {lost}" in refused(source, tmp_path, capsys)


def test_tensors_that_do_not_fit_are_all_listed(tmp_path, source, capsys):
    (source / "pytorch_model.bin.index.json").unlink()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.bin")):
        tensors |= torch.load(file)
        file.unlink()
    tensors["backbone.extra"] = torch.zeros(2)
    del tensors["backbone.norm_f.weight"], tensors["backbone.layers.0.mixer.wk.weight_v"]
    tensors["backbone.injection.bias"] = torch.zeros(3)
    torch.save(tensors, source / "pytorch_model.bin")
    message = refused(source, tmp_path, capsys)
    assert "backbone.extra is unknown, (2,)" in message
    assert "backbone.norm_f.weight is missing, (16,)" in message
    assert "backbone.layers.0.mixer.wk.weight_v is missing, (16, 16)" in message
    assert "backbone.injection.bias has shape (3,), expected (48,)" in message


class Ran:
    def __reduce__(self):
        return print, ("unpickled",)


def test_a_pickle_that_contains_more_than_weights_is_not_executed(tmp_path, source, capsys):
    torch.save({"weight": Ran()}, source / "pytorch_model-00001-of-00002.bin")
    assert main(["convert", str(source), str(tmp_path / "destination")]) == 2
    captured = capsys.readouterr()
    assert "contains more than weights" in captured.err
    assert "unpickled" not in captured.out
    assert not (tmp_path / "destination").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, source, capsys):
    tokenizer = {"model": {"vocab": {str(n): n for n in range(18)}}, "added_tokens": [{"id": 18}]}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "fits")]) == 0
    assert (tmp_path / "fits" / "tokenizer.json").is_file()
    assert "the tokenizer is copied unchecked" in capsys.readouterr().err  # transformers can't read it
    tokenizer["added_tokens"].append({"id": 19})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has 20 entries, but the model has 19" in refused(source, tmp_path, capsys)


def test_the_destination_is_not_overwritten(tmp_path, source, capsys):
    (tmp_path / "destination").mkdir()
    (tmp_path / "destination" / "precious").touch()
    assert "is not an empty folder" in refused(source, tmp_path, capsys)
    (tmp_path / "destination" / "precious").unlink()
    assert main(["convert", str(source), str(tmp_path / "destination")]) == 0


def test_an_implicit_model_cannot_initialize_another(tmp_path, source, capsys):
    assert "is already implicit" in refused(source, tmp_path, capsys, "--implicit")
    assert "max_shard_size" in refused(source, tmp_path, capsys, "--max-shard-size", "much")


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    def write(folder):
        (folder / "half").touch()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), whole_folder(tmp_path / "new") as folder:
        write(folder)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ export


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", "word_problem_s3", str(tmp_path / "out")]) == 2
    assert f"needs transformers 5.17 or newer; {install_extra('hf')}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_spec_is_exported_with_new_or_given_weights(tmp_path, capsys):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    assert main(["export", str(spec), str(tmp_path / "fresh"), "--seed", "3"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    assert model.config.training_length == 64
    torch.manual_seed(3)
    expected = ib.build(model.config.model_spec)
    assert torch.equal(model.model.lm.embedding.weight, expected.embedding.weight)
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    trained = ib.build(model.config.model_spec).state_dict()
    save_file(trained, checkpoint / "model.safetensors")
    arguments = ["export", str(spec), str(tmp_path / "trained"), "--checkpoint", str(checkpoint)]
    assert main(arguments) == 0
    found = load_file(tmp_path / "trained" / "model.safetensors")
    assert all(torch.equal(found[f"model.lm.{name}"], tensor) for name, tensor in trained.items())
    shutil.rmtree(tmp_path / "trained")
    del trained["embedding.weight"]
    save_file(trained, checkpoint / "model.safetensors")
    assert main(arguments) == 2
    assert "embedding.weight is missing" in capsys.readouterr().err
    assert not (tmp_path / "trained").exists()


def test_the_zoo_is_exported_by_name(tmp_path):
    assert main(["export", "word_problem_s3", str(tmp_path / "s3")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "s3")
    assert type(model).__name__ == "ImplicitMamba2ForCausalLM"
    assert model.config.vocab_size == 6


def test_an_unwritable_destination_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["export", "word_problem_s3", str(tmp_path / "file" / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert str(tmp_path / "file") in message
