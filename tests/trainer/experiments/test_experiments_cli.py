"""``python -m trainer.experiments``: the common command line."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path

import pytest
import torch

from trainer.cli.exit_codes import INTERRUPTED
from trainer.errors import FailedSaveError, NonFiniteLossError
from trainer.experiments import cli
from trainer.experiments.jacobian import command as jacobian
from trainer.experiments.language import command as language


@pytest.mark.parametrize("began", [False, True], ids=["nothing-yet", "runs-to-go-on-with"])
def test_an_interrupted_command_reports_how_to_resume(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folder: Path, options: object) -> str:
        if began:
            (folder / "runs").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(jacobian, "run_command", stopped)
    folder = tmp_path / "out"
    assert cli.main(["jacobian", "--output", str(folder)]) == INTERRUPTED
    message = f"resume by the same command with --output {folder}" if began else "nothing was written"
    assert capsys.readouterr().err == f"error: interrupted; {message}\n"


def test_all_training_experiments_share_the_set_option() -> None:
    needed = {"catbabi": ["--data", "x"], "language": ["--data", "x"], "word-problem": []}
    for name, more in needed.items():
        options = cli.parser().parse_args([name, *more, "--set", "a=1", "b=2", "--set", "c=3"])
        assert options.set == ["a=1", "b=2", "c=3"]


def test_repeated_explicit_set_options_accumulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[argparse.Namespace] = []
    monkeypatch.setattr(language, "run_command", lambda folder, options: asked.append(options) or "")
    given = ["language", "--data", "x", "--explicit-set", "a=1", "--explicit-set", "b=2"]
    assert cli.main([*given, "--output", str(tmp_path / "out")]) == 0
    assert asked[0].explicit_set == ["a=1", "b=2"]


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["word-problem", "--seed", "0", "--seeds", "1"])
    assert "unrecognized arguments: --seed 0" in capsys.readouterr().err


NOT_FINITE = NonFiniteLossError(step=2, phase="free", quantity="loss", value=float("nan"), samples=(0, 8))
FULL = FailedSaveError(step=3, reason="No space left on device", kept=None)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("width is 0"), 2, "width is 0"),
        (NOT_FINITE, 3, "lengthen training.schedule.warmup, by --set"),
        (FULL, 4, "could not be saved (No space left on device)"),
        (OSError(errno.ENOSPC, "No space left on device", "out/a.json"), 4, "out/a.json: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "out/a.json"), 4, "out/a.json: Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 2, "out: Permission denied; check"),
        (MemoryError("Unable to allocate 23.8 GiB"), 2, "out of memory (Unable to allocate 23.8 GiB); lower"),
        (torch.OutOfMemoryError("CUDA out of memory. GPU 0 has"), 2, "lower training.micro_batch_size"),
    ],
    ids=[
        "asked",
        "not-finite",
        "not-saved",
        "full-disk",
        "read-only",
        "not-permitted",
        "host-memory",
        "memory",
    ],
)
def test_expected_errors_give_a_message_and_exit_code(
    error: Exception,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failed(folder: Path, options: object) -> str:
        raise error

    monkeypatch.setattr(jacobian, "run_command", failed)
    assert cli.main(["jacobian", "--output", str(tmp_path / "out")]) == code
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert message in text


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(folder: Path, options: object) -> str:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(jacobian, "run_command", failed)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["jacobian", "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["duality", "--checkpoint", "x", "--tolerances", "0.05", "5e-2"],
            "--tolerances contains 0.05 2 times",
        ),
        (["word-problem", "--seeds", "0", "1", "0"], "--seeds contains 0 2 times; give each value once"),
        (["word-problem", "--seeds", "0", "--seeds=1"], "--seeds is given 2 times; give it once with all"),
        (
            ["jacobian", "--dt", "0.1", "0.1", "--dt", "1", "1"],
            "--dt is given 2 times; give it once with all",
        ),
    ],
)
def test_repeated_options_and_values_are_rejected(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_results_of_an_earlier_call_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jacobian, "run_command", lambda folder, options: "")
    (tmp_path / "duality.json").touch()
    assert cli.main(["jacobian", "--output", str(tmp_path)]) == 0  # of another experiment
    (tmp_path / "jacobian.json").touch()
    assert cli.main(["jacobian", "--output", str(tmp_path)]) == 2
    assert (
        "contains the results of an earlier call (jacobian.json); choose another" in capsys.readouterr().err
    )


def test_unwritable_outputs_are_rejected_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worked: list[object] = []
    monkeypatch.setattr(jacobian, "run_command", lambda *asked: worked.append(asked) or "")
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["jacobian", "--output", str(file)]) == 2
    assert f"the output {file} is a file, not a directory; choose another" in capsys.readouterr().err
    assert cli.main(["jacobian", "--output", str(file / "out")]) == 2
    assert f"is inside {file}, which is a file" in capsys.readouterr().err
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        assert cli.main(["jacobian", "--output", str(tmp_path / "out")]) == 2
    assert "the plot needs matplotlib; pip install" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda place, mode: False)
    assert cli.main(["jacobian", "--output", str(tmp_path / "out")]) == 2
    assert f"cannot be written: no permission in {tmp_path}" in capsys.readouterr().err
    assert not worked


@pytest.mark.parametrize("name", cli.EXPERIMENTS)
def test_the_help_of_every_experiment_can_be_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert "--output" in capsys.readouterr().out
