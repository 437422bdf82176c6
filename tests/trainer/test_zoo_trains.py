"""Every spec of the zoo trains, with a reduced width and little data: all phases, evaluation, report."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_blocks.specs import load_spec
from implicit_blocks.specs.loading import zoo_names
from trainer.cli.train import main

WITH_PICTURES = True
DRAWN = (  # one spec for each kind of data and of model: drawing takes longer than training
    "books_5m",
    "books_5m_explicit",
    "catbabi",
    "catbabi_explicit",
    "maze_30x30",
    "state_tracking",
    "sudoku_6x6",
    "word_problem_a5_mixed",
    "word_problem_s3",
    "word_problem_s3_explicit",
    "word_problem_s3_transformers",
)

VOCABULARY = 61
NARROW = [
    "model.d_model=16",
    "model.n_layers=1",
    "training.threads=1",
    "training.batch_size=4",
    "evaluation.sequences=2",
]
MIXERS = {
    "mamba2": ["model.mixer.d_state=8", "model.mixer.head_dim=8", "model.mixer.chunk_size=8"],
    "attention": ["model.mixer.n_heads=2", "model.mlp.d_ff=24"],
}


def test_the_zoo_is_complete() -> None:
    sizes = {
        f"{family}_{size}" for family in ("llama", "mamba2") for size in ("130m", "350m", "760m", "1.3b")
    }
    twins = {f"{name}{kind}" for name in sizes for kind in ("", "_bounded", "_explicit")}
    twins |= {
        f"books_{size}{family}{kind}"
        for size in ("5m", "10m")
        for family in ("", "_mamba2")
        for kind in ("", "_explicit")
    }
    assert twins | {"mamba2_state_tracking", "word_problem_s3", "word_problem_s3_explicit"} <= set(
        zoo_names()
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small file of token ids."""
    folder = tmp_path_factory.mktemp("tokens")
    drawn = np.random.default_rng(0).integers(VOCABULARY, size=400)
    drawn.astype(np.uint16).tofile(folder / "tokens.bin")
    return folder


