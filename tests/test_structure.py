"""The repository stays within the bars of ``tools/structure.py``, which counts correctly."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tools" / "structure.py"


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    return importlib.import_module("structure")


def test_every_row_of_the_table_is_within_its_bar(python: Any) -> None:
    """In a new process, since earlier imports and caches change which files are entered."""
    done = python.run([str(PROGRAM), "--check"], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_fails_and_names_the_row_above_its_bar(
    structure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "measure_source", lambda: {row.key: row.bar for row in structure.ROWS})
    monkeypatch.setattr(structure, "measure_actions", lambda: {"token.files": 1_000})
    assert structure.main([]) == 0
    assert structure.main(["--check"]) == 1
    assert "generated token: files entered: 1,000" in capsys.readouterr().err


def test_import_circles_are_counted_with_and_without_imports_in_functions(
    structure: Any, tmp_path: Path
) -> None:
    sources = {
        "__init__": "",
        "a": "import implicit_blocks.b\n",
        "b": "from implicit_blocks import c\n",
        "c": "def f():\n    from . import a\n",
        "d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from implicit_blocks import e\n",
        "e": "from implicit_blocks.d import name\n",
    }
    (tmp_path / "implicit_blocks").mkdir()
    for name, source in sources.items():
        (tmp_path / "implicit_blocks" / f"{name}.py").write_text(source, encoding="utf-8")
    modules = structure.find_modules(tmp_path)
    assert structure.circles(structure.import_graph(modules, functions=False)) == []
    assert structure.circles(structure.import_graph(modules, functions=True)) == [
        ["implicit_blocks.a", "implicit_blocks.b", "implicit_blocks.c"]
    ]


def test_a_lazy_name_counts_as_an_import_of_its_module(structure: Any, tmp_path: Path) -> None:
    sources = {
        "__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n",
        "a": "from implicit_blocks import b\nclass A: ...\n",
        "b": "from implicit_blocks import A, other\n",
    }
    (tmp_path / "implicit_blocks").mkdir()
    for name, source in sources.items():
        (tmp_path / "implicit_blocks" / f"{name}.py").write_text(source, encoding="utf-8")
    graph = structure.import_graph(structure.find_modules(tmp_path), functions=True)
    assert graph["implicit_blocks.b"] == {"implicit_blocks.a", "implicit_blocks"}
    assert structure.circles(graph) == [["implicit_blocks.a", "implicit_blocks.b"]]


def test_two_circles_that_share_a_module_are_one(structure: Any) -> None:
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}, "f": {"f"}}
    assert structure.circles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_the_length_of_a_class_excludes_docstrings(structure: Any, tmp_path: Path) -> None:
    source = (
        'class A:\n    """One.\n\n    Two.\n    """\n\n'
        '    def f(self):\n        """Three."""\n        return 1\n'
    )
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert list(structure.class_lengths(tmp_path / "module.py")) == [(4, "A")]


def test_a_trace_orders_files_by_first_calls_and_counts_changes_of_file(
    structure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    functions: dict[str, Any] = {}
    sources = {
        "implicit_blocks/a.py": "def first(): second(); other(); fourth(); second()\ndef fourth(): other()\n",
        "trainer/b.py": "def second(): third()\ndef third(): pass\n",
        "elsewhere/c.py": "def other(): third()\n",
    }
    for path, source in sources.items():
        exec(compile(source, str(tmp_path / path), "exec"), functions)
    with structure.Trace() as trace:
        functions["first"]()
    functions["other"]()
    assert trace.files == ["implicit_blocks/a.py", "trainer/b.py"]
    assert trace.changes == 2  # first | second, third | fourth
    assert trace.walk == [
        ("implicit_blocks/a.py", ["first"]),
        ("trainer/b.py", ["second", "third"]),
        ("implicit_blocks/a.py", ["fourth"]),
    ]
