"""The JSON schema of specs: pinned, complete, and what editors need; and the commands that print things."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks import registry
from implicit_blocks.__main__ import main
from implicit_blocks.specs import load_spec, zoo_names
from implicit_blocks.specs.schema import file_schema, run_schema

PINNED = Path(__file__).with_name("run_schema.json")


def test_the_schema_is_the_pinned_one(fresh_registry) -> None:
    """What specs look like is a promise; if the change is meant, write the new schema to the file.

    IMPLICIT_BLOCKS_PLUGINS=none python -m implicit_blocks schema --complete > tests/specs/run_schema.json
    """
    assert run_schema() == json.loads(PINNED.read_text())


def test_every_kind_is_there() -> None:
    definitions = run_schema()["$defs"]
    for family in set(registry.families()) - {"run"}:
        named = [definitions[one["$ref"].rpartition("/")[2]] for one in definitions[family]["oneOf"]]
        assert sorted(kind["properties"]["kind"]["const"] for kind in named) == registry.kinds(family)
        assert all("kind" in kind["required"] for kind in named)


def test_every_field_is_described() -> None:
    for name, definition in run_schema()["$defs"].items():
        for field, schema in definition.get("properties", {}).items():
            assert field == "kind" or schema.get("description"), f"{name}.{field}"


def test_a_file_may_leave_anything_to_what_it_extends() -> None:
    schema = file_schema()
    assert "extends" in schema["properties"]
    assert "required" not in schema
    assert "anyOf" in schema["$defs"]["solver"]
    assert schema["$defs"]["PicardSpec"]["additionalProperties"] is False


def _valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Enough of JSON schema for ours."""
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
def test_the_zoo_satisfies_it(name: str) -> None:
    complete, partial = run_schema(), file_schema()
    dumped = load_spec(name).model_dump(mode="json")
    assert _valid(dumped, complete, complete)
    assert not _valid({**dumped, "modle": 1}, complete, complete)
    assert _valid({"extends": name, "model": {"solver": {"damping": 0.5}}}, partial, partial)


def test_a_reader_may_stop_early() -> None:
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
    assert "Not in use:\n  broken  broken  1.2.3  ModuleNotFoundError: No module named" in out


def test_list_shows_what_is_switched_off(install, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    install("broken", "import no_such_module_anywhere")
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    assert main(["list"]) == 0
    assert "Switched off by IMPLICIT_BLOCKS_PLUGINS:" in capsys.readouterr().out


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