FAMILIES = ("llama", "mamba2", "attractor", "parcae", "huginn", "ouro", "sandwich", "retrofit")
SLOW = [  # alike but for their sizes, which these runs reduce
    name
    for name in zoo_names()
    if name.split("_")[0] in FAMILIES
    and not any(size in name for size in ("130m", "140m", "huginn", "1.4b", "0.5b", "state_tracking"))
]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a spec: slow, and that the published solver of Attractor warns."""
    warns = "ignore::implicit_blocks.solvers.attractor_anderson.NonCausalSolverWarning"
    marks = [pytest.mark.slow] if name in SLOW else []
    return [*marks, pytest.mark.filterwarnings(warns)] if name.endswith("_published") else marks


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in zoo_names()])
def test_every_spec_trains_two_steps(
    name: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in DRAWN:
        monkeypatch.setattr("trainer.run.build.draw", lambda runs, path: None)
    spec: Any = load_spec(name)
    narrow = NARROW[2:]
    if spec.model.kind == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    else:
        narrow = [*NARROW, *MIXERS.get(spec.model.mixer.kind, []), *_few_loops(spec.model)]
        optional = ("mixer.n_kv_heads=2", "mixer.head_dim=8", "prelude.n_layers=1", "coda.n_layers=1")
        narrow += [f"model.{change}" for change in optional if _has(spec.model, change)]
        if spec.model.layers:  # the published pattern: every second layer has value embeddings
            mixer = "{kind: attention, n_heads: 2, qk_norm: unweighted, value_embeddings: 64}"
            narrow += [f"model.layers=[{{}}, {{mixer: {mixer}}}]", "model.d_model=32"]
            narrow += [f"model.{stack}n_layers=2" for stack in ("", "prelude.", "coda.")]
    if spec.model.kind == "implicit_lm":
        narrow += [f"model.{part}stopping.max_iterations=6" for part in ("", "at_evaluation.")]
    if spec.data.kind == "tokens":
        narrow += [
            f"data.path={tokens}", f"data.validation_path={tokens}", "data.dtype=uint16", "data.seq_len=12",
            "evaluation.lengths=[12, 16]",
            f"model.vocab_size={VOCABULARY}", "training.micro_batch_size=2", "training.max_tokens=96",
        ]  # fmt: skip
    elif spec.data.kind == "catbabi":
        for task, split in itertools.product(range(1, 21), ("train", "valid", "test")):
            text = f"1 Mary went to the hall{task}.\n2 Where is Mary? \thall{task}\t1\n"
            (tmp_path / f"qa{task}_{split}.txt").write_text(text)
        narrow += [
            f"data.path={tmp_path}",
            "data.seq_len=12",
            "training.max_steps=2",
            "evaluation.lengths=[12]",
        ]
        narrow += ["model.vocab_size=40"]
    elif spec.data.kind in ("sudoku", "maze"):
        size = "order" if spec.data.kind == "sudoku" else "side"
        narrow += [f"data.{size}=4", "data.boards=4", "data.held_out=2", "training.max_steps=2"]
        narrow += ["data.guesses=0"] if spec.data.kind == "sudoku" else ["data.shortest_path=0"]
    else:
        narrow += ["data.seq_len=12", "training.max_steps=2", "evaluation.lengths=[12, 16]"]
        if spec.data.kind == "state_tracking":
            narrow += ["evaluation.last_tokens=12"]
    if name == "mamba2_state_tracking":  # its first phase ends at a step, not at a share
        narrow += [
            "phases=[{name: unrolled, until: 1, model: {gradient: {kind: unrolled, steps: 4}}}, {name: free}]"
        ]
    steps = 2
    if any(phase.data for phase in spec.phases):  # a curriculum: batches and lengths of its own
        steps = len(spec.phases)
        data = {"shortest_path": 0} if spec.data.kind == "maze" else {"seq_len": 4}
        small = {"training": {"batch_size": 4}, "data": data}
        phases = [{"name": p.name, "until": p.until, "model": p.model, **small} for p in spec.phases]
        narrow += [
            f"training.max_steps={steps}",
            "training.precision=float32",
            f"phases={json.dumps(phases)}",
        ]
    elif len(spec.phases) > steps:  # each phase takes one step
        steps = len(spec.phases)
        phases = [
            {"name": p.name, "until": number, "model": p.model} for number, p in enumerate(spec.phases, 1)
        ]
        narrow += [f"training.max_tokens={48 * steps}", f"phases={json.dumps(phases)}"]
    folder = tmp_path / "run"
    assert main(["--spec", name, *narrow, "--output", str(folder), "--device", "cpu"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == steps
    assert len(summary["phases"]) == max(1, len(spec.phases))
    assert all(row["loss"] > 0 for row in summary["evaluation"])
    assert (summary["final"]["iterations"] is None) == name.endswith(("_explicit", "_transformers"))
    assert (folder / "report.png").is_file() == (name in DRAWN)


def _few_loops(model: Any) -> list[str]:
    """Return changes that limit a mean number of loops, and a fixed number in evaluation, to two."""
    fields = ("depth.mean", "at_evaluation.exit.loops")
    return [f"model.{field}=2" for field in fields if _has(model, f"{field}=2")]


def _has(model: Any, change: str) -> bool:
    """Return whether the field that a change sets has a value."""
    for name in change.partition("=")[0].split("."):
        model = getattr(model, name, None)
    return model is not None


def test_another_architecture_begins_with_what_the_baseline_extends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Otherwise the baseline would keep the configuration of another architecture (see its zoo file)."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    another = ["--spec", "word_problem_s3_transformers", "model.architecture=gpt2", "--dry-run"]
    assert main(another) == 2
    assert "extend a spec without them" in capsys.readouterr().err
    text = Path("zoo/word_problem_s3_transformers.yaml").read_text()
    (command,) = (line for line in text.splitlines() if "python -m trainer" in line)
    words = shlex.split(command)
    assert main([*words[words.index("--spec") :], "--dry-run"]) == 0
    assert "(transformers)" in capsys.readouterr().out
