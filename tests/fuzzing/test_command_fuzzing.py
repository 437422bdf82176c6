"""Random command lines: every program ends with a documented exit code, without a traceback or a hang.

The ``main`` functions of the programs are called in this process. Words are drawn from the options of their
parsers and from files that are valid, damaged or missing. Runs stop before training: only the handling of
arguments is tested. To run one case: ``FUZZ_CASE=1234 pytest`` with this file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import implicit_blocks.__main__
import trainer.cli.train
import trainer.data.tokenizing.command
import trainer.evaluation.command
import trainer.experiments.cli
import trainer.reporting.report
from implicit_blocks.specs import zoo_names
from trainer.errors import RunFolderError

CASES = int(os.environ.get("FUZZ_CASES", "10000"))
PROGRAMS: dict[str, Any] = {
    "implicit_blocks": implicit_blocks.__main__,
    "trainer": trainer.cli.train,
    "trainer.tokenize": trainer.data.tokenizing.command,
    "trainer.evaluate": trainer.evaluation.command,
    "trainer.report": trainer.reporting.report,
    "trainer.experiments": trainer.experiments.cli,
}
EXIT_CODES = {0, 1, 2, 3, 4, 75, 130}
TINY = [
    "model.d_model=16",
    "model.mixer.d_state=8",
    "model.mixer.head_dim=8",
    "training.batch_size=4",
    "training.threads=1",
    "data.seq_len=12",
    "evaluation.lengths=[12]",
    "evaluation.sequences=4",
    "training.max_steps=2",
    "phases=[]",
    "model.at_evaluation.stopping.max_iterations=8",
]
WORDS = [
    "",
    " ",
    "x",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 5000,
    "x" * 300,
    "x" * 6000,
    "\udcff",
    "é",
    "=",
    "a=b",
    "--nothing",
    "--nothing=3",
    "-x",
    "@x",
    "%s",
    "{}",
    "\n",
    "\\n",
]
OVERRIDES = [
    "training.max_steps=3",
    "model.d_model=10",
    "model.solver.kind=anderson",
    "model.kind=explicit_lm",
    "x=1",
    "=",
    "data.group=S99",
    "data={}",
    "phases=[]",
    "phases.0.until=3",
    "training.seed=-1",
    "model.mixer={kind: []}",
    "training.optimizer.learning_rate=.inf",
    "data.seq_len=99999999999999999999",
    "callbacks=[{kind: profile}]",
    "evaluation.lengths=[0]",
    "training.precision=bfloat16",
    "training.init_from=run",
    "training.init_from={path: x}",
    "model.n_layers=!!int x",
    "data.kind=tokens",
    "data={kind: tokens, path: tokens, seq_len: 8}",
    "training.threads=0",
]
SMALL = ("-1", "0", "1", "2", "3", "8", "x", "", "1.5", "nan", "9" * 5000)
"""Values for options that scale the work: a large number is a long job, not an error."""
NUMBERS = (*SMALL, "100000", str(2**31), str(2**63), str(2**64), str(10**30), "-1e3", "1e-300", "inf", "-inf")
GROW = (
    "tokens",
    "iterations",
    "width",
    "sequences",
    "length",
    "lengths",
    "workers",
    "repeats",
    "penalty_steps",
    "multiples",
    "max_new_tokens",
    "batch_size",
    "limit",
    "layers",
    "seeds",
    "ranks",
    "train_tokenizer",
    "steps",
)
INPUTS = (
    "run",
    "run/checkpoints",
    "run/spec.yaml",
    "damaged",
    "tokens",
    "tokens/train",
    "exported",
    "text.txt",
    "empty",
    "garbage",
    "list.json",
    "object.json",
    "folder",
    "deep.yaml",
    "spec.yaml",
    "nothing",
    "nothing.yaml",
    "",
    ".",
    "x" * 300,
    "\udcff",
    "tokens/tokenizer.json",
    "text.jsonl",
    "a/b/c",
)
SOUND = {
    "checkpoint": ("run", "exported"),
    "checkpoints": ("run",),
    "source": ("run", "exported"),
    "runs": ("run",),
    "inputs": ("text.txt", "text.jsonl", "folder"),
    "validation": ("text.jsonl",),
    "data": ("tokens",),
    "tokens": ("tokens",),
    "tokenizer": ("bytes", "tokens"),
    "output": ("out",),
    "destination": ("out",),
    "directory": ("out",),
    "spec": ("word_problem_s3", "run", "spec.yaml"),
    "train_tokenizer": ("300",),
    "prompts": ("0 3 2", "1"),
    "device": ("cpu",),
    "format": ("auto", "text"),
    "shard_tokens": ("1000",),
    "max_shard_size": ("5GB", "1MB", "100KB"),
    "models": ("implicit-1", "explicit-2"),
    "name": ("acme", "mine"),
}
"""Valid values of options."""
SHORT = {
    "jacobian": ("--tokens", "3", "--width", "4", "--max-iterations", "4"),
    "duality": ("--sequences", "1", "--length", "3", "--tolerances", "0.1", "--max-iterations", "3"),
    "solvers": (
        "--sequences",
        "1",
        "--length",
        "3",
        "--max-iterations",
        "3",
        "--only",
        "picard",
        "--repeats",
        "1",
    ),
}
"""Options that shorten the experiments."""
OUTPUTS = (
    "out",
    "out/deep/er",
    "run",
    "text.txt",
    "text.txt/below",
    "x" * 300,
    "folder",
    "out.png",
    "/proc/no",
    "\udcff",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a folder with a run, tokens, texts and unusable files; return the folder."""
    folder = tmp_path_factory.mktemp("commands")
    before = Path.cwd()
    os.chdir(folder)
    lines = ["It was the best of times, it was the worst of times.", "Call me Ishmael.", "x"] * 40
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "empty").write_text("")
    (folder / "garbage").write_bytes(random.Random(0).randbytes(5000))
    (folder / "list.json").write_text("[]")
    (folder / "object.json").write_text("{}")
    (folder / "folder").mkdir()
    (folder / "folder" / "note").write_text("x")
    (folder / "deep.yaml").write_text("a: " + "[" * 3000)
    (folder / "spec.yaml").write_text("extends: word_problem_s3\n" + "training: {max_steps: 3}\n")
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        words = ["--spec", "word_problem_s3", *TINY, "--device", "cpu", "--output", "run"]
        assert trainer.cli.train.main(words) == 0, quiet.getvalue()
        words = [
            "text.txt",
            "--output",
            "tokens",
            "--tokenizer",
            "bytes",
            "--separator",
            "\n",
            "--workers",
            "1",
        ]
        assert trainer.data.tokenizing.command.main([*words, "--validation-fraction", "0.2"]) == 0, (
            quiet.getvalue()
        )
        assert implicit_blocks.__main__.main(["export", "run", "exported"]) in (0, 2), quiet.getvalue()
    shutil.copytree(folder / "run", folder / "damaged")
    (folder / "damaged" / "manifest.json").write_text("[1")
    (folder / "damaged" / "metrics.jsonl").write_text("{")
    shutil.rmtree(folder / "damaged" / "checkpoints")
    yield folder
    os.chdir(before)


