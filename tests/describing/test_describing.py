"""Specs drawn as trees and compared: shapes equal those of the built model."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.__main__ import main
from implicit_blocks.describing import Change, changes, draw_run, model_tree
from implicit_blocks.describing.drawing import show
from implicit_blocks.layers import RMSNorm
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.specs import load_spec, zoo_names


def built_shapes(spec: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = ib.build(spec)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings(
    "ignore::implicit_blocks.solvers.attractor_anderson.NonCausalSolverWarning"
)  # attractor_*_published
@pytest.mark.parametrize("name", [name for name in zoo_names() if not name.endswith("_transformers")])
def test_shapes_and_totals_equal_the_built_models(name: str) -> None:
    spec = load_spec(name).model
    tree, counts = model_tree(spec), count_parameters(spec)
    assert tree.shapes() == built_shapes(spec)
    assert counts is not None
    assert tree.parameters == counts.total


VARIED = {
    "untied": ["model.tie_embeddings=false"],
    "biased": ["model.mixer={kind: attention, n_heads: 4, n_kv_heads: 2, head_dim: 6, bias: true}"],
    "grouped": ["model.mixer={n_groups: 2, bias: true, conv_bias: false, norm_groups: 4}"],
    "deep": ["model.n_layers=3", "model.mlp={kind: swiglu, d_ff: 24, bias: true}"],
    "unnormed": ["model.weight_norm=false"],
    "padded": ["model.pad_vocab_to=16"],
    "explicit": ["model.kind=explicit_lm"],
}


@pytest.mark.parametrize("changed", VARIED.values(), ids=VARIED.keys())
def test_shapes_equal_the_built_models_for_every_option(changed: list[str]) -> None:
    spec = load_spec("word_problem_s3", changed).model
    assert model_tree(spec).shapes() == built_shapes(spec)


class QuietSpec(ib.MLPSpec):
    """A spec without parameter shapes."""

    kind: Literal["quiet"] = "quiet"
    width: int = 8


class Quiet(torch.nn.Module):
    def __init__(self, spec: QuietSpec, *, d_model: int) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model)
        self.rungs = torch.nn.ModuleList(torch.nn.Linear(d_model, d_model) for _ in range(3))


@pytest.fixture
def quiet() -> Iterator[dict[str, Any]]:
    with registry.isolated():
        registry.add("mlp", QuietSpec, Quiet, owner="tests", version="0")
        yield {"kind": "quiet", "width": 9}


def test_a_part_without_parameter_shapes_is_built(quiet: dict[str, Any]) -> None:
    spec = load_spec("word_problem_s3", ["model.mlp={kind: quiet, width: 9}"])
    tree = model_tree(spec.model)
    assert tree.shapes() == built_shapes(spec.model)
    drawn = text(draw_run(spec, name="mine"))
    assert "mlp  quiet: width 9" in drawn
    assert "├─ norm.weight" in drawn
    assert "3 × rungs" in drawn  # noqa: RUF001  # as it is drawn


def test_transformers_models_are_drawn() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = load_spec("word_problem_s3_transformers")
    assert model_tree(spec.model).shapes() == built_shapes(spec.model)
    drawn = text(draw_run(spec, name="baseline"))
    assert "Mamba2Mixer" in drawn
    assert "tied: counted above" in drawn


def text(lines: Any) -> str:
    stream = io.StringIO()
    show(lines, stream=stream)
    return stream.getvalue()


DRAWN = """\
word_problem_s3 · implicit_lm                             tokens (B, L)         parameters  52,568
├─ embedding.weight                                       x (B, L, 64)              6 × 64     384
├─ injection  u = W rms(x) + b, once a forward pass       u (B, L, 324)                     21,448
│  ├─ norm.weight                                                                       64      64
│  ├─ proj.weight  g·v/‖v‖                                                  324 × 64 + 324  21,060
│  └─ proj.bias                                                                        324     324
├─ ↻ backbone  z ← f(z, u) from z = 0, until z = f(z, u)  z (B, L, 64)                      30,736
│  ├─ layers.0  z + mixer(rms(z), u)                                                        30,672
│  │  ├─ mixer_norm.weight                                                              64      64
│  │  └─ mixer  mamba2: 4 heads of 32, state 32, convolution 4, input + u                   30,608
│  │     ├─ A_log                                                                        4       4
│  │     ├─ dt_bias                                                                      4       4
│  │     ├─ D                                                                            4       4
│  │     ├─ in_proj.weight  g·v/‖v‖                                         324 × 64 + 324  21,060
│  │     ├─ conv.weight  g·v/‖v‖                                             192 × 4 + 192     960
│  │     ├─ conv.bias                                                                  192     192
│  │     ├─ norm.weight                                                                128     128
│  │     └─ out_proj.weight  g·v/‖v‖                                         64 × 128 + 64   8,256
│  └─ norm.weight                                                                       64      64
└─ head  the embedding                                    logits (B, L, 6)

