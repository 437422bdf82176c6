"""The console script ``implicit-blocks``: one name for every program, in any working directory."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import implicit_blocks.__main__
from implicit_blocks._utils import console
from implicit_blocks._utils.programs import UNREAD, run_program

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "pydantic", "transformers", "matplotlib", "trainer")
SCRIPT = "import sys; from implicit_blocks._utils.console import main; sys.exit(main())"


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder, as pip's launcher does: the folder is not on Python's path."""
    return subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_distribution_installs_the_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {console.SCRIPT: "implicit_blocks._utils.console:main"}


def test_the_script_has_every_command_of_the_library_with_its_summary() -> None:
    (commands,) = (
        action
        for action in implicit_blocks.__main__.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    described = {action.dest: action.help for action in commands._choices_actions}
    assert described.keys() == console.LIBRARY.keys()
    assert console.main(["--help"]) == 0


def test_the_list_of_commands_imports_no_library() -> None:
    show = f"print(set({HEAVY!r}) & sys.modules.keys())"
    code = f"import sys; from implicit_blocks._utils.console import main; main(['--help']); {show}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    for command in (*console.TRAINER, *console.LIBRARY):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("hiding", ["trainer.py", "zoo/notes.txt", "trainer/__init__.py"])
def test_a_user_s_files_hide_no_command(hiding: str, tmp_path: Path) -> None:
    path = tmp_path / hiding
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('mine')\n")
    done = start(tmp_path, "train", "--spec", "zoo/word_problem_s3.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("word_problem_s3 (implicit_lm)")
    assert done.stderr == ""


def test_a_process_server_imports_the_trainer_beside_a_user_s_file(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('mine')\n")
    code = "import implicit_blocks._utils.own_trainer, trainer; print(trainer.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(ROOT / "trainer" / "__init__.py"), done.stderr
    assert done.stderr == ""


def test_usage_messages_name_the_program_that_was_started(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["report", "--help"], ["describe", "--help"]):
        with pytest.raises(SystemExit):
            console.main(words)
        assert f"usage: implicit-blocks {words[0]} " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        console.main(["describe", "--help"], script="python -m implicit_blocks")
    assert "usage: python -m implicit_blocks describe " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tran"], "did you mean 'train'?"),
        (["train", "--outptu", "runs"], "did you mean --output?"),
        (["train", "--config", "mine.yaml"], "did you mean --spec?"),
        (["train", "--spec", "word_problem_s3", "--lr", "1e-3"], "training.optimizer.learning_rate=value"),
        (["describe", "word_problem_s3", "--tol=1"], "model.stopping.tolerance=value"),
        (["generate", "runs/none", "0", "--max-length", "3"], "did you mean --max-new-tokens?"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_word_is_answered_with_the_right_one(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = console.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "words",
    [
        ("-c", SCRIPT, "--help"),
        ("-m", "implicit_blocks", "describe", "word_problem_s3"),
        ("-m", "trainer", "--spec", "word_problem_s3", "--dry-run"),
        ("-m", "trainer.report", "--help"),
    ],
    ids=lambda words: words[1].partition(";")[0],
)
def test_a_program_without_a_reader_of_its_output_ends_silently(
    words: tuple[str, ...], unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, cwd=ROOT, check=False, timeout=120
    )
    os.close(writer)
    assert done.stderr.decode() == ""
    assert done.returncode == UNREAD or "--help" in words  # argparse ignores the error if unbuffered


def test_another_broken_pipe_keeps_its_traceback() -> None:
    def main() -> int:
        raise BrokenPipeError("the pipe of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_program(main)
