"""Plugins: found by entry point; failures are isolated; a clash rejects the whole plugin."""

from __future__ import annotations

import sys

import pytest

from implicit_blocks import registry
from implicit_blocks.specs import ImplicitLMSpec, SpecError, load_spec

GOOD = """
from typing import Literal
import implicit_blocks as ib

class {name}Spec(ib.SolverSpec):
    '''Half steps.'''
    kind: Literal["{kind}"] = "{kind}"
    share: float = 0.5

def build_it(spec, **context):
    return spec.share, context

@ib.hookimpl
def register_components(add):
    add("solver", {name}Spec, "{name}_module:build_it")
"""
MIXER = """
from typing import Literal
import implicit_blocks as ib
from pydantic import PositiveInt

class ShiftSpec(ib.MixerSpec):
    kind: Literal["acme.shift"] = "acme.shift"
    distance: PositiveInt = 1

@ib.hookimpl
def register_components(add):
    add("mixer", ShiftSpec, lambda spec, d_model: (spec, d_model))
"""


BUILT_IN = {
    kind
    for kind in registry.kinds("solver")
    if registry.entry("solver", kind).owner == registry.OWN_DISTRIBUTION
}


@pytest.fixture(autouse=True)
def _forget_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("_module"):
            del sys.modules[name]


def good(name: str, kind: str) -> str:
    return GOOD.format(name=name, kind=kind)


def test_existing_specs_accept_the_kind_of_a_plugin(install) -> None:
    install("acme", good("acme", "acme.half"))
    spec = ImplicitLMSpec(
        vocab_size=6,
        d_model=64,
        n_layers=1,
        mixer={"kind": "mamba2"},
        solver={"kind": "acme.half", "share": 0.25},
    )
    assert type(spec.solver).__name__ == "acmeSpec"
    entry = registry.entry("solver", "acme.half")
    assert entry.resolve_builder()(spec.solver, extra=1) == (0.25, {"extra": 1})
    assert (entry.owner, entry.version) == ("acme", "1.2.3")
    assert ImplicitLMSpec.model_validate_json(spec.model_dump_json()) == spec
    assert "acme.half" in str(ImplicitLMSpec.model_json_schema())


def test_yaml_uses_a_plugin_s_kind_by_name(install, write) -> None:
    install("acme", MIXER)
    name = write(
        "shift.yaml",
        "extends: word_problem_s3\nmodel: {mixer: {kind: acme.shift, distance: 3}}\n",
    )
    mixer = load_spec(name).model.mixer
    assert mixer.model_dump() == {"kind": "acme.shift", "distance": 3}
    assert registry.entry("mixer", "acme.shift").resolve_builder()(mixer, d_model=8) == (mixer, 8)


SHIFTED = {"shifted.yaml": "extends: word_problem_s3\nmodel: {mixer: {kind: acme.shift, distance: 3}}\n"}


@pytest.mark.parametrize("name", ["shifted", "zoo/shifted.yaml", "mine.yaml"])
def test_a_plugins_zoo_is_found_by_name(install, write, name: str) -> None:
    install("acme", MIXER, zoo=SHIFTED)
    write("mine.yaml", "extends: shifted\n")
    assert load_spec(name).model.mixer.model_dump() == {"kind": "acme.shift", "distance": 3}


def test_the_shipped_zoo_takes_precedence_over_plugins(install) -> None:
    install("acme", MIXER, zoo={"word_problem_s3.yaml": SHIFTED["shifted.yaml"]})
    assert load_spec("word_problem_s3").model.mixer.kind == "mamba2"


def test_a_spec_name_of_two_plugins_is_ambiguous(install) -> None:
    install("acme", MIXER, zoo=SHIFTED)
    install("other", good("other", "other.half"), zoo=SHIFTED)
    with pytest.raises(
        SpecError, match=r"several plugins have a spec 'shifted': .*acme_module.*other_module"
    ):
        load_spec("shifted")


