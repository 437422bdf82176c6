"""The notebooks under docs run from the first cell to the last, and print what stands in them."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def rounded(text: str) -> str:
    """Numbers of rounding differ between machines: only whether there are some is compared."""
    return re.sub(r"\b(0e\+00|\de-\d\d)|(?<=diagonal )\d+", "some", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells(path, "code"), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
        shown = "".join("".join(output.get("text", [])) for output in cell["outputs"])
        assert rounded(printed.getvalue()) == rounded(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_pictures_are_there(path):
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all((DOCS / picture).is_file() for picture in pictures)


def test_there_are_some():
    assert [path.name for path in NOTEBOOKS] == ["jacobian.ipynb"]
