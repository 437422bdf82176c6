"""Requests of a continuous decoder with their own tolerance and iterations, and their cancellation."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots import prompts as slot_prompts

LIMITS = [{}, {"tolerance": 0.1}, {"max_iterations": 2}, {"tolerance": 0.3, "max_iterations": 5}]


def test_each_request_is_searched_by_its_own_limits(family, tiny_model, prompts):
    model = tiny_model(family, tolerance=1e-3)
    decoder = ContinuousDecoder(model, max_batch_size=3, max_seq_len=24)
    for prompt, limits in zip(prompts, LIMITS, strict=True):
        decoder.submit(Request(prompt=prompt, max_new_tokens=6, **limits))
    made = [[] for _ in prompts]
    for new in decoder.run():
        made[new.request].append(new)
    for tokens, prompt, limits in zip(made, prompts, LIMITS, strict=True):
        alone = ib.generate(model, [prompt], max_new_tokens=6, **limits)
        assert [new.token for new in tokens] == alone.tokens[0].tolist()
        assert [new.iterations for new in tokens] == alone.iterations[0].tolist()
        assert [new.converged for new in tokens] == alone.converged[0].tolist()


@pytest.mark.parametrize("limits", LIMITS[1:3], ids=["tolerance", "iterations"])
def test_limits_are_refused_where_no_search_ends_by_its_residual(explicit_model, tiny_model, limits):
    sizes = {"max_batch_size": 1, "max_seq_len": 24}
    model = tiny_model("mamba2", stopping={"scope": "prefix"})
    for decoder in (
        ContinuousDecoder(explicit_model("mamba2"), **sizes),
        ContinuousDecoder(model, loops=3, **sizes),
        ContinuousDecoder(model, exit=ib.exits.SecondDifferenceExitSpec(), **sizes),
    ):
        assert not decoder.accepts_limits
        with pytest.raises(ValueError, match=f"has {next(iter(limits))}.*explicit.*fixed number of loops"):
            decoder.submit(Request(prompt=[1, 2], max_new_tokens=2, **limits))
        assert not decoder.busy


def test_limits_are_written_where_they_differ_from_those_of_the_slot(tiny_model):
    decoder = ContinuousDecoder(tiny_model("mamba2", tolerance=1e-3), max_batch_size=2, max_seq_len=24)
    limits, written = decoder.batch.search.limits, []
    for own in ({}, {"tolerance": 0.1}, {"tolerance": 0.1}, {"max_iterations": 7}, {}, {}):
        versions = [limit_S._version for limit_S in limits]
        for _ in range(2):
            decoder.submit(Request(prompt=[1, 2], max_new_tokens=2, **own))
        list(decoder.run())
        written.append(versions != [limit_S._version for limit_S in limits])
        expected = own.get("tolerance", 1e-3), own.get("max_iterations", 200)
        for limit_S, value in zip(limits, expected, strict=True):
            torch.testing.assert_close(limit_S, torch.full_like(limit_S, value), rtol=0, atol=0)
    assert written == [False, True, False, True, True, False]


@pytest.mark.parametrize(
    "own", [{"tolerance": "0.1"}, {"max_iterations": "3"}, {"max_iterations": 3.0}], ids=str
)
def test_limits_that_are_accepted_as_numbers_are_used_as_numbers(tiny_model, own):
    """A text that was accepted must not fail in its first step, beside others."""
    model = tiny_model("mamba2", tolerance=1e-3)
    decoder = ContinuousDecoder(model, max_batch_size=1, max_seq_len=24)
    decoder.submit(Request(prompt=[1, 2], max_new_tokens=3, **own))
    found = [new.iterations for new in decoder.run()]
    numbers = {name: float(value) if name == "tolerance" else int(value) for name, value in own.items()}
    assert found == ib.generate(model, [[1, 2]], max_new_tokens=3, **numbers).iterations[0].tolist()


@pytest.mark.parametrize("in_flight", [1, 4])
def test_after_prompts_that_fail_the_other_texts_continue_by_their_limits(tiny_model, monkeypatch, in_flight):
    """The text that fails is dropped with its limits; those beside it and behind it are complete."""
    model, encode, calls = tiny_model("attention", tolerance=1e-3), slot_prompts.encode_tokens, []

    def failing(*given, **options):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return encode(*given, **options)

    monkeypatch.setattr(slot_prompts, "encode_tokens", failing)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=24, max_in_flight=in_flight)
    texts = [([1, 2, 3], {}), ([4, 5], {"tolerance": 0.1}), ([6], {}), ([7, 8], {"max_iterations": 3})]
    for prompt, own in texts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5, **own))
    made = {0: [], 2: [], 3: []}
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.step()
    for _ in range(500):
        for new in decoder.step():
            made[new.request].append(new.token)
    assert not decoder.busy
    for number, tokens in made.items():
        prompt, own = texts[number]
        assert tokens == ib.generate(model, [prompt], max_new_tokens=5, **own).tokens[0].tolist()


def test_an_invalid_limit_is_refused(tiny_model):
    decoder = ContinuousDecoder(tiny_model("mamba2"), max_batch_size=1, max_seq_len=24)
    with pytest.raises(ValueError, match="max_iterations"):
        decoder.submit(Request(prompt=[1], max_new_tokens=2, max_iterations=0))
    assert not decoder.busy


@pytest.mark.parametrize("after", [0, 1, 7], ids=["queued", "first token", "later"])
def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_as_they_are(tiny_model, prompts, after):
    model = tiny_model("mamba2", tolerance=1e-3)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=40)
    numbers = [decoder.submit(Request(prompt=prompt, max_new_tokens=12)) for prompt in prompts]
    made = {number: [] for number in numbers}
    for _ in range(after):
        for new in decoder.step():
            made[new.request].append(new.token)
    assert decoder.cancel(numbers[1])
    assert not decoder.cancel(numbers[1])
    before = len(made[numbers[1]])
    for new in decoder.run():
        made[new.request].append(new.token)
    assert len(made[numbers[1]]) == before
    for number in (0, 2, 3):
        alone = ib.generate(model, [prompts[number]], max_new_tokens=12)
        assert made[number] == alone.tokens[0].tolist()
    assert not decoder.busy
    assert not bool(decoder.batch.busy_S.any())
    assert not decoder.cancel(numbers[0])


def test_cancelling_an_unknown_request_changes_nothing(tiny_model):
    decoder = ContinuousDecoder(tiny_model("mamba2"), max_batch_size=1, max_seq_len=24)
    assert not decoder.cancel(3)
    assert torch.equal(decoder.batch.lengths_S, torch.zeros(1, dtype=torch.int64))
