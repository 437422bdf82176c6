"""Models of transformers as baselines: interface, whole runs, exact resume, export, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_blocks.__main__ import main as library
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.specs import SpecError, load_spec
from trainer.cli.train import main
from trainer.data.tokenizing.command import main as tokenize
from trainer.errors import DataError
from trainer.reporting.metrics import read_metrics
from trainer.specs.run import TransformersSpec

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModelForCausalLM  # after the skip

from trainer.baselines.transformers_model import TransformersLM

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
              "attention_dropout": 0.1},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "tie_word_embeddings": True},
    "mamba2": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 8, "head_dim": 8, "num_heads": 4,
               "n_groups": 1, "chunk_size": 8, "tie_word_embeddings": True},
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 3, "rescale_every": 1},
}  # fmt: skip
ARCHITECTURES = list(CONFIGS)


def spec_of(architecture: str, **changes: Any) -> TransformersSpec:
    return TransformersSpec(architecture=architecture, config=CONFIGS[architecture], vocab_size=6).model_copy(
        update=changes
    )


def model_of(architecture: str) -> TransformersLM:
    torch.manual_seed(0)
    return TransformersLM(spec_of(architecture))


def run_file(folder: Path, architecture: str, **sections: Any) -> str:
    tree = {
        "model": {"kind": "transformers", "architecture": architecture, "config": CONFIGS[architecture]},
        "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
        "training": {
            "max_steps": 6,
            "batch_size": 8,
            "micro_batch_size": 4,
            "threads": 1,
            "checkpoint_every": 3,
            "evaluate_every": 3,
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
        },
        "evaluation": {"lengths": [12, 16], "sequences": 4, "batch_size": 4},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return str(path)


def trained(folder: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "loss", "gradient_norm", "learning_rate", "accuracy")
    return [tuple(row[key] for key in kept) for row in read_metrics(folder / "metrics.jsonl")]


# ------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_baseline_trains_resumes_to_the_last_bit_and_is_exported(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = run_file(tmp_path, architecture)
    whole, halves, exported = tmp_path / "whole", tmp_path / "halves", tmp_path / "exported"
    assert main(["--spec", spec, "--dry-run"]) == 0
    message = capsys.readouterr().out
    assert main(["--spec", spec, "--output", str(whole), "--device", "cpu"]) == 0
    summary = json.loads((whole / "summary.json").read_text())
    assert f"parameters      {summary['parameters']:,}\n" in message
    assert (summary["final"]["iterations"], summary["evaluation"][1]["length"]) == (None, 16)

    assert main(["--spec", spec, "--output", str(halves), "--device", "cpu", "--stop-at", "3"]) == 0
    torch.rand(5)  # whatever happened in between
    assert main(["--resume", "--output", str(halves), "--device", "cpu"]) == 0
    assert trained(halves) == trained(whole)
    losses = [[row["loss"] for row in read_metrics(f / "evaluations.jsonl")] for f in (whole, halves)]
    assert losses[0] == losses[1]

    resolved = str(whole / "spec.yaml")
    assert library(["export", resolved, str(exported), "--checkpoint", str(whole)]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    config = AutoConfig.from_pretrained(exported)
    assert (config.model_type, config.vocab_size) == (architecture, 6)
    assert getattr(config, "rescale_every", 1) == 1
    # The exported model reproduces the run's evaluation with transformers' own forward pass.
    data = load_spec(spec).data
    from implicit_blocks.registry import build

    [batch, *_] = build(data, seed=0, vocab_size=6).evaluation_sets(load_spec(spec).evaluation).values()
    [sequences] = batch.batches(4)
    with torch.no_grad():
        logits = model.eval()(input_ids=sequences.inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences.labels.flatten())
    torch.testing.assert_close(loss.item(), summary["evaluation"][0]["loss"], atol=1e-4, rtol=1e-4)

    # A run can start from the folder: its first loss is that of the exported model.
    folder = {"kind": "transformers", "folder": str(exported)}
    again = run_file(tmp_path, architecture, model=folder)
    assert load_spec(again).model.vocab_size == 6
    overrides = [
        "training.max_steps=1",
        "training.evaluate_every=null",
        "training.optimizer.learning_rate=1e-9",
    ]
    assert main(["--spec", again, *overrides, "--output", str(tmp_path / "on"), "--device", "cpu"]) == 0
    started = json.loads((tmp_path / "on" / "summary.json").read_text())
    assert started["evaluation"][0]["loss"] == pytest.approx(summary["evaluation"][0]["loss"], abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_baseline_trains_on_a_file_of_tokens(architecture: str, tmp_path: Path) -> None:
    tokens = (np.arange(600) * 7 % 11).astype(np.uint16)
    (tmp_path / "tokens").mkdir()
    tokens.tofile(tmp_path / "tokens" / "tokens.bin")
    place = str(tmp_path / "tokens")
    spec = run_file(
        tmp_path,
        architecture,
        model={
            "kind": "transformers", "architecture": architecture, "config": CONFIGS[architecture],
            "vocab_size": 11,
        },
        data={"kind": "tokens", "path": place, "validation_path": place, "dtype": "uint16", "seq_len": 12},
        training={
            "max_steps": 25, "batch_size": 8, "threads": 1,
            "optimizer": {"kind": "adamw", "learning_rate": 2e-2}, "schedule": {"kind": "warmup_linear"},
        },
        evaluation={"sequences": 4, "batch_size": 4},
    )  # fmt: skip
    assert main(["--spec", spec, "--output", str(tmp_path / "run"), "--device", "cpu"]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0]


# ------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_labels_are_aligned_and_logits_are_optional(architecture: str) -> None:
    model = model_of(architecture).eval()
    ids = torch.randint(6, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.3, -100, ids.roll(1, 1))
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, expected)
    short = model(ids, labels=labels, return_logits=False)
    assert (short.logits, short.solution) == (None, None)
    assert torch.equal(short.predictions, out.logits.argmax(-1))
    torch.testing.assert_close(short.loss, out.loss)
    own = model.model(input_ids=ids, labels=ids).loss  # transformers shifts labels itself
    shifted = torch.full_like(ids, -100)
    shifted[:, :-1] = ids[:, 1:]
    torch.testing.assert_close(model(ids, labels=shifted).loss, own)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_in_one_decay_group_and_every_token_is_trained(architecture: str) -> None:
    model = model_of(architecture).train()
    decayed, others = model.decay_groups()
    assert {id(p) for p in (*decayed, *others)} == {id(p) for p in model.parameters()}
    assert len(decayed) + len(others) == len(list(model.parameters()))
    names = {id(p): name.rpartition(".")[2] for name, p in model.named_parameters()}
    assert {names[id(p)] for p in others} <= {
        "weight", "bias", "A_log", "dt_bias", "D", "time_decay", "time_first", "time_mix_key",
        "time_mix_value", "time_mix_receptance",
    }  # fmt: skip
    assert {names[id(p)] for p in decayed} == {"weight"}
    ids = torch.arange(6)[None]
    model(ids, labels=ids).loss.backward()
    rows = model.model.get_input_embeddings().weight.grad.abs().sum(1)
    assert bool((rows > 0).all()), "transformers takes one of the tokens for padding"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_evaluation_leaves_the_weights_as_they_are(architecture: str) -> None:
    model = model_of(architecture).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(torch.randint(6, (1, 4)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_documents_are_kept_apart_or_refused() -> None:
    ids = torch.randint(6, (2, 10))
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [3] * 3])
    model = model_of("llama").eval()
    packed = model(ids, documents=documents).logits
    torch.testing.assert_close(packed[0, 4:], model(ids[:1, 4:]).logits[0])
    torch.testing.assert_close(packed[1, :7], model(ids[1:, :7]).logits[0])
    for architecture in ("mamba", "mamba2", "rwkv"):
        with pytest.raises(
            ValueError, match=f"'{architecture}' of transformers carries its state from one document"
        ):
            model_of(architecture)(ids, documents=documents)


def test_documents_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("one\ntwo\nthree\n" * 40)
    done = tokenize(
        [str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--output", str(tmp_path / "tokens")]
    )
    assert done == 0
    data = {"kind": "tokens", "path": str(tmp_path / "tokens"), "seq_len": 12, "documents": "reset"}
    for architecture, code in (("mamba2", 2), ("llama", 0)):
        model = {"kind": "transformers", "architecture": architecture, "config": CONFIGS[architecture]}
        spec = run_file(tmp_path, architecture, model={**model, "vocab_size": 300}, data=data)
        output = tmp_path / architecture
        overrides = ["training.max_steps=1", "evaluation.sequences=2"]
        assert main(["--spec", spec, *overrides, "--output", str(output), "--device", "cpu"]) == code
        assert output.exists() == (code == 0)
    assert "'mamba2' of transformers carries its state from one document" in capsys.readouterr().err


TABLES = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12},
    "opt": {
        "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 12, "word_embed_proj_dim": 16,
    },
    "codegen": {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 2, "n_positions": 12},
    "llama": {**CONFIGS["llama"], "max_position_embeddings": 12},
}  # fmt: skip


@pytest.mark.parametrize("architecture", TABLES)
def test_a_table_of_positions_limits_the_length(architecture: str) -> None:
    spec = TransformersSpec(architecture=architecture, config=TABLES[architecture], vocab_size=6)
    model = TransformersLM(spec).eval()
    assert model(torch.zeros(1, 12, dtype=torch.int64)).logits.shape == (1, 12, 6)
    longer = torch.zeros(1, 13, dtype=torch.int64)
    if architecture == "llama":
        assert model(longer).logits.shape == (1, 13, 6)
        return
    with pytest.raises(
        DataError, match=f"'{architecture}' of transformers .* 12 tokens, got sequences of 13"
    ):
        model(longer)


def test_lengths_beyond_a_table_of_positions_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"kind": "transformers", "architecture": "gpt2", "config": TABLES["gpt2"]}
    output = tmp_path / "run"
    spec = run_file(tmp_path, "llama", model=model)
    assert main(["--spec", spec, "--output", str(output), "--device", "cpu"]) == 2
    assert "positions for 12 tokens, got sequences of 16" in capsys.readouterr().err
    assert not output.exists()


def test_layers_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    model_of("llama").compile_layers()
    assert [type(layer).__name__ for layer in compiled] == ["LlamaDecoderLayer"] * 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_support_activation_checkpointing(architecture: str) -> None:
    torch.manual_seed(0)
    config = {**CONFIGS[architecture], **({"attention_dropout": 0.0} if architecture == "llama" else {})}
    model = TransformersLM(spec_of(architecture, config=config)).train()
    assert len(model.sharding_units()) == config["num_hidden_layers"]
    ids = torch.randint(6, (2, 8))
    gradients = []
    for what in ("none", "layers", "none"):
        model.zero_grad()
        model.checkpoint_activations(what)
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for kept, again, kept_too in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again)
        torch.testing.assert_close(kept, kept_too)


def test_a_baseline_rejects_reconfiguration() -> None:
    model = model_of("llama")
    model.reconfigure(spec_of("llama"))
    with pytest.raises(ValueError, match="cannot be reconfigured"):
        model.reconfigure(spec_of("llama", vocab_size=7))
    with pytest.raises(ValueError, match="returns no state"):
        model(torch.zeros(1, 2, dtype=torch.int64), return_state=True)


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 6}, "needs exactly one of architecture and folder"),
        (
            {"architecture": "llama", "folder": "x", "vocab_size": 6},
            "needs exactly one of architecture and folder",
        ),
        ({"architecture": "llama"}, "the data do not determine the vocabulary size"),
        ({"architecture": "llama", "vocab_size": 6, "weights": False}, "omit weights, or give a folder"),
        (
            {"architecture": "llama", "vocab_size": 6, "config": {"vocab_size": 3}},
            "set the vocabulary size as model.vocab_size",
        ),
        ({"architecture": "llama", "vocab_size": 6, "confg": {}}, "did you mean 'config'?"),
    ],
)
def test_contradictory_specs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        TransformersSpec(**fields)
    assert message in str(raised.value)


BERT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("lama", {}, r"model\.architecture: 'lama' is unknown to .*did you mean 'llama'\?"),
        ("vit", {}, r"'vit' is not a causal language model of the installed transformers"),
        (
            "llama",
            {"hiden_size": 3, "zz": 1},
            r"'hiden_size' \(did you mean 'hidden_size'\?\), 'zz'; remove them.*Known fields: ",
        ),
        (
            "llama",
            {"hidden_size": "wide"},
            "refuses this model.config of 'llama': .*'hidden_size' expected int",
        ),
        ("llama", {"hidden_size": 10, "num_attention_heads": 4}, "not a multiple of the number of attention"),
        ("mamba2", {"hidden_size": 24}, "must equal num_heads"),
        ("rwkv", {"num_hidden_layers": 1, "hidden_size": 8}, "division by zero; change the sizes or layers"),
        (
            "codegen",  # its rotation is as wide as the default's heads
            {"n_embd": 16, "n_layer": 1, "n_head": 4},
            "'codegen' of transformers, as configured, fails on 8 tokens: Runtime.*; change the sizes",
        ),
        ("bert", BERT, "'bert' of transformers, as configured, is not causal; set .*is_decoder"),
    ],
)
def test_models_that_transformers_cannot_build_are_refused(
    architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersLM(TransformersSpec(architecture=architecture, config=config, vocab_size=6))


def test_a_decoder_of_that_kind_is_causal() -> None:
    config = {**BERT, "is_decoder": True}
    model = TransformersLM(TransformersSpec(architecture="bert", config=config, vocab_size=6))
    assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_of("llama").to_transformers().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def _no_folder(folder: Path) -> Path:
    return folder / "nowhere"


def _no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def _other_type(folder: Path) -> Path:
    _edit(folder, model_type="lama")
    return folder


def _no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def _cut_short(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200])
    return folder


def _other_width(folder: Path) -> Path:
    _edit(folder, intermediate_size=32, num_hidden_layers=3)
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (_no_folder, ["nowhere is not a directory; give one with config.json and weights"]),
        (_no_config, ["is not a pretrained folder: config.json is missing"]),
        (_other_type, ["model_type: 'lama'", "did you mean 'llama'?"]),
        (_no_weights, ["can't be read", "no file named model.safetensors"]),
        (_cut_short, ["can't be read"]),
        (
            _other_width,
            [
                "do not fit its configuration",
                "model.layers.0.mlp.up_proj.weight has shape (24, 16), expected (32, 16)",
                "model.layers.1.mlp.up_proj.weight has shape (24, 16), expected (32, 16)",
                "model.layers.2.self_attn.q_proj.weight is missing",
            ],
        ),
    ],
    ids=["no-folder", "no-config", "model-type", "no-weights", "cut-short", "shapes"],
)
def test_an_unusable_folder_is_refused_before_writing(
    folder: Path,
    damage: Callable[[Path], Path],
    messages: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = run_file(tmp_path, "llama", model={"kind": "transformers", "folder": str(damage(folder))})
    assert main(["--spec", spec, "--output", str(tmp_path / "run"), "--device", "cpu"]) == 2
    text = capsys.readouterr().err
    for message in messages:
        assert message in text
    assert not (tmp_path / "run").exists()


def test_a_folder_gives_its_configuration_without_weights(folder: Path) -> None:
    one = TransformersSpec(folder=str(folder))
    assert one.vocab_size == 6
    other = TransformersSpec(folder=str(folder), weights=False, vocab_size=9, config={"num_hidden_layers": 1})
    model = TransformersLM(other)
    assert model(torch.tensor([[8, 0]])).logits.shape == (1, 2, 9)
    assert len(model.model.model.layers) == 1
    assert other.parameter_total() == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="has 6 tokens, but 9 are needed"):
        TransformersLM(TransformersSpec(folder=str(folder), vocab_size=9))


def test_without_transformers_the_spec_is_valid_and_building_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configuration_auto", "modeling_auto"):
        monkeypatch.setitem(__import__("sys").modules, f"transformers.models.auto.{name}", None)
    spec = run_file(tmp_path, "llama")
    assert load_spec(spec).model.architecture == "llama"
    assert main(["--spec", spec, "--output", str(tmp_path / "run")]) == 2
    assert "needs the package transformers" in (message := capsys.readouterr().err)
    assert install_extra("hf") in message
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------ export


def test_models_that_cannot_be_exported_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, other = run_file(tmp_path, "llama"), tmp_path / "other"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for checkpoint, message in (
        (tmp_path / "nowhere", "no weights at"),
        (tmp_path / "run", "has no checkpoint yet; train it, or give a file of weights"),
    ):
        assert library(["export", spec, str(other), "--checkpoint", str(checkpoint)]) == 2
        assert message in capsys.readouterr().err
        assert not other.exists()
    model_of("mamba").to_transformers().save_pretrained(tmp_path / "mamba")
    assert library(["export", spec, str(other), "--checkpoint", str(tmp_path / "mamba")]) == 2
    text = capsys.readouterr().err
    assert "model.model.layers.0.self_attn.q_proj.weight is missing" in text
    assert "backbone.norm_f.weight is unknown" in text
    assert not other.exists()
