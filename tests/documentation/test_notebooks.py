"""The teaching notebooks run from the first cell to the last in a fresh kernel; the site has their pages."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
FAST = "why_it_iterates"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 120_000
"""Bytes of a notebook with its pictures."""


def execute(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a notebook in a new kernel and return its code cells with their outputs."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    place = {"metadata": {"path": str(folder)}}
    # The default TCP transport warns that it is not encrypted.
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place)
    client.execute()
    return [cell for cell in notebook.cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == FAST else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_in_a_new_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = execute(path, tmp_path)
    drawn = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert drawn
    assert list(tmp_path.iterdir()) == []  # a reader's folder stays clean


def test_there_are_three_notebooks_with_small_stored_output() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"compose", "train_and_inspect", "why_it_iterates"}
    for path in NOTEBOOKS:
        assert path.stat().st_size < LARGEST, path
        outputs = [
            output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])
        ]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not any("/tmp/" in str(output.get("text", "")) for output in outputs)


def test_the_page_of_a_notebook_has_its_text_code_output_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    module = importlib.import_module("notebooks")
    (tmp_path / "notebooks").mkdir()
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "See [b](b.ipynb)."]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [{"text": ["1\n"]}, {"data": {"image/png": "QUJD\n"}}, {"data": {}}],
        },
    ]
    for name in ("a", "b"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    page = module.pages(tmp_path)["notebooks/a.md"]
    assert page.startswith("# Title\n\n[Download the notebook](a.ipynb)")
    for part in ("See [b](b.md).", "```python\nprint(1)\n```", "```text\n1\n```", 'base64,QUJD">'):
        assert part in page, part
