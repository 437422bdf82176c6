"""Completions by plain HTTP requests: texts, streams, log-probabilities, iterations, limits."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.serving.language import Numbers


def text_of(reply):
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def streamed(reply):
    """Return the text of each choice of a stream, and the last reason."""
    texts, reasons = {}, {}
    for chunk in reply.events:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons[index] = choice["finish_reason"]
    assert all(reasons.values())
    return texts


@pytest.mark.parametrize("kind", ["mamba2", "attention", "explicit"])
def test_a_completion_is_the_text_of_generate(kind, start, make_model):
    model = make_model(explicit=True) if kind == "explicit" else make_model(kind)
    server = start(model)
    for prompt in ("Hello", "z", "Zürich"):
        expected = server.expected(list(prompt.encode()), 9)
        assert text_of(server.complete(prompt, max_tokens=9)) == expected
        assert streamed(server.complete(prompt, max_tokens=9, stream=True)) == {0: expected}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_curl_receives_the_text(server, stream):
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "temperature": 0, "stream": stream}
    command = ["curl", "-sSfN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
    found = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    lines = found.stdout.split("\n\n")[:-2] if stream else [found.stdout]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(texts) == server.expected(list(b"Hello"), 5)


def test_tokens_as_a_prompt_are_the_same_as_their_text(server):
    assert text_of(server.complete(list(b"Hello"), max_tokens=5)) == text_of(
        server.complete("Hello", max_tokens=5)
    )


def test_choices_are_ordered_by_prompt_and_then_by_number(server):
    prompts = ["one", "two words"]
    reply = server.complete(prompts, max_tokens=6, n=2, temperature=1.0, seed=7)
    texts = [choice["text"] for choice in reply.json["choices"]]
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    for index, text in enumerate(texts):
        prompt = list(prompts[index // 2].encode())
        assert text == server.expected(prompt, 6, temperature=1.0, seed=7 + index)
    again = server.complete(prompts, max_tokens=6, n=2, temperature=1.0, seed=7, stream=True)
    assert streamed(again) == dict(enumerate(texts))


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.4, "top_k": 5}], ids=str)
def test_sampling_options_are_those_of_generate(server, options):
    given = {"temperature": 1.0, "seed": 11, **options}
    expected = server.expected(list(b"abc"), 8, **given)
    assert text_of(server.complete("abc", max_tokens=8, **given)) == expected


def test_a_temperature_of_zero_ignores_the_other_sampling_options(server):
    plain = text_of(server.complete("abc", max_tokens=4))
    assert text_of(server.complete("abc", max_tokens=4, top_p=0.9, top_k=4)) == plain


def test_penalties_and_biases_change_the_logits_as_openai_defines(server):
    prompt, bias = list(b"abca"), {"97": 3.5, "101": -100}

    def changed(input_ids, scores):
        for token in range(scores.shape[1]):
            count = input_ids[0, len(prompt) :].tolist().count(token)
            scores[0, token] += bias.get(str(token), 0.0) - 1.5 * count - 0.5 * (count > 0)
        return scores

    expected = server.expected(prompt, 9, logits_processor=changed)
    given = {"max_tokens": 9, "logit_bias": bias, "frequency_penalty": 1.5, "presence_penalty": 0.5}
    assert text_of(server.complete(prompt, **given)) == expected
    assert expected != server.expected(prompt, 9)
    neutral = {"logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1}
    assert text_of(server.complete(prompt, max_tokens=9, **neutral)) == server.expected(prompt, 9)


def test_min_p_and_repetition_penalty_are_those_of_transformers(server, monkeypatch):
    hf = pytest.importorskip("transformers", reason="transformers is not installed").generation
    penalty, drawn = hf.RepetitionPenaltyLogitsProcessor(1.8), {"temperature": 1.0, "seed": 4}
    warpers = [penalty, hf.TemperatureLogitsWarper(3.0), hf.TopKLogitsWarper(40), hf.MinPLogitsWarper(0.4)]
    expected = server.expected(list(b"abc"), 9, logits_processor=warpers, **drawn)
    given = {"max_tokens": 9, "repetition_penalty": 1.8, "min_p": 0.4}
    rule = {"temperature": 3.0, "top_k": 40, "seed": 4}
    assert text_of(server.complete("abc", **given, **rule)) == expected
    greedy = server.expected(list(b"abc"), 9, logits_processor=penalty)
    assert text_of(server.complete("abc", **given)) == greedy  # min_p has no effect on it
    monkeypatch.setattr("implicit_blocks.serving.bodies.find_spec", lambda name: None)
    reply = server.complete("abc", **given)
    assert (reply.status, reply.error["param"]) == (400, "repetition_penalty")
    assert "transformers" in reply.error["message"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_chunks_ends_the_text_before_it(server, size, stream):
    whole = server.expected(list(b"Hello"), 20)
    stop = whole[6 : 6 + size]
    expected = whole[: whole.index(stop)]
    reply = server.complete("Hello", max_tokens=20, stop=[stop, "never there"], stream=stream)
    assert (streamed(reply)[0] if stream else text_of(reply)) == expected
    if not stream:
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert reply.json["usage"]["completion_tokens"] < 20
    assert server.idle()


def test_the_end_token_ends_a_text_and_is_not_in_it(model, start):
    server = start(model)
    made = ib.generate(model, [list(b"Hello")], max_new_tokens=8).tokens[0].tolist()
    server.language.stop_token_ids = (made[4],)
    reply = server.complete("Hello", max_tokens=8)
    assert text_of(reply) == server.language.decode(made[: made.index(made[4])])
    assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_are_those_of_score(server):
    reply = server.complete("Hello", max_tokens=4, echo=True, logprobs=3)
    assert text_of(reply).startswith("Hello")
    scores = reply.json["choices"][0]["logprobs"]
    made = ib.generate(server.model, [list(b"Hello")], max_new_tokens=4).tokens[0].tolist()
    expected = ib.score(server.model, [[72]], [[*b"ello", *made]]).log_probabilities[0]
    found = torch.tensor(scores["token_logprobs"][1:])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    for own, most in zip(scores["token_logprobs"][5:], scores["top_logprobs"][5:], strict=True):
        assert own == max(most.values())  # greedy
    assert scores["text_offset"][:6] == [0, 1, 2, 3, 4, 5]


def test_log_probabilities_of_a_prompt_alone_need_no_new_token(server):
    reply = server.complete(["Hello", "a", "longer one"], max_tokens=0, echo=True, logprobs=1)
    assert [choice["text"] for choice in reply.json["choices"]] == ["Hello", "a", "longer one"]
    counts = [len(choice["logprobs"]["tokens"]) for choice in reply.json["choices"]]
    assert counts == [5, 1, 10]
    assert reply.json["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_stream_are_those_of_the_whole(server):
    whole = server.complete("Hello", max_tokens=6, logprobs=2).json["choices"][0]["logprobs"]
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in server.complete("Hello", max_tokens=6, logprobs=2, stream=True).events
    ]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_reports_of_tokens_and_usage_count_the_iterations_of_generate(server):
    reply = server.complete("Hello", max_tokens=6, return_iterations=True)
    made = ib.generate(server.model, [list(b"Hello")], max_new_tokens=6)
    reports = reply.json["choices"][0]["token_reports"]
    assert [report["token_id"] for report in reports] == made.tokens[0].tolist()
    found = [report["iterations"] for report in reports]
    assert found == pytest.approx(made.iterations[0].tolist(), abs=1)
    usage = reply.json["usage"]
    assert usage["iterations"] == sum(found)
    assert usage["prompt_tokens"] == 5
    assert usage["total_tokens"] == 11
    assert usage["unconverged_tokens"] == int((~made.converged).sum())


def test_usage_ends_a_stream_if_it_is_asked_for(server):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = server.complete("Hello", max_tokens=3, **options).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3


def test_an_explicit_model_counts_no_iterations(start, make_model):
    server = start(make_model(explicit=True))
    usage = server.complete("Hello", max_tokens=3).json["usage"]
    assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    refused = server.complete("Hello", max_tokens=3, tolerance=0.1)
    assert refused.status == 400
    assert refused.error["param"] == "tolerance"


def test_tolerance_and_iterations_of_a_request_apply_to_it_alone(server):
    few = server.complete("Hello", max_tokens=6, max_iterations=2, return_iterations=True).json
    assert {report["iterations"] for report in few["choices"][0]["token_reports"]} == {2}
    assert few["usage"]["unconverged_tokens"] == 6
    loose = server.complete("Hello", max_tokens=6, tolerance=0.5).json["usage"]["iterations"]
    usual = server.complete("Hello", max_tokens=6).json["usage"]["iterations"]
    assert loose < usual
    expected = server.expected(list(b"Hello"), 6, tolerance=0.5)
    assert text_of(server.complete("Hello", max_tokens=6, tolerance=0.5)) == expected


def completed_together(server):
    """Return the choices of requests with their own limits, whose texts enter the decoder together."""
    stop = server.expected(list(b"Hello"), 9)[4:6]
    own = [{"tolerance": 1e-3}, {}, {"tolerance": 1e-7, "max_iterations": 3}, {"stop": stop}]
    step = server.worker.decoder.step
    server.worker.decoder.step = lambda: step() if server.worker.decoder.submitted >= len(own) else []

    def complete(prompt, fields):
        return server.complete(prompt, max_tokens=9, return_iterations=True, logprobs=1, **fields).json

    with ThreadPoolExecutor() as pool:
        return list(pool.map(complete, ("Hello", "z", "Hello", "Hello"), own))


def test_tokens_in_flight_change_no_completion(model, start):
    """Of requests with their own limits in one batch; a stop string ends one among tokens in flight."""
    found = []
    for in_flight in (1, 4):
        server = start(model, max_in_flight=in_flight)
        bodies = completed_together(server)
        assert server.idle()
        assert (server.worker.decoder.statistics.tokens_in_flight > 1) == (in_flight > 1)
        reports = [body["choices"][0]["token_reports"] for body in bodies]
        for tokens, body in zip(reports, bodies, strict=True):
            assert body["usage"]["completion_tokens"] == len(tokens)
            assert body["usage"]["iterations"] == sum(one["iterations"] for one in tokens)
            assert body["usage"]["unconverged_tokens"] == sum(not one["converged"] for one in tokens)
        assert {one["iterations"] for one in reports[2]} == {3}
        metrics = server.request("GET", "/metrics").body.decode()
        counted = float(re.search(r"^implicit_blocks_tokens_total (\S+)", metrics, re.MULTILINE)[1])
        assert 0 <= counted - sum(map(len, reports)) < 9  # tokens after the stop string
        found.append([body["choices"][0] for body in bodies])
    assert found[0][3]["finish_reason"] == "stop"
    for one, other in zip(*found, strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        values = [choice["logprobs"]["token_logprobs"] for choice in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=0.01)


def test_a_model_without_a_tokenizer_reads_and_writes_numbers(start, make_model):
    server = start(make_model(vocab_size=19), Numbers())
    prompt = [0, 3, 2]
    made = ib.generate(server.model, [prompt], max_new_tokens=4).tokens[0].tolist()
    reply = server.complete("0 3 2", max_tokens=4, echo=True, logprobs=0)
    assert text_of(reply) == " ".join(map(str, prompt + made))
    assert reply.json["choices"][0]["logprobs"]["text_offset"][:4] == [0, 1, 3, 5]
    refused = server.complete("hello")
    assert refused.status == 400
    assert "token IDs" in refused.error["message"]


def test_a_diverged_text_has_finite_numbers(start, make_model):
    model = make_model()
    with torch.no_grad():
        model.embedding.weight[1] = math.nan
    server = start(model)
    reply = server.complete([1, 1], max_tokens=2, logprobs=1, echo=True, return_iterations=True)
    assert reply.status == 200
    assert b"NaN" not in reply.body
    assert server.complete("ok", max_tokens=2).status == 200


def test_models_and_metrics_describe_the_server(server):
    models = server.request("GET", "/v1/models").json["data"]
    assert [card["id"] for card in models] == ["tiny"]
    assert models[0]["kind"] == "implicit"
    assert server.request("GET", "/v1/models/tiny").json == models[0]
    assert server.request("GET", "/v1/models/other").status == 404
    server.complete("Hello", max_tokens=3)
    text = server.request("GET", "/metrics").body.decode()
    for name in ("requests_total", "queue", "busy_slots", "tokens_total", "iterations_sum", "unconverged"):
        assert f"implicit_blocks_{name}" in text
    assert server.request("GET", "/health").json == {"status": "ok"}


def test_two_servers_of_one_process_do_not_share_their_metrics(model, start):
    first, second = start(model), start(model)
    first.complete("a", max_tokens=2)
    assert b"implicit_blocks_tokens_total 2.0" in first.request("GET", "/metrics").body
    assert b"implicit_blocks_tokens_total 0.0" in second.request("GET", "/metrics").body
