"""``new-plugin``: the plugin works unchanged; invalid requests are rejected and write nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from implicit_blocks.__main__ import main
from implicit_blocks.registry.scaffold import FAMILIES, PluginNames, choose_names, create_plugin, writing
from implicit_blocks.registry.scaffold.writing import render

ROOT = Path(__file__).resolve().parents[2]
LONGEST = "abcdefghij_klmnopqrst_uvwxyz12"


def contents(folder: Path) -> dict[str, str]:
    ignored = {"__pycache__", ".pytest_cache", ".ruff_cache"}
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
        and not ignored & set(path.parts)
        and not any(part.endswith(".egg-info") or part == "build" for part in path.parts)
    }


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------- the plugin


def test_the_template_plugin_equals_the_command_s_output():
    assert contents(ROOT / "plugins" / "template") == render(PluginNames("template", "mixer"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plugin_is_a_complete_distribution(empty, family):
    folder = create_plugin("acme_thing", family=family)
    assert folder == empty / "acme_thing"
    held = set(contents(folder))
    package = "src/implicit_blocks_acme_thing"
    assert held >= {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        f"{package}/__init__.py",
        f"{package}/py.typed",
        f"{package}/spec.py",
        f"{package}/{family}.py",
        f"{package}/zoo/word_problem_s3_acme_thing.yaml",
        "tests/test_acme_thing_contracts.py",
        "tests/test_acme_thing_training.py",
    }
    assert not any("@" in name or "template" in name for name in held)
    for name, text in contents(folder).items():
        for word in ("@NAME@", "@CLASS@", "@MODULE@", "@FAMILY@", "@API@", "@LIBRARY@", "@BUILDER@"):
            assert word not in text, (name, word)


@pytest.mark.parametrize("name", ["q", "acme_thing", LONGEST])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_passes_ruff_with_names_of_any_length(empty, family, name):
    folder = create_plugin(name, family=family)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def plugins(tmp_path_factory, install_wheels):
    """Create a plugin of every family, and install them in the directory `site` beside them."""
    base = tmp_path_factory.mktemp("plugins")
    names = [f"acme_{family}_thing" for family in FAMILIES]
    for name, family in zip(names, FAMILIES, strict=True):
        create_plugin(name, family=family, directory=base / name)
        shutil.copytree(base / name, base / "sources" / name)  # building writes into the source folder
    install_wheels([base / "sources" / name for name in names], base / "site")
    return base


def with_plugin(name: str, site: Path) -> dict[str, str]:
    """Return the environment in which programs find one of the installed plugins."""
    path = os.pathsep.join([str(site), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IMPLICIT_BLOCKS_PLUGINS": name}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plugin_passes_its_own_tests(plugins, family):
    name = f"acme_{family}_thing"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=plugins / name,
        env=with_plugin(name, plugins / "site"),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_plugin_is_listed_and_trains_from_yaml(empty, family, plugins, python):
    name = f"acme_{family}_thing"
    environment = with_plugin(name, plugins / "site")
    small = ["training.max_steps=2", "training.batch_size=4", "evaluation.sequences=4"]
    small += ["evaluation.lengths=[32]", "evaluation.batch_size=4", "model.d_model=32"]
    small += ["model.stopping.max_iterations=4", "model.at_evaluation.stopping.max_iterations=8"]
    listing = ["-m", "implicit_blocks", "list"]
    training = ["-m", "trainer", "--spec", f"word_problem_s3_{name}", "--output", "run", *small]
    for arguments in (listing, training):
        done = python.run(arguments, cwd=empty, environment=environment, warnings="error")
        assert done.returncode == 0, done.stderr
        if arguments is listing:
            row = next(line for line in done.stdout.splitlines() if name in line).split()
            assert row[:4] == [family, name, f"implicit-blocks-acme-{family}-thing", "0.1.0"]
    records = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in record for record in records) == 2


def test_the_command_prints_the_next_steps(empty, capsys):
    assert main(["new-plugin", "acme_thing", "--family", "solver", "--directory", "deep/er/folder"]) == 0
    message = capsys.readouterr().out
    for command in (
        "python -m pip install -e 'deep/er/folder[test]'",
        "implicit-blocks train --spec word_problem_s3_acme_thing",
        "python -m pytest deep/er/folder",
    ):
        assert command in message
    assert Path("deep/er/folder/pyproject.toml").is_file()


def test_the_plugin_can_be_written_to_the_empty_working_directory(empty):
    assert create_plugin("acme_thing", family="mixer", directory=".") == empty
    assert (empty / "src").is_dir()
    assert not [path for path in empty.iterdir() if path.name.startswith(".new-plugin")]


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("acme-thing", ["not a lower-case identifier", "'acme_thing'"]),
        ("Acme", ["not a lower-case identifier", "'acme'"]),
        ("3d", ["not a lower-case identifier", "'p_3d'"]),
        ("a__b", ["not a lower-case identifier", "'a_b'"]),
        ("_x", ["not a lower-case identifier"]),
        ("größe", ["not a lower-case identifier"]),
        ("../up", ["not a lower-case identifier", "'up'"]),
        ("", ["not a lower-case identifier", "'acme_shift'"]),
        ("class", ["a Python keyword", "'my_class'"]),
        ("match", ["a Python keyword"]),
        ("a" * 31, ["31 characters", "at most 30"]),
        ("mixer", ["reserved", "'Mixer'"]),
        ("window", ["reserved", "'Window'"]),
        ("picard", ["taken", "solver 'picard' is registered by implicit_blocks", "'my_picard'"]),
        ("word_problem", ["taken", "data 'word_problem'"]),
        ("trainer", ["taken", "has a plugin of this name"]),
        ("json", ["taken", "standard library"]),
        ("numpy", ["taken", "module 'numpy' is installed"]),
        ("explicit", ["taken", "the zoo has a spec 'word_problem_s3_explicit'"]),
    ],
)
def test_invalid_and_taken_names_are_rejected(empty, capsys, name, messages):
    assert main(["new-plugin", name, "--family", "mixer"]) == 2
    text = capsys.readouterr().err
    for message in messages:
        assert message in text
    assert not list(empty.iterdir())


def test_the_name_of_a_plugin_that_failed_to_load_is_taken(empty, monkeypatch, tmp_path):
    from implicit_blocks import registry

    info = tmp_path / "site" / "broken-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[implicit_blocks]\nbroken_one = broken_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with registry.isolated(), pytest.raises(ValueError, match=r"broken 0\.1 has a plugin of this name"):
        choose_names("broken_one", "mixer")


def test_a_family_without_a_template_is_rejected(empty, capsys):
    with pytest.raises(ValueError, match="no template for family 'optimizer'; choose one of mixer, solver"):
        create_plugin("acme_thing", family="optimizer")
    with pytest.raises(SystemExit):
        main(["new-plugin", "acme_thing", "--family", "optimizer"])
    assert "mixer" in capsys.readouterr().err


def test_a_directory_that_is_not_empty_is_not_changed(empty, capsys):
    folder = empty / "taken"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    assert main(["new-plugin", "acme_thing", "--family", "mixer", "--directory", "taken"]) == 2
    message = capsys.readouterr().err
    assert "is not empty (it contains mine.txt)" in message
    assert "--directory" in message
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_file_as_directory_is_rejected(empty):
    (empty / "acme_thing").write_text("")
    with pytest.raises(ValueError, match="is a file; give a new or empty directory"):
        create_plugin("acme_thing", family="mixer")
    with pytest.raises(ValueError, match=r"cannot (write|read)"):
        create_plugin("acme_thing", family="mixer", directory=empty / "acme_thing" / "deeper")


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("broken", ["write", "move"])
def test_an_error_while_writing_leaves_no_files(empty, monkeypatch, broken, existing):
    target = empty / "deep" / "folder"
    if existing:
        target.mkdir(parents=True)
    calls = 0

    def fails(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        return original(*arguments, **options)

    place, name = (Path, "write_text") if broken == "write" else (writing.os, "replace")
    original = getattr(place, name)
    monkeypatch.setattr(place, name, fails)
    with pytest.raises(ValueError, match="No space left on device; give another --directory"):
        create_plugin("acme_thing", family="mixer", directory=target)
    if existing:
        assert target.is_dir()
        assert not list(target.iterdir())
    else:
        assert not list(empty.iterdir())
