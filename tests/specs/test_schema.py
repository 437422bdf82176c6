"""The JSON schema of specs, compared with the pinned one, and the commands that print information."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from implicit_blocks import registry
from implicit_blocks.__main__ import main
from implicit_blocks.specs import SolverSpec, load_spec, zoo_names
from implicit_blocks.specs.schema import file_schema, run_schema

PINNED = Path(__file__).with_name("run_schema.json")


def test_the_schema_equals_the_pinned_one_apart_from_new_kinds(fresh_registry) -> None:
    """The format of specs is a promise. For an intended change, and with a release, pin the new schema.

    IMPLICIT_BLOCKS_PLUGINS=none python -m implicit_blocks schema --complete > tests/specs/run_schema.json
    """
    schema, pinned = run_schema(), json.loads(PINNED.read_text())
    assert without_new_kinds(schema, pinned) == pinned


def test_a_new_kind_does_not_change_the_rest_of_the_schema(fresh_registry) -> None:
    class NewSpec(SolverSpec):
        """A kind that is not pinned."""

        kind: Literal["new"] = "new"

    before = run_schema()
    registry.add("solver", NewSpec, "m:f", owner="me")
    assert run_schema() != before
    assert without_new_kinds(run_schema(), before) == before


def without_new_kinds(schema: dict[str, Any], pinned: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the kinds that the pinned one lacks; adding a kind breaks no spec file."""
    definitions = {name: found for name, found in schema["$defs"].items() if name in pinned["$defs"]}
    for family in registry.families():
        if family in definitions:
            known = [one for one in definitions[family]["oneOf"] if _definition(one) in definitions]
            definitions[family] = {**definitions[family], "oneOf": known}
    return {**schema, "$defs": definitions}


def _definition(reference: dict[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def test_the_schema_contains_every_kind() -> None:
    definitions = run_schema()["$defs"]
    for family in set(registry.families()) - {"run"}:
        named = [definitions[_definition(one)] for one in definitions[family]["oneOf"]]
        assert sorted(kind["properties"]["kind"]["const"] for kind in named) == registry.kinds(family)
        assert all("kind" in kind["required"] for kind in named)


def test_every_field_has_a_description() -> None:
    for name, definition in run_schema()["$defs"].items():
        for field, schema in definition.get("properties", {}).items():
            assert field == "kind" or schema.get("description"), f"{name}.{field}"


def test_no_key_of_a_file_is_required() -> None:
    schema = file_schema()
    assert "extends" in schema["properties"]
    assert "required" not in schema
    assert "anyOf" in schema["$defs"]["solver"]
    assert schema["$defs"]["PicardSpec"]["additionalProperties"] is False


@pytest.fixture(scope="module")
def schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of complete specs and that of files."""
    return run_schema(), file_schema()


def _valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Validate by the part of JSON schema that these schemas use."""
    if "$ref" in schema:
        return _valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "oneOf" in schema:
        return sum(_valid(value, option, root) for option in schema["oneOf"]) == 1
    if "anyOf" in schema:
        return any(_valid(value, option, root) for option in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return (
            set(value) <= set(known)
            and set(schema.get("required", [])) <= set(value)
            and all(_valid(entry, known[key], root) for key, entry in value.items())
        )
    if isinstance(value, list) and "items" in schema:
        return all(_valid(item, schema["items"], root) for item in value)
    return True


@pytest.mark.parametrize("name", [name for name in zoo_names() if "130m" in name or "problem" in name])
def test_the_zoo_satisfies_the_schema(name: str, schemas: tuple[dict[str, Any], dict[str, Any]]) -> None:
    complete, partial = schemas
    dumped = load_spec(name).model_dump(mode="json")
    assert _valid(dumped, complete, complete)
    assert not _valid({**dumped, "modle": 1}, complete, complete)
    assert _valid({"extends": name, "model": {"solver": {"damping": 0.5}}}, partial, partial)


def test_a_closed_pipe_is_not_an_error() -> None:
    program = f"{sys.executable} -m implicit_blocks schema | head -1"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_list_shows_kinds_owners_versions_and_failures(install, capsys: pytest.CaptureFixture[str]) -> None:
    install("broken", "import no_such_module_anywhere")
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    listed = [line.split()[:4] for line in out.splitlines() if line.startswith("solver")]
    version = registry.entry("solver", "picard").version
    assert listed == [["solver", kind, "implicit_blocks", version] for kind in registry.kinds("solver")]
    assert {"anderson", "picard"} <= {kind for _, kind, *_ in listed}
    assert "`" not in out  # docstring markup, which a terminal shows unrendered
    assert "Not in use:\n  broken  broken  1.2.3  ModuleNotFoundError: No module named" in out


def test_list_shows_disabled_plugins(install, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    install("broken", "import no_such_module_anywhere")
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    assert main(["list"]) == 0
    assert "Disabled by IMPLICIT_BLOCKS_PLUGINS:" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "schema"), [([], file_schema), (["--complete"], run_schema)])
def test_schema_prints_json(arguments: list[str], schema: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_errors_print_without_traceback(
    fresh_registry, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "entry", lambda *_: (_ for _ in ()).throw(ValueError("no such thing")))
    assert main(["schema"]) == 2
    assert capsys.readouterr().err == "error: no such thing\n"
