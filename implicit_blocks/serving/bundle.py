"""The page as one document: styles and scripts of ``static`` inline, and on request the data of a report."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

STATIC = Path(__file__).with_name("static")
SCRIPTS = ("elements.js", "charts.js", "answer.js", "page.js")
"""The scripts in their order."""
_STYLE, _SCRIPT = "<!-- style -->", "<!-- script -->"


@cache
def _parts() -> tuple[str, str, str]:
    def text(name: str) -> str:
        return (STATIC / name).read_text(encoding="utf-8")

    script = "".join(text(name) for name in SCRIPTS)
    return text("index.html"), text("page.css"), f'"use strict";\n{script}'


def document(data: Any = None) -> str:
    """Return the page; with ``data``, as a report that shows them instead of asking a server."""
    page, style, script = _parts()
    element = ""
    if data is not None:
        written = json.dumps(data, allow_nan=False, separators=(",", ":"))
        written = written.replace("<", "\\u003c")  # nothing in a text ends the element
        element = f'<script type="application/json" id="report-data">{written}</script>\n'
    page = page.replace(_STYLE, f"<style>{style}</style>", 1)
    return page.replace(_SCRIPT, f"{element}<script>{script}</script>", 1)


@cache
def policy() -> str:
    """Return the page's content security policy: its own style and script, and requests to its server."""
    _, style, script = _parts()

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
