"""``tools/create_venv.sh``, which `make` runs: it keeps a working environment and its packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "create_venv.sh"


def create(folder, *python):
    """Run the script with no Python on the path, so that it creates nothing."""
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
    assert "Python 3." in done.stdout
    assert "make clean" in done.stdout


def test_a_broken_environment_is_not_kept(tmp_path):
    done = create(environment(tmp_path / "broken", "exit 1"))
    assert done.returncode == 1
    assert "Python 3.11 or later" in done.stderr
    assert "python3" in done.stderr


def test_naming_a_python_replaces_a_working_environment(tmp_path):
    folder = environment(tmp_path / "works", f'exec "{sys.executable}" "$@"')
    done = create(folder, "python9")
    assert done.returncode == 1
    assert "python9" in done.stderr
