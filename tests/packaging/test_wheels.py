"""Wheels and source distributions of the library and the plugins build, pass twine, and work installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("implicit_blocks", "trainer", "zoo", "plugins", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build every distribution, from a copy, because building writes into the source folder."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, source / name)
    folders = [source, *(path.parent for path in sorted(source.glob("plugins/*/pyproject.toml")))]
    for folder in folders:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", folder, cwd=source)
    return sorted((source / "dist").iterdir())


@pytest.mark.slow
def test_every_distribution_has_a_valid_wheel_and_source_archive(archives: list[Path]) -> None:
    pytest.importorskip("twine", reason="twine is not installed")
    assert len(archives) == 2 * (1 + len(list(ROOT.glob("plugins/*/pyproject.toml"))))
    assert run(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=archives[0].parent)


@pytest.mark.slow
def test_a_wheel_installed_in_a_new_environment_works(archives: list[Path], tmp_path: Path) -> None:
    """The dependencies come from this environment, without its installation of the project."""
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    (wheel,) = (
        path for path in archives if path.name.startswith("implicit_blocks-") and path.suffix == ".whl"
    )
    run(binaries / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trainer.py").write_text("raise SystemExit('mine')")
    shown = run(binaries / "implicit-blocks", "describe", "word_problem_s3", cwd=elsewhere)
    assert shown.startswith("word_problem_s3 · implicit_lm")
    shown = run(binaries / "implicit-blocks", "train", "--spec", "llama_130m", "--dry-run", cwd=elsewhere)
    assert shown.startswith("llama_130m (implicit_lm)")
    code = "from implicit_blocks._utils import own_packages as o; print(o.ROOT, o.install_extra('hf'))"
    place, command = run(binaries / "python", "-c", code, cwd=elsewhere / "..").split(" ", 1)
    assert Path(place) == site
    assert command.startswith("pip install 'transformers>=")