def test_an_unknown_spec_mentions_disabled_plugins(install, monkeypatch) -> None:
    install("acme", MIXER, zoo=SHIFTED)
    with pytest.raises(SpecError, match="no spec 'shifte' in the zoo; did you mean 'shifted'"):
        load_spec("shifte")
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with (
        registry.isolated(),
        pytest.raises(SpecError, match=r"no spec 'shifted' in the zoo; .*PLUGINS disables: .*acme"),
    ):
        load_spec("shifted")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("value = 1", "it registers nothing"),
        (good("bad", "").replace('Literal[""] = ""', "str"), "has no kind"),
        (
            good("bad", "x").replace('add("solver"', 'add("solvr"'),
            "is a spec of family 'solver', not 'solvr'",
        ),
        (good("bad", "x").replace('"bad_module:build_it"', "3"), "pass a callable or 'package.module:Name'"),
        (
            good("bad", "x").replace("(add)", "(add, more)"),
            "Argument(s) {'more'} are declared in the hookimpl but can not be found in the hookspec; "
            "the hook is `register_components(add)`",
        ),
        (
            good("bad", "x").replace("def register_components", "def register_component"),
            "unknown hook 'register_component'; the hook is `register_components(add)`",
        ),
    ],
    ids=["import", "exit", "syntax", "nothing", "no-kind", "family", "builder", "arguments", "hook-name"],
)
def test_a_failing_plugin_is_reported_and_does_not_affect_others(install, source: str, reason: str) -> None:
    install("bad", source)
    install("fine", good("fine", "fine.half"))
    [failure] = registry.failures()
    assert (failure.name, failure.owner, failure.version) == ("bad", "bad", "1.2.3")
    assert reason in failure.reason
    assert {"picard", "anderson", "fine.half"} <= set(registry.kinds("solver"))
    assert "word_problem" in registry.kinds("data")


def test_a_directory_that_hides_a_plugin_is_reported(install, tmp_path, monkeypatch) -> None:
    install("bad", good("bad", "bad.half"))
    hiding = tmp_path / "elsewhere" / "bad_module"
    hiding.mkdir(parents=True)
    (next(tmp_path.rglob("bad_module.py"))).unlink()
    monkeypatch.syspath_prepend(str(hiding.parent))
    [failure] = registry.failures()
    assert f"the directory {hiding} was imported instead; run from another directory" in failure.reason


def test_an_unknown_kind_mentions_failed_plugins(install) -> None:
    install("bad", "import no_such_module_anywhere")
    with pytest.raises(registry.UnknownKindError, match=r"unknown solver 'bad.half'.*plugin 'bad' could not"):
        registry.entry("solver", "bad.half")


def test_a_clash_rejects_the_whole_second_plugin(install) -> None:
    install("first", good("first", "half"))
    both = good("second", "second.other").replace(
        'add("solver"', 'add("solver", secondSpec, "m:f")\n    add("solver"'
    )
    install("second", both)
    install("third", good("third", "picard"))
    reasons = {failure.name: failure.reason for failure in registry.failures()}
    assert set(reasons) == {"second", "third"}
    assert "solver 'picard' is already registered by implicit_blocks" in reasons["third"]
    assert "choose another kind, such as 'third.picard'" in reasons["third"]
    assert set(registry.kinds("solver")) - BUILT_IN == {"half"}


def test_the_variable_disables_third_party_plugins_only(install, monkeypatch) -> None:
    install("acme", good("acme", "acme.half"))
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    assert set(registry.kinds("solver")) == BUILT_IN
    assert "acme" in registry.switched_off()
    assert "word_problem" in registry.kinds("data")
    with pytest.raises(registry.UnknownKindError, match="IMPLICIT_BLOCKS_PLUGINS disables: acme"):
        registry.entry("solver", "acme.half")


def test_the_variable_lists_the_plugins_to_load(install, monkeypatch) -> None:
    install("acme", good("acme", "acme.half"))
    install("other", good("other", "other.half"))
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, " other , missing ")
    assert set(registry.kinds("solver")) - BUILT_IN == {"other.half"}
    [failure] = registry.failures()
    assert failure.name == "missing"
    assert "no plugin of that name is installed" in failure.reason