@pytest.fixture
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RunFolderError("training is disabled here")

    def draw_some(runs: Any, path: Path, **options: Any) -> None:  # drawing takes longest
        drawn.append(path)
        if len(drawn) % 10 == 1:
            draw(runs, path, **options)

    drawn: list[Path] = []
    draw = trainer.reporting.report.draw
    monkeypatch.setattr(trainer.reporting.report, "draw", draw_some)
    for name in (
        "trainer.run.build.build",
        "trainer.experiments.common.runs.build",
        "trainer.experiments.equal_compute.experiment.train_recipes",
    ):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


class Maker:
    """Creates the command line of a case."""

    def __init__(self) -> None:
        self.parsers: list[tuple[str, list[str], argparse.ArgumentParser]] = []
        for name, program in PROGRAMS.items():
            parser = program.parser()
            commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            self.parsers += [
                (name, [word], one) for action in commands for word, one in action.choices.items()
            ]
            if not commands:
                self.parsers += [(name, [], parser)] * 4
        self.names = sorted(zoo_names())
        self.command: list[str] = []

    def make(self, case: int) -> tuple[str, list[str]]:
        rng = random.Random(case)
        name, words, parser = rng.choice(self.parsers)
        self.command = words
        words = list(words)
        sound = rng.random() < 0.75  # most words are valid
        positional, optional = [], []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction | argparse._VersionAction):
                if rng.random() < 0.01:
                    optional.append(["--help"])
            elif not action.option_strings:
                positional += self.values(action, rng, sound)
            elif action.required or rng.random() < (0.15 if sound else 0.3):
                optional.append([action.option_strings[0], *self.values(action, rng, sound)])
        rng.shuffle(optional)
        words += [*positional, *(word for option in optional for word in option)]
        if name == "trainer.tokenize" and "--verify" not in words:
            words += ["--workers", "1"]  # starting processes takes seconds
        if name == "trainer" and rng.random() < 0.5:
            words += ["--dry-run"]
        words += SHORT.get(words[0], ()) if words else ()
        if not sound:
            for _ in range(rng.randrange(3)):
                words.insert(rng.randrange(len(words) + 1), rng.choice(WORDS))
            if rng.random() < 0.2:
                rng.shuffle(words)
        return name, words

    def values(self, action: argparse.Action, rng: random.Random, sound: bool) -> list[str]:
        if action.nargs == 0:
            return []
        count = {"?": rng.randrange(2), "*": rng.randrange(3), "+": 1 + rng.randrange(2)}.get(
            str(action.nargs), action.nargs if isinstance(action.nargs, int) else 1
        )
        return [self.value(action, rng, sound) for _ in range(count)]

    def value(self, action: argparse.Action, rng: random.Random, sound: bool) -> str:
        if rng.random() < (0.03 if sound else 0.3):
            return rng.choice(WORDS)
        if action.choices:
            return str(rng.choice(list(action.choices)))
        key = action.dest
        if sound and key in SOUND and rng.random() < 0.8:
            return rng.choice(SOUND[key])
        if key in ("overrides", "set", "explicit_set"):
            return rng.choice(OVERRIDES)
        if key in ("output", "destination", "directory"):
            return rng.choice(OUTPUTS)
        if key in ("spec", "old", "new", "specs") and rng.random() < 0.6:  # exporting large models takes long
            return rng.choice(self.names if "export" not in str(self.command) else ["word_problem_s3", "run"])
        if key == "device":
            return rng.choice(["cpu", "cpu", "auto", "cuda", "cuda:9", "meta", "cpu:3", "x", "mps"])
        if key == "tasks":
            return rng.choice(
                ["lambada", "hellaswag", "hellaswag=text.txt", "x", "deep.yaml", "=", "lambada="]
            )
        if key == "tokenizer":
            return rng.choice(["bytes", "tokens", *INPUTS])
        if key == "prompts":
            return rng.choice(["0 3 2", "1", "", "It was", "-1", "999999", "0 " * 50, "9" * 5000])
        if key == "models":
            return rng.choice(
                ["implicit-1", "explicit-2", "implicit-mamba2", "llama", "implicit-0", "transformers:x"]
            )
        if key == "groups":
            return rng.choice(["S3", "A4", "Z7", "S99", "Z999999999", "x", "A5xZ2", ""])
        if key == "rate":
            return rng.choice(
                ["20000", "0", "nan", "bounded=3", "free=1,x=2", "=", "inf", "unrolled=1,free=2"]
            )
        if key == "validation_fraction":
            return rng.choice(["0.1", "0", "1", "-1", "nan", "2"])
        if action.type in (int, float, trainer.evaluation.command._positive):
            return rng.choice(SMALL if key in GROW or "iterations" in key or "steps" in key else NUMBERS)
        return rng.choice(INPUTS)


