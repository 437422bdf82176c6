"""``/v1/inspect``: curves, predictions of the iterates and alternatives of the searches behind tokens."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import pytest
import torch

from implicit_blocks.serving import inspect_api, inspections
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.inspections import Inspections
from implicit_blocks.serving.jobs import InspectionOrder
from implicit_blocks.serving.language import Bytes, Numbers
from implicit_blocks.serving.replay import calls_to_read
from trainer.specs.groups import notation

PROMPT = list(b"Hello")


def inspect(server: Any, prompt: Any = "Hello", **fields: Any) -> Any:
    return server.post("/v1/inspect", {"model": server.served.name, "prompt": prompt} | fields)


def reports(server: Any, prompt: Any = "Hello", **fields: Any) -> list[dict[str, Any]]:
    reply = inspect(server, prompt, **fields)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = reply.json["tokens"]
    return found


def searches(model: Any, tokens: list[int], known: int, **options: Any) -> list[dict[str, Any]]:
    """Search for each token's successor by plain calls of the model, keeping every iterate."""
    state, found = None, []
    most = options.get("max_iterations", 100)
    for window in [tokens[:known], *([token] for token in tokens[known:-1])]:
        with torch.no_grad():
            output = model(
                torch.tensor([window]),
                state=state,
                return_state=True,
                trace=True,
                trajectory=range(1, most + 1),
                **options,
            )
        state, solution = output.state, output.solution
        for place in range(len(window)):
            calls = int(solution.token_iterations[0, place])
            lens = [output.trajectory[t].hidden_BLD[0, place] for t in range(1, calls + 1)]
            with torch.no_grad():
                lens = model.predict(torch.stack(lens))[:, :257].log_softmax(-1)
            found.append(
                {
                    "iterations": calls,
                    "residual": float(solution.token_residual[0, place]),
                    "curve": solution.trace[:calls, 0, place].tolist(),
                    "lens": lens,
                    "output": output.logits[0, place, :257].log_softmax(-1),
                }
            )
    return found


@pytest.mark.parametrize("kind", ["mamba2", "attention"])
@pytest.mark.parametrize("limits", [{}, {"tolerance": 0.01}, {"max_iterations": 3}], ids=str)
def test_curves_and_predictions_are_those_of_the_searches_that_were_served(kind, limits, start, make_model):
    model = make_model(kind)
    server = start(model)
    served = server.complete("Hello", max_tokens=6, return_iterations=True, **limits).json
    made = served["choices"][0]["token_reports"]
    tokens = [*PROMPT, *(report["token_id"] for report in made)]
    found = reports(server, continuation=tokens[5:], **limits)
    assert [report["token_id"] for report in found] == tokens
    assert [report["generated"] for report in found] == [False] * 5 + [True] * 6
    for report, own in zip(found[5:], made, strict=True):  # the tokens' own searches
        assert report["iterations"] == own["iterations"]
        assert report["residual"] == pytest.approx(own["residual"], rel=1e-2)
        assert report["converged"] == own["converged"]
    for report, expected in zip(found[1:], searches(model, tokens, 5, **limits), strict=True):
        assert report["iterations"] == expected["iterations"]
        assert report["residual"] == pytest.approx(expected["residual"], rel=1e-3)
        assert report["curve"] == pytest.approx(expected["curve"], rel=1e-3)
        read = [one["iterations"] for one in report["lens"]]
        last = expected["iterations"]
        assert read == sorted({last, *(call for call in calls_to_read(100) if call < last)})
        followed = [one["token_id"] for one in report["alternatives"]]
        for one in report["lens"]:
            scores = expected["lens"][one["iterations"] - 1]
            assert one["log_probability"] == pytest.approx(float(scores.max()), abs=1e-3)
            assert float(scores[one["token_id"]]) == pytest.approx(float(scores.max()), abs=1e-4)
            assert one["alternatives"] == pytest.approx(scores[followed].tolist(), abs=1e-3)
        values = [one["log_probability"] for one in report["alternatives"]]
        assert values == pytest.approx(expected["output"][followed].tolist(), abs=1e-3)
        assert values == sorted(values, reverse=True)
        assert report["prediction"]["token_id"] == followed[0]


def test_alternatives_have_the_next_token_and_those_that_led_before(server):
    found = reports(server, continuation=[7, 8, 9], tolerance=1e-5)
    for report in found[1:]:
        followed = {one["token_id"] for one in report["alternatives"]}
        assert report["token_id"] in followed
        leading = {one["token_id"] for one in report["lens"]}
        assert leading <= followed or len(followed) == 8


def test_all_early_iterates_are_read_and_four_per_doubling_later():
    assert calls_to_read(5) == (1, 2, 3, 4, 5)
    assert calls_to_read(64)[:16] == tuple(range(1, 17))
    assert [call for call in calls_to_read(1000) if call > 16][:5] == [19, 23, 27, 32, 38]
    assert len(calls_to_read(1000)) < 45


def test_a_stream_has_the_reports_of_the_whole(server):
    whole = reports(server, continuation=[1, 2])
    assert inspect(server, continuation=[1, 2], stream=True).events == whole


