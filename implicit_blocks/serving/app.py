"""The HTTP application: access, endpoints, streams, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.serving.bodies import ChatBody, CompletionBody, read
from implicit_blocks.serving.bundle import document, policy
from implicit_blocks.serving.engine import Engine
from implicit_blocks.serving.errors import ApiError, shown
from implicit_blocks.serving.events import END, EventStream, client_left, event, json_response
from implicit_blocks.serving.formats import Format
from implicit_blocks.serving.inspect_api import add_inspections
from implicit_blocks.serving.links import Link
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.options import is_loopback
from implicit_blocks.serving.served import ServedModel, Setup
from implicit_blocks.serving.texts import Piece, Text, Texts

_LOG = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""The status of a request whose client left before the answer, as in nginx's logs."""


_TEXT_PATHS = ("/v1/completions", "/v1/chat/completions")
"""The paths of most requests, routed without the dependencies of FastAPI, which take as long as the rest."""

_Check = Callable[[Request], Awaitable[None]]


def create_app(setups: Sequence[Setup], links: Sequence[Link]) -> FastAPI:
    """Return the application that serves models, each through the link to its worker.

    The options of the first model are those of the server, and its tokens those of the metrics. The workers
    run while the application does.
    """
    metrics = [Metrics(setup.options.max_batch_size) for setup in setups]
    engines = [
        Engine(link, setup.options, own) for setup, link, own in zip(setups, links, metrics, strict=True)
    ]
    models = {setup.name: ServedModel(setup, engine) for setup, engine in zip(setups, engines, strict=True)}
    served, options, counted = models[setups[0].name], setups[0].options, metrics[0]

    def find(name: str) -> ServedModel:
        if (found := models.get(name)) is not None:
            return found
        raise ApiError(
            404,
            f"the model {shown(name)} is not served here; {did_you_mean(name, list(models))}",
            param="model",
            code="model_not_found",
        )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in models.values():
            await each.engine.start()
        try:
            yield
        finally:
            await asyncio.gather(*(each.engine.close() for each in models.values()))

    app = FastAPI(title="implicit_blocks", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.served, app.state.metrics, app.state.models = served, counted, models
    app.add_middleware(_Counted, metrics=counted)
    is_open = options.no_auth or not is_loopback(options.host)
    local_checks: list[_Check] = [_check_host] if options.api_key is None and not is_open else []
    checks = local_checks if options.api_key is None else [_key_check(options.api_key)]
    local, allowed = list(map(Depends, local_checks)), list(map(Depends, checks))

    @app.get("/health", dependencies=local)
    async def health() -> JSONResponse:
        for each in models.values():
            if (trouble := each.engine.trouble) is not None:
                raise ApiError(503, trouble, code="unavailable", retry_after=5)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", dependencies=allowed)
    async def prometheus() -> Response:
        return Response(counted.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", dependencies=allowed)
    async def all_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [each.card() for each in models.values()]})

    @app.get("/v1/models/{name:path}", dependencies=allowed)
    async def model(name: str) -> JSONResponse:
        return JSONResponse(find(name).card())

    async def completions(request: Request) -> Response:
        for check in checks:
            await check(request)
        body = read(CompletionBody, await _body(request, options.max_body_bytes))
        texts, format = find(body.model).completion(body)
        return await _answer(request, body.stream, body.includes_usage, texts, format)

    async def chat(request: Request) -> Response:
        for check in checks:
            await check(request)
        body = read(ChatBody, await _body(request, options.max_body_bytes))
        texts, format = find(body.model).chat(body)
        return await _answer(request, body.stream, body.includes_usage, texts, format)

    for path, endpoint in zip(_TEXT_PATHS, (completions, chat), strict=True):
        app.add_route(path, endpoint, methods=["POST"])
    add_inspections(app, find, lambda request: _body(request, options.max_body_bytes), allowed)

    @app.get("/", dependencies=local)
    async def page() -> HTMLResponse:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(document(), headers={"Content-Security-Policy": policy(), **headers})

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


# ------------------------------------------------------------------------------------ access


def _key_check(api_key: str) -> _Check:
    expected = _digest(api_key.strip().encode())

    async def check(request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # the bytes that were sent
        if kind.lower() != "bearer" or not hmac.compare_digest(digest, expected):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    return check


def _digest(key: bytes) -> bytes:
    """Return a digest of a key, so that a comparison shows neither its content nor its length."""
    return hashlib.sha256(key).digest()


async def _check_host(request: Request) -> None:
    """Refuse requests to a server without a key from other machines, and under another name of this one.

    By such a name a web page could reach the server. Requests from other machines arrive where a proxy, such
    as Ray's, listens at more addresses than the options name.
    """
    name = re.sub(r":\d*$", "", request.headers.get("host", ""))
    peer = "127.0.0.1" if request.client is None else request.client.host
    if not (is_loopback(name) and is_loopback(peer)):
        raise ApiError(
            403, "this server answers at 127.0.0.1 and localhost only; use such an address, or an API key"
        )


async def _body(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # web pages of other sites can send other types without asking
        raise ApiError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(
                413,
                f"the body is larger than {limit} bytes; send fewer prompts per request",
                code="body_too_large",
            )
        parts.append(part)
    return b"".join(parts)


# ------------------------------------------------------------------------------------ answers


async def _answer(
    request: Request, stream: bool | None, usage: bool, texts: Texts, format: Format
) -> Response:
    texts.submit()
    if stream:
        return EventStream(_events(texts, format, usage=usage), leave=texts.leave, close=texts.close)
    work = asyncio.ensure_future(_collect(texts))
    left = asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=CLIENT_LEFT)
        return json_response(format.whole(texts, work.result()))
    finally:
        for task in (work, left):
            task.cancel()
        texts.close()


async def _collect(texts: Texts) -> list[Piece]:
    wholes = [Piece() for _ in texts.texts]
    async for found in texts.pieces():
        for text, piece in found:
            wholes[text.job.index].append(piece)
    return wholes


async def _events(texts: Texts, format: Format, *, usage: bool) -> AsyncIterator[bytes]:
    opened: set[int] = set()

    def chunks(text: Text, piece: Piece) -> list[dict[str, Any] | None]:
        first = format.opening(text) if text.job.index not in opened else None
        opened.add(text.job.index)
        return [first, format.chunk(text, piece)]

    rest = b""  # what is sent with the end, in one write
    try:
        async for found in texts.pieces():
            ready = [chunk for pair in found for chunk in chunks(*pair) if chunk is not None]
            rest = b"".join(event(chunk) for chunk in ready)
            if rest and not texts.ended:
                yield rest
                rest = b""
        if usage:
            rest += event(format.closing(texts))
    except ApiError as error:
        rest += event(error.body())
    except Exception:
        _LOG.exception("a stream failed")
        rest += event(_UNEXPECTED.body())
    yield rest + END


# ------------------------------------------------------------------------------------ errors

_UNEXPECTED = ApiError(500, "the server failed unexpectedly; its log has the cause", code="internal_error")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is nothing at this path; the API is below /v1",
        405: "this path does not have this method",
    }
    known = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
    return JSONResponse(known.body(), status_code=known.status, headers=error.headers)


async def _bug(_: Request, error: Exception) -> Response:
    return JSONResponse(_UNEXPECTED.body(), status_code=500)


class _Counted:
    """Counts requests by path and status; unknown paths together."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, observed)
        finally:
            known = scope["path"] if scope["path"] in _TEXT_PATHS else "other"
            path = getattr(scope.get("route"), "path", known)
            self.metrics.requests.labels(path, status).inc()
            self.metrics.request_seconds.labels(path).observe(time.monotonic() - began)
