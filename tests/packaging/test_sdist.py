"""The source distribution and the wheel contain all files; installed, they have the zoo and the template."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("implicit_blocks", "trainer", "zoo")

BUILD = """
import os, shutil
from setuptools import build_meta

archive = build_meta.build_sdist("dist")
shutil.unpack_archive(os.path.join("dist", archive), "unpacked", filter="data")
if (child := os.fork()) == 0:  # setuptools keeps state
    os.chdir(os.path.join("unpacked", archive.removesuffix(".tar.gz")))
    build_meta.build_wheel("../../dist")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
"""Builds the source distribution, and a wheel from it."""

USE = """
import sys
import implicit_blocks, trainer, zoo
from implicit_blocks.registry.scaffold import create_plugin
from implicit_blocks.specs import load_spec

site = sys.argv[1]
assert all(package.__path__[0].startswith(site) for package in (implicit_blocks, trainer, zoo))
assert load_spec("word_problem_s3").model.mixer.kind == "mamba2"
assert load_spec("llama_1.3b_bounded").phases == ()
assert (create_plugin("from_sdist", family="mixer") / "pyproject.toml").is_file()
"""


def run_program(*command: object, cwd: Path, **environment: str) -> str:
    """Run a program and return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source distribution and the wheel."""
    source = tmp_path_factory.mktemp("source")  # building writes into the source folder
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    run_program(sys.executable, "-c", BUILD, cwd=source)
    (archive,), (wheel,) = ((source / "dist").glob(f"implicit_blocks-*.{kind}") for kind in ("tar.gz", "whl"))
    return archive, wheel


def sources(*suffixes: str) -> set[str]:
    """Return the files of the packages with these suffixes."""
    paths = {path for folder in PACKAGES for path in (ROOT / folder).rglob("*")}
    return {str(path.relative_to(ROOT)) for path in paths if path.suffix in suffixes}


def test_the_source_distribution_contains_all_packages_and_data(archives):
    with tarfile.open(archives[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = sources(".py", ".pyi", ".yaml", ".typed", ".template")
    assert names >= wanted | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_wheel_contains_the_packages_and_the_zoo(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        information = [name for name in archive.namelist() if ".dist-info/" in name]
    assert held == sources(".py", ".pyi", ".yaml", ".typed", ".template", ".html", ".css", ".js")
    assert any(name.endswith("licenses/LICENSE") for name in information)


def test_an_installed_source_distribution_has_the_zoo_and_the_template(archives, tmp_path):
    site = tmp_path / "site"
    shutil.unpack_archive(archives[1], site, "zip")  # as pip installs a wheel of Python files
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_program(sys.executable, "-c", USE, site, cwd=elsewhere, PYTHONPATH=str(site))