def test_an_explicit_model_has_alternatives_and_no_searches(start, make_model):
    server = start(make_model(explicit=True))
    found = reports(server, continuation=[1, 2])
    assert [report["iterations"] for report in found] == [None] * 7
    assert all(report["lens"] == report["curve"] == [] for report in found)
    assert len(found[6]["alternatives"]) >= 5
    assert inspect(server, tolerance=0.1).error["param"] == "tolerance"


def test_a_word_problem_is_marked_by_the_product_so_far(start, make_model):
    server = start(make_model(vocab_size=6), Numbers(), problem=notation("S3"))
    tokens = [1, 2, 5, 0, 3]
    for parts in ({"prompt": tokens}, {"prompt": tokens[:1], "continuation": tokens[1:]}):
        found = reports(server, **parts)
        assert [report["product"]["token_id"] for report in found] == notation("S3").products(tokens)
        for report in found:
            assert report["right"] == (report["prediction"] == report["product"])
            assert len(report["curve"]) == report["iterations"]
    card = server.request("GET", "/v1/models").json["data"][0]["word_problem"]
    assert card["name"] == "S3"
    assert card["permutations"][3] == [1, 2, 0]


def test_texts_are_those_of_generate_while_another_is_inspected(server):
    expected = server.expected(list(b"other"), 12)
    found: list[int] = []
    job = threading.Thread(target=lambda: found.append(len(reports(server, "a" * 5, continuation=[5] * 15))))
    job.start()
    for _ in range(3):
        reply = server.complete("other", max_tokens=12)
        assert reply.json["choices"][0]["text"] == expected
    job.join(timeout=60)
    assert found == [20]
    assert server.idle()


class Decoder:
    """A decoder with texts, whose batch is not read."""

    busy = True


def test_inspections_have_a_share_of_the_time_while_texts_are_decoded(monkeypatch):
    now, found = [0.0], []
    monkeypatch.setattr(inspections.time, "monotonic", lambda: now[0])

    def slow(self: Any, order: Any, reports: Any, decoder: Any) -> Any:
        now[0] += 1.0
        return reports, {}

    monkeypatch.setattr(Inspections, "_report", slow)
    queue = Inspections(Bytes())
    for number in range(2):
        queue.add(order(number))
    while now[0] < 100:
        queue.advance(Decoder(), found)  # type: ignore[arg-type]  # stands for a decoder
        now[0] += 0.1
    assert 18 <= len(found) <= 22
    assert {number for number, _ in found} == {0, 1}


def order(number: int) -> InspectionOrder:
    fields: dict[str, Any] = {"name": "x", "prompt": [1], "continuation": ()}
    return InspectionOrder(number=number, **fields, tolerance=None, max_iterations=None)


def test_a_cancelled_inspection_ends_and_others_end_with_the_server():
    found: list[Any] = []
    queue = Inspections(Bytes())
    queue.add(order(0))
    queue.cancel([0])
    assert not queue
    queue.add(order(1))
    queue.fail_all(ApiError(503, "over"), found)
    assert not queue
    assert [(number, error.status) for number, error in found] == [(1, 503)]


def test_a_client_that_leaves_ends_its_inspection(server):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    body = {"model": "tiny", "prompt": "a", "continuation": [1] * 90, "stream": True}
    connection.request("POST", "/v1/inspect", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().read(20)
    connection.close()
    ends = time.monotonic() + 20
    while server.worker.inspections and time.monotonic() < ends:
        time.sleep(0.01)
    assert not server.worker.inspections


def test_a_failed_inspection_is_reported_and_the_server_goes_on(start, make_model, monkeypatch):
    server = start(make_model())

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patched:
        patched.setattr(inspections, "token_reports", fail)
        reply = inspect(server)
    assert reply.status == 500
    assert "secret" not in reply.error["message"]
    assert inspect(server, stream=True).events[0]["token"] == "H"
    assert server.complete("Hello", max_tokens=2).status == 200


def test_more_inspections_than_the_limit_are_refused_for_a_moment(server, monkeypatch):
    monkeypatch.setattr(inspect_api, "MOST_INSPECTIONS", 0)
    reply = inspect(server)
    assert reply.status == 429
    assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [300]}, 400, "prompt"),
        ({"prompt": "a" * 97}, 400, "prompt"),
        ({"continuation": [999]}, 400, "continuation"),
        ({"continuation": [1] * 95}, 400, "continuation"),
        ({"continuation": [1] * 2000}, 400, "continuation"),
        ({"tolerance": -1.0}, 400, "tolerance"),
        ({"max_iterations": 10**6}, 400, "max_iterations"),
        ({"temperature": 1.0}, 400, "temperature"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_inspected_is_named(server, fields, status, param):
    reply = inspect(server, **fields)
    assert reply.status == status
    assert reply.error["param"] == param


def test_a_key_is_required_where_the_server_has_one(start, model):
    server = start(model, api_key="secret")
    assert inspect(server).status == 401
