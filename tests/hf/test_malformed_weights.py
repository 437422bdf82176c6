"""Untrusted weights, configurations and tokenizers raise an error and are never executed."""

from __future__ import annotations

import json
import resource
import struct

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.checkpoints.folder import check_tensors, read_file, read_tensors, whole_folder

pytest.importorskip("transformers", reason="transformers is not installed")

MODEL = {
    "kind": "implicit_lm",
    "vocab_size": 19,
    "d_model": 16,
    "n_layers": 1,
    "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
}


@pytest.fixture
def folder(tmp_path):
    """Create an exported folder of the transformers classes."""
    spec = ib.ImplicitLMSpec.model_validate(MODEL)
    from implicit_blocks.hf import from_library

    from_library(ib.build(spec)).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def refused(folder, capsys):
    """Convert and return the error message; check that no output remains."""
    before = sorted(folder.parent.iterdir())
    capsys.readouterr()
    assert main(["convert", str(folder), str(folder.parent / "out")]) == 2
    assert sorted(folder.parent.iterdir()) == before
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b"", "cannot be read; it is truncated or not a safetensors file"),
        (b"[" * 100_000, "cannot be read; it is truncated or not a safetensors file"),
        ([], "cannot be read; it is truncated or not a safetensors file"),
        ({"a": {**F4, "data_offsets": [0, 400]}}, "cannot be read"),
        ({"a": {**F4, "data_offsets": [-1, 4]}}, "cannot be read"),
        ({"a": {**F4, "shape": [2**62, 2**62]}}, "cannot be read"),
        ({"a": {**F4, "dtype": "OS.SYSTEM"}}, "cannot be read"),
        ({"a": F4, "b": F4}, "cannot be read"),
        ({"a": F4, "__metadata__": {"aliases": 3}}, "cannot be read"),
        ({"a": F4, "__metadata__": {"aliases": "{"}}, "the aliases in the header are not a JSON object"),
        (
            {"a": F4, "__metadata__": {"aliases": "[" * 100_000}},
            "the aliases in the header are not a JSON object",
        ),
        ({"a": F4, "__metadata__": {"aliases": "[1]"}}, "the aliases in the header are not a JSON object"),
        (
            {"a": F4, "__metadata__": {"aliases": '{"b": "c"}'}},
            "the aliases in the header are not a JSON object",
        ),
        (
            {"a": F4, "__metadata__": {"aliases": '{"b": ["a"]}'}},
            "the aliases in the header are not a JSON object",
        ),
        (
            {"a": F4, "__metadata__": {"aliases": '{"a": "a"}'}},
            "the aliases in the header are not a JSON object",
        ),
    ],
)
def test_malformed_safetensors_headers_are_refused(folder, capsys, header, complaint):
    with_header(folder / "model.safetensors", header, bytes(4))
    message = refused(folder, capsys)
    assert complaint in message
    assert "model.safetensors" in message


def test_valid_aliases_are_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"aliases": '{"b": "a"}'})
    assert read_file(tmp_path / "model.safetensors").keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("[]", "is not an index"),
        ("[" * 100_000, "is not an index"),
        ('{"weight_map": []}', "is not an index"),
        ('{"weight_map": 7}', "is not an index"),
        ('{"weight_map": {"a": 7}}', "names 7, which is not a file of"),
        ('{"weight_map": {"a": ["x"]}}', "which is not a file of"),
        (
            '{"weight_map": {"a": "../elsewhere.safetensors"}}',
            "'../elsewhere.safetensors', which is not a file",
        ),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd', which is not a file of"),
        ('{"weight_map": {"a": "b/../../elsewhere.safetensors"}}', "which is not a file of"),
        ('{"weight_map": {"a": "..\\\\elsewhere.safetensors"}}', "which is not a file of"),
        ('{"weight_map": {"a": ".."}}', "which is not a file of"),
        ('{"weight_map": {"a": ""}}', "which is not a file of"),
    ],
)
def test_a_weight_map_stays_in_its_folder(folder, capsys, index, complaint):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    assert complaint in refused(folder, capsys)


