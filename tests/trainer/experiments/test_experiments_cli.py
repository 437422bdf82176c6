"""``python -m trainer.experiments``: what all experiments share of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.experiments import cli
from trainer.experiments.commands import jacobian


@pytest.mark.parametrize("began", [False, True], ids=["nothing-yet", "runs-to-go-on-with"])
def test_an_interrupted_command_says_how_to_go_on(
    began: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folder: Path, options: object) -> str:
        if began:
            (folder / "runs").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(jacobian, "carry_out", stopped)
    folder = tmp_path / "out"
    assert cli.main(["jacobian", "--output", str(folder)]) == cli.INTERRUPTED
    said = f"go on by the same command with --output {folder}" if began else "nothing was written"
    assert capsys.readouterr().err == f"error: stopped; {said}\n"


def test_changes_are_asked_for_alike_by_all_that_train() -> None:
    needed = {"catbabi": ["--data", "x"], "language": ["--data", "x"], "word-problem": []}
    for name, more in needed.items():
        options = cli.parser().parse_args([name, *more, "--set", "a=1", "b=2", "--set", "c=3"])
        assert options.set == ["a=1", "b=2", "c=3"]
