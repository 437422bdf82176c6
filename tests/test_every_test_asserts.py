"""Every test has an assertion, itself or in a helper that it calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")])

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Calls that fail a test: of pytest, torch and mock, of helpers named check_*, and of contracts, such as
# MIXER_CONTRACTS[name](spec).
ASSERTING_CALL = re.compile(
    r"pytest\.(raises|warns|fail)|(.*\.)?(assert_\w+|check(_\w+)?)|.*_CONTRACTS\[.+\]"
)

# Tests without an assertion, as "file::test". Remove an entry when its test asserts; add none.
EXEMPT: frozenset[str] = frozenset()


def unasserting_tests(source: str) -> list[str]:
    """Return the names of the test functions of a module that assert nothing."""
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    return [name for name in functions if name.startswith("test_") and not asserts(name, functions, set())]


def asserts(name: str, functions: Mapping[str, Function], visited: set[str]) -> bool:
    """Return whether a function asserts, itself or through the functions of its module that it calls."""
    visited.add(name)
    if any(isinstance(node, ast.Assert) for node in ast.walk(functions[name])):
        return True
    for call in calls(functions[name]):
        if ASSERTING_CALL.fullmatch(call):
            return True
        if call in functions and call not in visited and asserts(call, functions, visited):
            return True
    return False


def calls(function: Function) -> Iterator[str]:
    """Yield the names of the functions that a function calls, with their dots."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_every_test_asserts() -> None:
    found = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in FILES
        for name in unasserting_tests(path.read_text(encoding="utf-8"))
    }
    assert len(FILES) > 100
    assert not found - EXEMPT, "\n".join(["without an assertion:", *sorted(found - EXEMPT)])
    assert not EXEMPT - found, "\n".join(["remove from EXEMPT:", *sorted(EXEMPT - found)])


@pytest.mark.parametrize(
    "body",
    [
        "assert f()",
        "with pytest.raises(ValueError):\n        f()",
        "with pytest.warns(UserWarning):\n        f()",
        "torch.testing.assert_close(f(), 1)",
        "check_mixer(f)",
        "MIXER_CONTRACTS[name](f)",
        "helper()",
    ],
)
def test_an_assertion_is_recognized(body: str) -> None:
    source = f"def test_it():\n    {body}\ndef helper():\n    inner()\ndef inner():\n    assert f()\n"
    assert unasserting_tests(source) == []


@pytest.mark.parametrize("body", ["f()", "helper()", "pytest.skip()", "with f():\n        pass"])
def test_a_test_without_an_assertion_is_found(body: str) -> None:
    source = f"def test_it():\n    {body}\ndef helper():\n    helper()\n"
    assert unasserting_tests(source) == ["test_it"]