def test_a_name_in_several_shards_is_refused(tmp_path):
    for number in (1, 2):
        save_file({"a": torch.ones(number)}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a is stored in several shards of .*, including 2\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_other_types_are_listed(folder, capsys, dtype):
    tensors = read_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].to(dtype)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    expected = f"has type {str(dtype)[6:]}, expected float32 or bfloat16 or float16 or float64"
    assert expected in refused(folder, capsys)


def test_half_precision_weights_are_accepted():
    given = {"a": torch.ones(2, dtype=torch.bfloat16), "count": torch.ones(1, dtype=torch.int64)}
    check_tensors(given, {"a": torch.ones(2), "count": torch.zeros(1, dtype=torch.int64)}, what="x")


class Ran:
    def __reduce__(self):
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (Ran(), "contains more than weights"),
        ({"a": Ran()}, "contains more than weights"),
        ({"a": torch.device("cpu")}, "is not a state dict"),
        ({1: torch.ones(1)}, "is not a state dict"),
        ([torch.ones(1)], "is not a state dict"),
        ({"a": torch.ones(2).to_sparse()}, "a is sparse, quantized or has no data"),
        ({"a": torch.ones(2, device="meta")}, "a is sparse, quantized or has no data"),
        ({"a": torch.ones(1).expand(2**40)}, "too few bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(type(value).__name__),
)
def test_torch_files_of_other_content_are_refused(tmp_path, capsys, content, complaint):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=complaint):
        read_tensors(tmp_path)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"cposix\nsystem\n(S'touch ran'\ntR.", b"PK\x03\x04" + bytes(50), b"\x80\x04]q\x00" * 1000],
)
def test_files_that_are_not_torch_files_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin (cannot be read|contains more than weights)"):
        read_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "tokenizer",
    [
        [],
        {"model": []},
        {"model": {"vocab": 3}},
        {"model": {"vocab": {"a": "b"}}},
        {"model": {"vocab": {"a": None}}},
        {"model": {"vocab": {"a": 1.5}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {}}, "added_tokens": 3},
        {"model": {"vocab": {}}, "added_tokens": [3]},
        {"model": {"vocab": {}}, "added_tokens": [{"id": "3"}]},
        {"model": {"vocab": {}}, "added_tokens": [{"id": True}]},
    ],
    ids=str,
)
def test_malformed_tokenizers_are_refused(folder, capsys, tokenizer):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokenizer.json is not a readable tokenizer" in refused(folder, capsys)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": []},
        {"spec": {"kind": []}},
        {"spec": {**MODEL, "d_model": "wide"}},
        {"spec": {**MODEL, "mixer": 3}},
        {"spec": {"kind": "llama"}},
        {"model_type": []},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 0},
        {"model_type": "llama", "rope_parameters": 3},
        {"model_type": "mamba2", "time_step_limit": 3},
        {"model_type": "mamba2", "hidden_size": [], "num_heads": {}, "head_dim": "x"},
        {"model_type": "implicit_mamba2", "backbone_config": []},
        {"model_type": "implicit_mamba2", "backbone_config": 3, "backbone_type": 3},
    ],
    ids=str,
)
def test_malformed_configurations_are_refused(folder, capsys, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    refused(folder, capsys)


def test_an_error_unrelated_to_the_disk_propagates(tmp_path):
    with pytest.raises(RuntimeError, match="a mistake"), whole_folder(tmp_path / "out"):
        raise RuntimeError("a mistake")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported(tmp_path, error):
    message = r"out cannot be written \(.*\); free disk space or choose another destination"
    with pytest.raises(OSError, match=message), whole_folder(tmp_path / "out"):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["transformers", "published"])
def test_converting_to_a_full_disk_leaves_no_folder(folder, to, capsys):
    """A file size limit of 2 KB acts like a full disk for every writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        code = main(["convert", str(folder), str(folder.parent / "out"), "--to", to])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "out cannot be written (" in message
    assert not (folder.parent / "out").exists()
