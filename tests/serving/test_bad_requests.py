"""Requests that cannot be served: each gets a status of 4xx whose message names the value and the remedy."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import implicit_blocks as ib
from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.language import Bytes
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.server import application

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 2, "temperature": 0}

BAD: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "unknown model": ({"model": "gpt"}, 404, "model", "tiny"),
    "path as a model": ({"model": "/etc/passwd"}, 404, "model", "tiny"),
    "empty prompt": ({"prompt": ""}, 400, "prompt", "at least one token"),
    "no prompts": ({"prompt": []}, 400, "prompt", "at least one"),
    "an empty one of two prompts": ({"prompt": ["a", ""]}, 400, "prompt", "empty"),
    "empty tokens": ({"prompt": [[]]}, 400, "prompt", "empty"),
    "mixed prompts": ({"prompt": ["a", 3]}, 400, "prompt", "list of token IDs"),
    "an object as a prompt": ({"prompt": {"file": "/etc/passwd"}}, 400, "prompt", "list of token IDs"),
    "booleans as tokens": ({"prompt": [True, False]}, 400, "prompt", "list of token IDs"),
    "prompt too long": ({"prompt": "x" * 97}, 400, "prompt", "96"),
    "prompt far too long": ({"prompt": "x" * 50_000}, 400, "prompt", "96"),
    "prompt and new tokens too long": ({"prompt": "x" * 90, "max_tokens": 7}, 400, "max_tokens", "96"),
    "huge max_tokens": ({"max_tokens": 10**30}, 400, "max_tokens", "less than or equal"),
    "token outside the vocabulary": ({"prompt": [5, 257]}, 400, "prompt", "0 to 256"),
    "negative token": ({"prompt": [-1]}, 400, "prompt", "0 to 256"),
    "huge token": ({"prompt": [10**40]}, 400, "prompt", "0 to 256"),
    "negative max_tokens": ({"max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
    "text as a number": ({"max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    "fraction of a token": ({"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
    "negative temperature": ({"temperature": -0.1}, 400, "temperature", "greater than or equal to 0"),
    "huge temperature": ({"temperature": 1e300}, 400, "temperature", "less than or equal"),
    "top_p of 0": ({"top_p": 0}, 400, "top_p", "greater than 0"),
    "top_k below -1": ({"top_k": -2}, 400, "top_k", "greater than or equal to -1"),
    "no choices": ({"n": 0}, 400, "n", "greater than or equal to 1"),
    "too many choices": ({"n": 1000}, 400, "n", "at most"),
    "huge seed": ({"seed": 2**80}, 400, "seed", "less than or equal"),
    "empty stop string": ({"stop": ["a", ""]}, 400, "stop", "at least 1 character"),
    "too many stop strings": ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    "long stop string": ({"stop": "a" * 300}, 400, "stop", "at most 256"),
    "too many log-probabilities": ({"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    "suffix": ({"suffix": "end"}, 400, "suffix", "omit it"),
    "penalty": ({"frequency_penalty": 2.5}, 400, "frequency_penalty", "less than or equal to 2"),
    "bias of no token": ({"logit_bias": {"257": 1.0}}, 400, "logit_bias", "0 to 256"),
    "bias of a word": ({"logit_bias": {"a": 1.0}}, 400, "logit_bias", "0 to 256"),
    "huge bias": ({"logit_bias": {"5": 101}}, 400, "logit_bias", "less than or equal to 100"),
    "too many biases": ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, "logit_bias", "1024"),
    "min_p above 1": ({"min_p": 1.5}, 400, "min_p", "less than or equal to 1"),
    "repetition penalty of 0": ({"repetition_penalty": 0}, 400, "repetition_penalty", "greater than 0"),
    "best_of": ({"best_of": 3}, 400, "best_of", "omit"),
    "misspelt field": ({"max_token": 3}, 400, "max_token", "max_tokens"),
    "tolerance of 0": ({"tolerance": 0}, 400, "tolerance", "greater than 0"),
    "negative tolerance": ({"tolerance": -1.0}, 400, "tolerance", "greater than 0"),
    "no iterations": ({"max_iterations": 0}, 400, "max_iterations", "greater than or equal to 1"),
    "huge number of iterations": ({"max_iterations": 5000}, 400, "max_iterations", "at most 1000"),
    "stream options without a stream": ({"stream_options": {}}, 400, "stream_options", "stream: true"),
    "unknown stream option": ({"stream_options": {"x": 1}}, 400, "stream_options.x", "omit it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named_with_the_remedy(server, name):
    changes, status, param, remedy = BAD[name]
    reply = server.post("/v1/completions", GOOD | changes)
    assert reply.status == status
    assert reply.error["param"] == param
    assert remedy in reply.error["message"]
    assert len(reply.error["message"]) < 400


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(server, field):
    reply = server.post("/v1/completions", {key: value for key, value in GOOD.items() if key != field})
    assert (reply.status, reply.error["param"]) == (400, field)


@pytest.mark.parametrize(
    "messages",
    [[], "hello", [{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}]],
    ids=["none", "text", "unknown role", "no content", "number"],
)
def test_bad_messages_are_refused(server, messages):
    reply = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b'"text"', b"\xff\xfe", b'{"model": "\xc3("}', b'{"model": "\\ud800"}',
     b"[" * 100_000, b'{"a":' * 5000, b'{"temperature": NaN, "model": "tiny", "prompt": "a"}',
     b'{"temperature": 1e999, "model": "tiny", "prompt": "a"}'],
    ids=lambda body: repr(body[:14]),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(server, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/inspect"):
        reply = server.post(path, body)
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"
        if reply.error["code"] == "invalid_json":
            assert "encoded as UTF-8" in reply.error["message"]


def test_a_body_of_another_type_is_refused(server):
    for headers in ({}, {"Content-Type": "text/plain"}):
        reply = server.request("POST", "/v1/completions", json.dumps(GOOD).encode(), headers)
        assert reply.status == 415
        assert "application/json" in reply.error["message"]


def test_a_large_body_is_refused_before_it_is_read(model, start):
    server = start(model, max_body_bytes=2000)
    reply = server.post("/v1/completions", GOOD | {"user": "x" * 2000})
    assert reply.status == 413
    assert "2000 bytes" in reply.error["message"]
    assert server.post("/v1/completions", GOOD).status == 200


def test_unknown_paths_and_methods_have_errors_of_the_api(server):
    assert server.request("GET", "/v1/nothing").error["type"] == "not_found_error"
    assert server.request("GET", "/v1/completions").status == 405
    assert server.request("GET", "/v1/completions").error["message"]
    assert server.request("GET", "/../../etc/passwd").status == 404


# ------------------------------------------------------------------------------------ mutated bodies

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    -(2**70),
    10**300,
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    "\0",
]
VALUES += [
    "é" * 40,
    "\u2028",
    [],
    [1],
    [[1]],
    [["a"]],
    [None],
    {},
    {"a": 1},
    [{}],
    "tiny",
    ["a", "b"],
    [256, 0],
]
VALUES += [[{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]]
COMMON = ["model", "stream", "tolerance", "max_iterations", "unknown", "__proto__", ""]
SAMPLED = [
    *COMMON,
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "user",
    "logprobs",
]
SAMPLED += ["logit_bias", "presence_penalty", "repetition_penalty", "stream_options", "return_iterations"]
HARMLESS = {"user", "seed"}


class Conversing(Bytes):
    """Bytes with a chat template: the messages, one per line."""

    def chat(self, messages: Any) -> list[int]:
        return self.encode("".join(f"{message['content']}\n" for message in messages))


@dataclass(frozen=True)
class Endpoint:
    """A path, a good body, the fields to mutate, and how the result is read from a whole response."""

    path: str
    good: dict[str, Any]
    fields: list[str]
    read: Callable[[Any], list[Any]]


GREEDY = {"max_tokens": 2, "temperature": 0}
ENDPOINTS = [
    Endpoint(
        "/v1/completions",
        GOOD,
        [*SAMPLED, "prompt", "echo", "suffix", "best_of", "messages"],
        lambda whole: [choice["text"] for choice in whole["choices"]],
    ),
    Endpoint(
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **GREEDY},
        [*SAMPLED, "messages", "top_logprobs", "max_completion_tokens", "prompt"],
        lambda whole: [choice["message"]["content"] for choice in whole["choices"]],
    ),
    Endpoint(
        "/v1/inspect",
        {"model": "tiny", "prompt": "Hi", "continuation": [7, 9]},
        [*COMMON, "prompt", "continuation", "messages"],
        lambda whole: whole["tokens"],
    ),
]


def mutated(random: random.Random, endpoint: Endpoint) -> bytes:
    """Return a body that differs from a good one in some values, and often in some bytes."""
    body: dict[str, Any] = dict(endpoint.good)
    for _ in range(random.randint(0, 3)):
        body[random.choice(endpoint.fields)] = random.choice(VALUES)
    if random.random() < 0.2:
        body.pop(random.choice(list(body)))
    text = bytearray(json.dumps(body, ensure_ascii=random.random() < 0.5).encode())
    if random.random() < 0.4:
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(text)) if text else 0
            kind = random.randrange(3)
            if kind == 0 and text:
                text[place] = random.randrange(256)
            elif kind == 1 and text:
                del text[place : place + random.randint(1, 5)]
            else:
                text[place:place] = bytes(random.choices(b'{}[]",:0123456789eE+-.\\u\xff\xc3', k=3))
    return bytes(text)


def right(endpoint: Endpoint, sent: dict[str, Any], received: bytes, expected: list[Any]) -> bool:
    """Return whether an answer is complete and, for the unchanged request, equal to the expected one."""
    if sent.get("stream"):
        return received.endswith(b"data: [DONE]\n\n") and b'"error"' not in received
    found = endpoint.read(json.loads(received))
    usual = {key: value for key, value in sent.items() if key not in HARMLESS and value is not None}
    return found == expected if usual == endpoint.good else bool(found)


async def check_mutated(app: Any, ask: Any, model: Any, count: int, seed: int) -> None:
    draws = random.Random(seed)
    made = ib.generate(model, [list(b"Hi")], max_new_tokens=2, stop_token_ids=[256])
    text = Bytes().decode(made.tokens[0, : int(made.lengths[0])].tolist())
    left = iter(range(count))
    answered: Counter[str] = Counter()

    async def usual(endpoint: Endpoint) -> list[Any]:
        status, received = await ask(app, endpoint.path, json.dumps(endpoint.good).encode())
        assert status == 200
        return endpoint.read(json.loads(received))

    async def client(expected: dict[str, list[Any]]) -> None:
        for number in left:
            endpoint = ENDPOINTS[(0, 0, 1, 0, 2, 0, 1, 0)[number % 8]]
            body = mutated(draws, endpoint)
            status, received = await ask(app, endpoint.path, body)
            assert b"Traceback" not in received
            if status == 200:
                answered[endpoint.path] += 1
                assert right(endpoint, json.loads(body), received, expected[endpoint.path]), body
            else:
                assert 400 <= status < 500, (status, body)
                assert json.loads(received)["error"]["message"]

    async with app.router.lifespan_context(app):
        expected = {endpoint.path: await usual(endpoint) for endpoint in ENDPOINTS}
        assert expected["/v1/completions"] == [text]
        await asyncio.gather(*(client(expected) for _ in range(48)))
        assert all(answered[endpoint.path] > count // 100 for endpoint in ENDPOINTS), answered
        assert expected == {endpoint.path: await usual(endpoint) for endpoint in ENDPOINTS}
        assert app.state.served.engine.pending == 0


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_bodies_are_refused_or_answered(make_model, ask, count):
    stopping = ib.StoppingOverrides(tolerance=0.05, max_iterations=20)
    model = make_model(at_evaluation=ib.AtEvaluation(stopping=stopping))
    options = ServerOptions(max_seq_len=96, max_batch_size=16, max_iterations=50, timeout=7200)
    app = application([Host("tiny", model, Conversing(), options)])
    asyncio.run(check_mutated(app, ask, model, count, seed=count))
