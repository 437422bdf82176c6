"""The page at ``/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse

PAGE = Path(__file__).with_name("static") / "index.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_page(app: FastAPI, *dependencies: Any) -> None:
    """Add the page, one file without scripts or styles from elsewhere."""

    @app.get("/", dependencies=list(dependencies))
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=_HEADERS)
