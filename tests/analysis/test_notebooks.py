"""The notebooks in docs run from the first cell to the last and reproduce their stored output."""

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
    """Replace numbers at rounding level, which differ between machines."""
    return re.sub(r"\b(0e\+00|\de-\d\d)|(?<=diagonal )\d+", "some", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reproduces_its_output(path):
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells(path, "code"), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
        shown = "".join("".join(output.get("text", [])) for output in cell["outputs"])
        assert rounded(printed.getvalue()) == rounded(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_pictures_of_a_notebook_exist(path):
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all((DOCS / picture).is_file() for picture in pictures)


def test_notebooks_exist():
    assert [path.name for path in NOTEBOOKS] == ["jacobian.ipynb"]
