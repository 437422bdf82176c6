"""Who may use a server: addresses, keys, names of the host; and what its options accept."""

from __future__ import annotations

import asyncio
import json

import pytest

from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.language import Bytes
from implicit_blocks.serving.options import ServerOptions, is_loopback
from implicit_blocks.serving.server import application

KEY = "long-random-key-é"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_a_loopback_address_needs_no_key(host):
    assert is_loopback(host)
    assert ServerOptions(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org"])
def test_another_address_requires_a_key_or_the_consent_to_serve_everyone(host):
    with pytest.raises(ValueError, match=r"IMPLICIT_BLOCKS_API_KEY.*--no-auth"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, api_key=KEY).host == ServerOptions(host=host, no_auth=True).host


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", -1), ("port", 70_000), ("max_batch_size", 0), ("max_seq_len", -3), ("max_queue", -1),
     ("max_body_bytes", 0), ("max_in_flight", 0), ("timeout", 0.0), ("timeout", float("inf")),
     ("stall_seconds", float("nan"))],
)  # fmt: skip
def test_an_option_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        ServerOptions(**{name: value})


def test_an_empty_key_is_refused():
    with pytest.raises(ValueError, match="key is empty"):
        ServerOptions(api_key="  ")


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"Bearer {KEY}", 200), (f"bearer  {KEY}", 200), (None, 401), ("Bearer wrong", 401), ("Bearer", 401),
     (KEY, 401), (f"Basic {KEY}", 401), (f"Bearer {KEY}x", 401), ("Bearer \xff\xfe", 401)],
)  # fmt: skip
def test_a_key_is_required_where_one_is_set(model, start, header, status):
    server = start(model, api_key=KEY)
    headers = {} if header is None else {"Authorization": header.encode("utf-8", "replace").decode("latin-1")}
    paths = ("/v1/models", "/metrics")
    assert [server.request("GET", path, headers=headers).status for path in paths] == [status] * 2
    reply = server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}, **headers)
    assert reply.status == status
    if status == 401:
        assert reply.error["code"] == "invalid_api_key"
        assert KEY not in reply.error["message"]
        assert reply.headers["www-authenticate"] == "Bearer"


def test_health_and_the_page_need_no_key(model, start):
    server = start(model, api_key=KEY)
    assert server.request("GET", "/health").status == server.request("GET", "/").status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "[", ""])
def test_a_local_server_refuses_requests_under_another_name(server, host):
    for path in ("/v1/models", "/", "/metrics", "/health"):
        assert server.request("GET", path, headers={"Host": host}).status in (400, 403)
    assert server.request("GET", "/v1/models", headers={"Host": "localhost:1"}).status == 200


@pytest.mark.parametrize(
    ("options", "status"), [({}, 403), ({"no_auth": True}, 200), ({"api_key": KEY}, 401)], ids=str
)
def test_a_server_without_a_key_refuses_other_machines_behind_a_proxy(model, ask, options, status):
    app = application([Host("tiny", model, Bytes(), ServerOptions(max_batch_size=1, **options))])
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()

    async def found() -> list[int]:
        async with app.router.lifespan_context(app):
            own, other = [await ask(app, "/v1/completions", body, client=c) for c in ("::1", "192.168.1.7")]
            return [own[0], other[0]]

    assert asyncio.run(found()) == [401 if "api_key" in options else 200, status]


def test_the_page_loads_nothing_from_elsewhere(server):
    page = server.request("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = page.body.replace(b"http://www.w3.org/2000/svg", b"")  # a name, not an address
    for mark in (b"http://", b"https://", b"//cdn", b"src=", b"@import"):
        assert mark not in text