def _run(cases: range, place: Path, time_limit: Any) -> dict[int, int]:
    maker, codes = Maker(), dict.fromkeys(EXIT_CODES, 0)
    for case in cases:
        name, words = maker.make(case)
        try:
            code, err = _call(PROGRAMS[name].main, words, time_limit)
            assert code in EXIT_CODES, f"exit code {code!r}"
            assert "Traceback" not in err, err[-3000:]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            error.add_note(f"case {case}: {name} {words!r}"[:3000])
            raise
        codes[code] += 1
        _clear(place)
    return codes


def _call(main: Callable[[Sequence[str]], int], words: list[str], time_limit: Any) -> tuple[Any, str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")  # as in a terminal
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), time_limit():
        try:
            code: Any = main(words)
        except SystemExit as ended:  # raised by argparse
            code = ended.code
    err.flush()
    return code, err.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]  # a BytesIO


def _clear(place: Path) -> None:
    logging.disable(logging.NOTSET)
    kept = {"run", "damaged", "tokens", "exported", "folder"}
    for path in place.iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)


@pytest.mark.usefixtures("_no_training")
def test_random_command_lines_end_with_an_exit_code(place: Path, time_limit: Any) -> None:
    first = int(os.environ.get("FUZZ_CASE", "0"))
    cases = range(first, first + 1) if "FUZZ_CASE" in os.environ else range(60)
    codes = _run(cases, place, time_limit)
    assert codes[0] > 2 or "FUZZ_CASE" in os.environ  # some commands succeed


@pytest.mark.slow
@pytest.mark.usefixtures("_no_training")
def test_many_random_command_lines_end_with_an_exit_code(place: Path, time_limit: Any) -> None:
    assert _run(range(1_000, 1_000 + CASES), place, time_limit)[0] > CASES // 50