search                    solver               until                                                    gradient
unrolled: steps 1 to 130  picard: damping 1    the gradient's steps are taken                           unrolled: steps 8
free: steps 131 to 400    picard: damping 1    residual ≤ 0.05 relative, or 64 iterations, by sequence  phantom: steps 4, damping 0.8
evaluation                picard: damping 0.8  residual ≤ 0.001 relative, or 512 iterations, by token   —
"""  # noqa: E501, RUF001  # as it is drawn


def test_a_run_is_drawn_as_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "zoo/word_problem_s3.yaml"]) == 0
    assert capsys.readouterr().out == DRAWN


def test_overrides_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "model.gradient={kind: implicit_function, stopping: {tolerance: 1e-6}}",
        "phases=[]",
        "model.z_init=embedding",
    ]
    assert main(["describe", "word_problem_s3", *overrides]) == 0
    drawn = capsys.readouterr().out
    assert "z ← f(z, u) from z = x" in drawn
    assert (
        "implicit_function: solver (picard: damping 1), "
        "stopping (residual ≤ 1e-06 relative, or 64 iterations, by sequence)" in drawn
    )
    assert "training    picard: damping 1" in drawn


def test_terminals_without_unicode_get_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(draw_run(load_spec("llama_130m"), name="llama_130m"), stream=stream)
    stream.flush()
    drawn = raw.getvalue().decode("ascii")
    assert "|  |- 12 x layers" in drawn
    assert "`- head  the embedding" in drawn


def test_colored_output_has_the_same_text() -> None:
    pytest.importorskip("rich", reason="rich is not installed")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    import re

    stream = Terminal()
    lines = draw_run(load_spec("word_problem_s3"), name="word_problem_s3")
    show(lines, stream=stream)
    assert "\x1b[" in stream.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == DRAWN.splitlines()


# ------------------------------------------------------------------------------------ differences


def test_equal_specs_have_no_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "llama_130m", "zoo/llama_130m.yaml"]) == 0
    assert capsys.readouterr().out == ""


DIFFERENCES = """\
                        word_problem_s3  word_problem_s3 model.solver.kind=anderson phases.free.until=400
model
  solver
    kind                picard           anderson
    undamped_first      false            —
    memory              —                5
    regularization      —                1e-06
phases
  free
    until               null             400
"""


def test_differences_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model.solver.kind=anderson", "phases.free.until=400"]
    assert main(["diff", "word_problem_s3", "word_problem_s3", *overrides]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [" ".join(line.split()) for line in DIFFERENCES.splitlines()]


def differing(*overrides: str) -> list[Change]:
    return changes(load_spec("word_problem_s3"), load_spec("word_problem_s3", overrides))


def test_differences_include_defaults_and_absent_fields() -> None:
    assert differing("model.norm_eps=1e-5") == []
    assert differing("training.micro_batch_size=64") == [
        Change(("training", "micro_batch_size"), "null", "64")
    ]
    assert differing("model.mlp={kind: swiglu, d_ff: 24}") == [
        Change(("model", "mlp", "kind"), "—", "swiglu"),
        Change(("model", "mlp", "d_ff"), "—", "24"),
        Change(("model", "mlp", "bias"), "—", "false"),
    ]
    gone = differing("phases=[]")
    assert {change.path[:2] for change in gone} == {("phases", "unrolled"), ("phases", "free")}
    assert {change.new for change in gone} == {"—"}
    assert Change(("phases", "unrolled", "model", "gradient", "steps"), "8", "—") in gone
    assert differing("evaluation.lengths=[7, 12]", "evaluation.last_tokens=7") == [
        Change(("evaluation", "lengths"), "[32, 64, 128]", "[7, 12]"),
        Change(("evaluation", "last_tokens"), "10", "7"),
    ]


def test_unnamed_elements_are_compared_by_position() -> None:
    stop = "{kind: stop_when, value: loss, below: 1}"
    assert {change.path[:2] for change in differing(f"callbacks=[{stop}]")} == {("callbacks", "0")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "llama_130"], "no spec 'llama_130' in the zoo; did you mean 'llama_130m'?"),
        (["describe", "llama_130m", "model.layer=3"], "unknown key 'layer'"),
        (["diff", "llama_130m", "nothing.yaml"], "'nothing.yaml' does not exist"),
        (["diff", "llama_130m", "llama_130m", "model.mixer.n_heads=5"], "d_model 768 is not divisible by"),
    ],
)
def test_an_invalid_spec_is_an_error_and_not_a_difference(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr()
    assert message in text.err
    assert text.out == ""


def test_describing_imports_no_torch() -> None:
    program = (
        "import sys; from implicit_blocks.__main__ import main\n"
        "main(['describe', 'llama_1.3b']); main(['diff', 'llama_130m', 'mamba2_130m'])\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1,324,083,184" in done.stdout
