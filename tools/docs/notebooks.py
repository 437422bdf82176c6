"""Pages of the notebooks: their text, code and stored output as Markdown, with the pictures in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pages(folder: Path) -> dict[str, str]:
    """Return the page of each notebook in ``folder/notebooks`` by its path in the site."""
    return {
        f"notebooks/{path.stem}.md": page(path) for path in sorted((folder / "notebooks").glob("*.ipynb"))
    }


def page(path: Path) -> str:
    """Return a notebook as Markdown, with a link to the file after the title."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in _cell(cell)]
    title, _, rest = parts[0].partition("\n")
    link = (
        f"[Download the notebook]({path.name}). The output below was stored when the notebook was last run."
    )
    text = "\n\n".join([title, link, rest.strip(), *parts[1:]]) + "\n"
    for other in path.parent.glob("*.ipynb"):  # notebooks link to files, pages to pages
        if other != path:
            text = text.replace(f"({other.name})", f"({other.stem}.md)")
    return text


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(part for output in cell["outputs"] for part in _output(output))]


def _output(output: dict[str, Any]) -> list[str]:
    if "text" in output:
        return [f"```text\n{''.join(output['text']).rstrip()}\n```"]
    picture = output.get("data", {}).get("image/png")
    if picture is None:
        return []
    encoded = "".join(picture).replace("\n", "")
    return [f'<img alt="The figure that the cell draws." src="data:image/png;base64,{encoded}">']
