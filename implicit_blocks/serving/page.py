"""The page at ``/``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from implicit_blocks.serving.bundle import document, policy


def add_page(app: FastAPI, *dependencies: Any) -> None:
    """Add the page, one document without scripts or styles from elsewhere."""

    @app.get("/", dependencies=list(dependencies))
    async def page() -> HTMLResponse:
        headers = {
            "Content-Security-Policy": policy(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(document(), headers=headers)
