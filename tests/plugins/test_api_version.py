"""The version of the plugin interface: unsupported ones are rejected, deprecated ones give a warning."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

from implicit_blocks import registry
from implicit_blocks.registry import api_version
from implicit_blocks.registry.api_version import PluginDeprecationWarning, check_api_version, deprecated
from implicit_blocks.registry.hooks import API_VERSION
from implicit_blocks.specs.loading import load_spec

ROOT = Path(__file__).resolve().parents[2]

PLUGIN = """
from typing import Literal
import implicit_blocks as ib
{imports}
{version}

class HalfSpec(ib.SolverSpec):
    kind: Literal["{kind}"] = "{kind}"

@ib.hookimpl
def register_components(add):
    add("solver", HalfSpec, "implicit_blocks.solvers:Picard.from_spec")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a plugin of one module, found by its metadata; call it before any lookup."""
    names: list[str] = []

    def put(name: str, version: str, *, imports: str = "") -> None:
        source = PLUGIN.format(kind=f"{name}.half", version=version, imports=imports)
        (tmp_path / f"api_{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[implicit_blocks]\n{name} = api_{name}\n")
        names.append(name)
        monkeypatch.setenv(registry.PLUGINS_VARIABLE, ",".join(names))

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    with registry.isolated():
        yield put
    for name in set(sys.modules) - before:
        if name.startswith("api_"):
            del sys.modules[name]


def test_plugins_for_the_current_version_and_without_version_are_loaded(install):
    install("present", f'api_version = "{API_VERSION}"')
    install("silent", "")
    assert {"present.half", "silent.half"} <= set(registry.kinds("solver"))
    assert not registry.failures()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ('api_version = "2.0"', ["written for plugin interface 2.0", "install a newer implicit_blocks"]),
        ('api_version = "1.7"', ["written for plugin interface 1.7", f"has {API_VERSION}"]),
        ('api_version = "0.9"', ["supports 1.0 to 1.0", "install a newer version of the plugin"]),
        ("api_version = 1", ["its api_version is 1", 'api_version = "1.0"']),
        ('api_version = "one"', ["its api_version is 'one'", "MAJOR.MINOR"]),
        ('api_version = ".".join("20")', ["written for plugin interface 2.0"]),
    ],
    ids=["newer", "newer-minor", "older", "number", "word", "computed"],
)
def test_an_unsupported_version_is_rejected_and_does_not_affect_other_plugins(install, version, words):
    install("other", version)
    install("fine", 'api_version = "1.0"')
    (failure,) = registry.failures()
    assert (failure.name, failure.owner, failure.version) == ("other", "other", "1.2.3")
    for word in words:
        assert word in failure.reason
    assert {"picard", "fine.half"} <= set(registry.kinds("solver"))
    assert "other.half" not in registry.kinds("solver")
    assert load_spec("word_problem_s3").model.solver.kind == "picard"
    with pytest.raises(registry.UnknownKindError, match=r"other\.half.*plugin 'other' could not be used"):
        registry.entry("solver", "other.half")


def test_an_unsupported_version_is_reported_even_if_the_import_fails(install):
    install("other", 'api_version = "3.0"', imports="from implicit_blocks import SomethingOfThatTime")
    (failure,) = registry.failures()
    assert "written for plugin interface 3.0" in failure.reason


def test_a_deprecated_version_gives_a_warning(install, monkeypatch):
    monkeypatch.setattr(api_version, "API_VERSION", "2.1")
    install("old", 'api_version = "1.0"')
    with pytest.warns(PluginDeprecationWarning, match=r"plugin 'old' was written for plugin interface 1\.0"):
        assert "old.half" in registry.kinds("solver")


def test_an_older_minor_version_gives_no_warning(monkeypatch):
    monkeypatch.setattr(api_version, "API_VERSION", "1.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_api_version("1.1", "acme")
        check_api_version(None, "acme")


def test_a_deprecation_states_the_removal_and_the_replacement():
    with pytest.warns(
        PluginDeprecationWarning, match=r"Mixer\.old; this stops working with .* 2\.0: use new"
    ):
        deprecated("Mixer.old", instead="use new")


def test_contributing_and_changelog_name_the_current_version():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "api_version" in contributing
    newest = re.search(r"plugin interface (\d+\.\d+)", changelog)
    assert newest is not None
    assert newest[1] == API_VERSION
