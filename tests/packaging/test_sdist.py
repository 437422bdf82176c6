"""The source distribution builds, and an installation from it has the zoo and the plugin template."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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


def test_an_installed_source_distribution_contains_all_packages_and_data(tmp_path):
    source = tmp_path / "source"  # building writes into the source folder
    source.mkdir()
    for folder in ("implicit_blocks", "trainer", "zoo"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    run_program(sys.executable, "-c", BUILD, cwd=source)
    (archive,) = (source / "dist").glob("implicit_blocks-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    (wheel,) = (source / "dist").glob("implicit_blocks-*.whl")
    wanted = {
        str(path.relative_to(ROOT))
        for folder in ("implicit_blocks", "trainer", "zoo")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml", ".typed", ".template"}
    }
    assert names >= wanted | {"pyproject.toml", "README.md", "LICENSE"}

    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")  # as pip installs a wheel of Python files
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_program(sys.executable, "-c", USE, site, cwd=elsewhere, PYTHONPATH=str(site))
