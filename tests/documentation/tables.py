"""Stored results, and the tables of pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def words(path: str) -> str:
    """Return a text in one line."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def catbabi_tests() -> list[dict[str, Any]]:
    """Return the results of the zoo's recipes for CatbAbI on the test split, those with longer rows first."""
    found = results("catbabi")
    return [*(row for row in found["longer_rows"]["test"] if "spec" in row), *found["test"]]


def table(page: str, beginning: str) -> list[list[str]]:
    """Return the cells of the table of a page whose header begins with this text, without emphasis."""
    lines = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {beginning}"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return rows


def percent(*shares: float, digits: int = 1) -> str:
    return ", ".join(f"{100 * share:.{digits}f}" for share in shares) + " %"
