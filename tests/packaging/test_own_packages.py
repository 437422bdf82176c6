"""User files named like our packages do not hide the packages beside `implicit_blocks`."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from implicit_blocks._utils import own_packages

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("name", ["trainer.py", "trainer/__init__.py", "trainer/notes.txt", "zoo/notes.txt"])
def test_a_user_file_named_like_a_package_does_not_hide_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("print('mine')\n")
    done = run(tmp_path, "-m", "implicit_blocks", "describe", "word_problem_s3")
    assert done.returncode == 0, done.stderr
    assert "word_problem_s3 · implicit_lm" in done.stdout
    assert "mine" not in done.stdout
    if name.startswith("trainer"):  # Python itself resolves `python -m trainer`
        hiding = path if path.suffix == ".py" else path.parent
        assert f"{hiding} " in done.stderr
        assert "python -P -m trainer" in done.stderr
    else:
        assert done.stderr == ""


def test_the_named_remedy_runs_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("print('mine')\n")
    (tmp_path / "trainer").mkdir()
    done = run(tmp_path, "-P", "-m", "trainer", "--spec", "word_problem_s3", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "word_problem_s3 (implicit_lm)" in done.stdout


def test_an_imported_module_that_shadows_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("")
    program = "import trainer, implicit_blocks as ib\nib.load_spec('word_problem_s3')"
    done = run(tmp_path, "-c", program)
    assert str(tmp_path / "trainer.py") in done.stderr
    assert "'trainer'" in done.stderr
    assert "install the distribution" not in done.stderr  # the distribution is installed


def test_install_extra_names_the_clone() -> None:
    words = shlex.split(own_packages.install_extra("hf"))
    assert words == ["pip", "install", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[hf]"]
    assert Path(words[3]).is_file()
    assert (Path(words[5].removesuffix("[hf]")) / "pyproject.toml").is_file()


@pytest.mark.parametrize("extra", ["hf", "serve", "eval"])
def test_install_extra_names_the_packages_of_an_installed_wheel(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_packages, "ROOT", tmp_path)
    words = shlex.split(own_packages.install_extra(extra))
    assert words[:2] == ["pip", "install"]
    named = {str(Requirement(word)) for word in words[2:]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {str(Requirement(text)) for text in project["optional-dependencies"][extra]}
    assert named >= {text for text in own if not text.startswith("implicit_blocks")}
    assert not any(text.startswith("implicit_blocks") for text in named)  # its extras are resolved


def test_install_extra_names_a_clone_if_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(own_packages, "ROOT", tmp_path)
    monkeypatch.setattr(metadata, "requires", missing)
    assert "clone of the repository" in own_packages.install_extra("hf")


def test_no_message_suggests_an_installation_from_a_package_index() -> None:
    files = [*(ROOT / "implicit_blocks").rglob("*.py"), *(ROOT / "trainer").rglob("*.py"), ROOT / "README.md"]
    files += (ROOT / "docs").glob("*.md")
    assert [path for path in files if "implicit_blocks[" in path.read_text(encoding="utf-8")] == []
