"""The environment that `make` sets up: one that is there and works is kept, with what is in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "create_venv.sh"


def create(folder, *python):
    """Run the script where no other Python is to be found, so that nothing is made."""
    command = [shutil.which("bash"), str(SCRIPT), str(folder), *python]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={"PATH": "/nowhere"}
    )


def environment(folder, line):
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{shutil.which('bash')}\n{line}\n")
    python.chmod(0o755)
    return folder


def test_a_working_environment_is_kept(tmp_path):
    folder = environment(tmp_path / "works", f'exec "{sys.executable}" "$@"')
    done = create(folder)
    assert done.returncode == 0, done.stderr
    assert "is there already (Python 3." in done.stdout
    assert "make clean" in done.stdout


def test_a_broken_one_is_not_and_naming_a_python_asks_for_a_new_one(tmp_path):
    broken = create(environment(tmp_path / "broken", "exit 1"))
    assert broken.returncode == 1
    assert "Python 3.11 or later is needed; found: no working python3" in broken.stderr
    works = environment(tmp_path / "works", f'exec "{sys.executable}" "$@"')
    assert "found: no working python9" in create(works, "python9").stderr
