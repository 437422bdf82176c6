"""The default number of tokens in flight follows the number of active texts, and changes no text."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots import continuous, in_flight
from implicit_blocks.decoding.slots.wavefront import Wavefront
from implicit_blocks.ops.attention import slots as slot_attention
from tests.decoding.conftest import MIXERS, _model
from tests.decoding.test_wavefront import SAMPLINGS, Replayed, check_equal, composed, of_mixer

LENGTHS = (6, 3, 1, 8, 2, 5)
COUNTS = (10, 4, 2, 7, 2, 3)
"""New tokens of each text: the first and the fourth continue when all others have ended."""


@pytest.fixture(autouse=True)
def _as_in_fused_calls(monkeypatch):
    """Choose the number of tokens in flight as on a GPU, unless it is asked for."""
    most, wavefront_of = in_flight.most_in_flight, in_flight.wavefront_of
    monkeypatch.setattr(
        continuous, "most_in_flight", lambda asked, **options: most(asked, **options | {"fused": True})
    )
    monkeypatch.setattr(
        continuous, "wavefront_of", lambda batch, tokens, *, asked: wavefront_of(batch, tokens, asked=True)
    )


@cache
def model_of(name):
    """Return a model whose searches are short; ``name``: a mixer, a hybrid, or a prelude, coda or both."""
    if name == "hybrid":
        return of_mixer(name, None)
    if name not in MIXERS:
        return composed(*name)
    stopping = ib.StoppingOverrides(tolerance=1e-3, max_iterations=200)
    undamped = ib.AtEvaluation(solver=ib.PicardSpec(), stopping=stopping)
    return _model(name, n_layers=1, at_evaluation=undamped)


@cache
def sequential(model, requests, **options):
    """Return the new tokens of each request by sequential decoding, and the number of calls."""
    decoder, found, numbers = decode(model, requests, max_in_flight=1, **options)
    assert numbers == [1]
    return found, decoder.calls


def requests_of(sampling, vocab_size=19, **changes):
    return tuple(
        Request(
            prompt=tuple((3 * row + 5 * number) % vocab_size for number in range(length)),
            max_new_tokens=count,
            sampling=sampling,
            seed=row,
            **changes,
        )
        for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
    )


def shortened(requests, count):
    return tuple(replace(each, max_new_tokens=min(count, each.max_new_tokens)) for each in requests)


def decode(model, requests, *, late=False, slots=6, cancel=None, captured=None, **options):
    """Return the decoder, the new tokens of each request, and the numbers of tokens in flight in turn.

    The first request is decoded alone for some calls before the others arrive.
    """
    decoder = ContinuousDecoder(model, max_batch_size=slots, max_seq_len=48, **options)
    decoder.on_gpu |= late  # tokens are read one call late
    if captured is not None:
        decoder.batch.captured = captured
    found, numbers, waiting = defaultdict(list), [], list(requests)
    decoder.submit(waiting.pop(0))
    while decoder.busy or waiting:
        for new in decoder.step():
            found[new.request].append(new)
        if waiting and len(found[0]) >= 2:
            for request in waiting:
                decoder.submit(request)
            waiting = []
        if cancel is not None and not waiting and len(found[cancel]) >= 2:
            assert decoder.cancel(cancel)
            cancel = None
        if decoder.tokens_in_flight not in numbers[-1:]:
            numbers.append(decoder.tokens_in_flight)
    assert not decoder.step()
    return decoder, [found[row] for row in range(len(requests))], numbers


@pytest.mark.parametrize(
    ("sampling", "late"), [("greedy", False), ("sampled", True)], ids=["at-once", "late"]
)
@pytest.mark.parametrize("family", ["attention", "mamba2", "hybrid"])
def test_texts_that_arrive_and_end_are_those_of_sequential_decoding(family, sampling, late):
    """One text, then six, then fewer and fewer; prompts of several lengths."""
    model, requests = model_of(family), requests_of(SAMPLINGS[sampling])
    flying, found, numbers = decode(model, requests, late=late, tolerance=1e-3)
    expected, calls = sequential(model, requests, tolerance=1e-3)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8, 1, 4, 8]
    assert flying.calls < calls
    assert flying.statistics.calls == flying.calls
    assert 1 < flying.statistics.tokens_in_flight < 8
    assert flying.tokens_in_flight == flying.wavefront.tokens == 8


@pytest.mark.parametrize("case", ["residual", "prelude", "narrow core"])
@pytest.mark.parametrize("family", ["attention", "mamba2"])
def test_prelude_and_coda_commit_each_token_once(case, family):
    """Sequential decoding commits the prelude's token before its search, the wavefront after it."""
    model = model_of((case, family))
    requests = requests_of(Sampling(), vocab_size=23)
    _, found, numbers = decode(model, requests, tolerance=3e-4)
    expected, _ = sequential(model, requests, tolerance=3e-4)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8, 1, 4, 8]


class Shapes(Replayed):
    """Captured graphs on the CPU, with the shapes of their calls on tokens in flight."""

    def __init__(self, monkeypatch):
        self.shapes, self.key, call = defaultdict(set), None, Wavefront._call

        def recorded(wavefront, rows_R, results):
            self.shapes[self.key].add((len(rows_R), wavefront.tokens))
            call(wavefront, rows_R, results)

        monkeypatch.setattr(Wavefront, "_call", recorded)

    def do(self, name, slots, procedure):
        self.key = name, slots
        if name in ("wave", "decide", "advance"):
            super().do(name, slots, procedure)
        else:  # steps on single tokens read values on the CPU
            procedure()


@pytest.mark.parametrize("name", ["mamba2", "attention", "sandwich"])
def test_every_captured_call_has_one_number_of_tokens(name, monkeypatch):
    masked = slot_attention.attend_slot_windows
    monkeypatch.setattr(
        "implicit_blocks.mixers.attention.mixer.attend_slot_windows",
        lambda *args, **options: masked(*args, backend="masked", **options),
    )
    model = model_of(("residual", "attention") if name == "sandwich" else name)
    requests, graphs = requests_of(Sampling()), Shapes(monkeypatch)
    _, found, numbers = decode(model, requests, late=True, captured=graphs, tolerance=3e-4)
    expected, _ = sequential(model, requests, tolerance=3e-4)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8, 1, 4, 8]
    assert graphs.shapes["advance", 1] == {(1, 8)}
    for (_, slots), shapes in graphs.shapes.items():
        assert shapes == {(slots, 8 if slots <= 2 else 4)}


def test_texts_that_arrive_when_others_end_find_the_number_of_the_calls_before(monkeypatch):
    """Two of three texts end; the call that ends the wavefront of the third is one of a single text."""
    first, second, third, *others = requests_of(Sampling())
    ending = (replace(each, max_new_tokens=6) for each in (second, third))
    requests = (first, *ending, *others, *others[1:])
    decoder = ContinuousDecoder(model_of("mamba2"), max_batch_size=6, max_seq_len=48)
    decoder.batch.captured = graphs = Shapes(monkeypatch)
    for request in requests[:3]:
        decoder.submit(request)
    found = defaultdict(list)
    while decoder.busy:
        for new in decoder.step():
            found[new.request].append(new)
        if decoder.submitted == 3 and sum(text is not None for text in decoder.texts) == 1:
            assert decoder.tokens_in_flight == 4
            for request in requests[3:]:
                decoder.submit(request)
    assert decoder.submitted == len(requests) == 8
    expected, _ = sequential(model_of("mamba2"), requests)
    check_equal([found[row] for row in range(8)], expected, atol=5e-3)
    assert all(shapes == {(slots, 8 if slots <= 2 else 4)} for (_, slots), shapes in graphs.shapes.items())


@pytest.mark.parametrize("limit", [1, 4])
def test_tokens_that_miss_the_tolerance_are_those_of_sequential_decoding(family, limit):
    model, requests = model_of(family), requests_of(SAMPLINGS["sampled"])
    options = {"tolerance": 1e-7, "max_iterations": limit}
    _, found, numbers = decode(model, requests, late=True, **options)
    expected, _ = sequential(model, requests, **options)
    check_equal(found, expected, atol=1e-5)
    assert not any(new.converged for news in found for new in news[1:])
    assert numbers == [8, 1, 4, 8]


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_stop_token_inside_a_wavefront_ends_a_text_while_the_number_changes(family, late):
    first, *others = requests_of(SAMPLINGS["sampled"])
    model, requests = model_of(family), (first, *shortened(others, 3))
    free, _ = sequential(model, requests)
    for end in range(2, 7):  # around the call in which the others arrive
        token = free[0][end - 1].token
        if any(old.token == token for old in free[0][: end - 1]):
            continue
        ending = replace(first, stop_token_ids=(token,))
        _, found, numbers = decode(model, (ending, *requests[1:]), late=late)
        assert [new.token for new in found[0]] == [old.token for old in free[0][:end]]
        assert [new.last for new in found[0]] == [False] * (end - 1) + [True]
        check_equal(found[1:], free[1:], atol=5e-3)
        assert numbers[0] == 8


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_cancelled_text_changes_no_other(family, cancelled, late):
    model, requests = model_of(family), requests_of(SAMPLINGS["sampled"])
    expected = list(sequential(model, requests)[0])
    _, found, _ = decode(model, requests, cancel=cancelled, late=late)
    assert 2 <= len(found[cancelled]) < COUNTS[cancelled]
    expected[cancelled] = expected[cancelled][: len(found[cancelled])]
    for news, olds in zip(found, expected, strict=True):
        assert [new.token for new in news] == [old.token for old in olds]


def test_slots_are_reused_while_the_number_changes(family):
    """More texts than slots, so that prompts enter beside tokens in flight; also in chunks."""
    model, requests = model_of(family), requests_of(SAMPLINGS["sampled"])
    requests += shortened(requests[:3], 3)
    expected, _ = sequential(model, requests)
    for options in ({"slots": 5, "late": True}, {"slots": 16, "prefill_chunk": 3}):
        _, found, numbers = decode(model, requests, **options)
        check_equal(found, expected, atol=5e-3)
        assert {1, 4, 8} == set(numbers)


def test_a_small_batch_has_more_tokens_in_flight_when_texts_end(family):
    model, requests = model_of(family), requests_of(Sampling())[:4]
    expected, _ = sequential(model, requests)
    _, found, numbers = decode(model, requests, slots=4)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8, 4, 8]


def test_one_text_takes_the_calls_of_a_batch_of_one(family):
    model, requests = model_of(family), requests_of(Sampling())[:1]
    alone, expected, _ = decode(model, requests, slots=1)
    among_many, found, numbers = decode(model, requests, slots=16)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8]
    assert among_many.statistics == alone.statistics


def test_many_texts_take_the_calls_of_sequential_decoding(family):
    model, requests = model_of(family), [replace(each, max_new_tokens=5) for each in requests_of(Sampling())]
    statistics = []
    for asked in (1, None):
        decoder = ContinuousDecoder(model, max_batch_size=6, max_seq_len=48, max_in_flight=asked)
        for request in requests:
            decoder.submit(request)
        while all(text is not None for text in decoder.texts) or not decoder.calls:
            decoder.step()
        statistics.append(decoder.statistics)
    assert statistics[0] == statistics[1]
    assert statistics[1].tokens_in_flight == 1


def test_a_number_that_is_asked_for_does_not_follow_the_texts(family):
    model, requests = model_of(family), requests_of(Sampling())
    expected, _ = sequential(model, requests)
    _, found, numbers = decode(model, requests, max_in_flight=3)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [3]


def test_texts_with_processors_stay_sequential_in_a_large_batch():
    """The host calls processors for every provisional token."""
    model = model_of("mamba2")

    def halved(tokens, logits):
        return logits.index_fill(1, tokens[0], -50.0)

    requests = shortened(requests_of(Sampling(), logits_processor=halved), 8)
    expected, _ = sequential(model, requests)
    _, found, numbers = decode(model, requests)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [1]
    few, expected = requests[:2], expected[:2]
    _, found, numbers = decode(model, few, slots=2)
    check_equal(found, expected, atol=5e-3)
    assert numbers == [8]


def test_a_lower_number_of_the_wavefront_keeps_what_is_solved(family):
    """After ``in_flight.drain`` every slot has one token in flight, after all tokens that were returned."""
    model = model_of(family)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=48, max_in_flight=8)
    for request in requests_of(Sampling())[:2]:
        decoder.submit(request)
    wavefront, made = decoder.wavefront, defaultdict(int)
    while not wavefront.flight.done.any():
        for new in decoder.step():
            made[new.request] += 1
    before = decoder.calls
    in_flight.drain(wavefront, lambda: continuous.fly(decoder, wavefront, 2))
    for new in decoder._collected():
        made[new.request] += 1
    assert decoder.calls == before + 1
    assert wavefront.count_S.tolist() == [1, 1]
    assert not wavefront.flight.done.any()
    assert wavefront.flight.fresh.sum() == 2
    lengths = [LENGTHS[row] + made[row] - 1 for row in range(2)]
    assert decoder.batch.lengths_S.tolist() == lengths


@pytest.mark.parametrize(
    ("slots", "sizes"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_the_sizes_of_steps_include_those_of_several_tokens_in_flight(slots, sizes):
    decoder = ContinuousDecoder(model_of("mamba2"), max_batch_size=slots, max_seq_len=16)
    assert decoder.buckets == sizes
    assert [decoder.numbers_in_flight[size] for size in sizes[:2]] == [8, 8][: len(sizes)]
    assert all(size * number <= 16 for size, number in decoder.numbers_in_flight.items())


def test_generate_follows_the_rows_that_are_left(family, monkeypatch):
    model = model_of(family)
    prompts = [list(request.prompt) for request in requests_of(Sampling())]
    options = {"max_new_tokens": 11, "max_length": 12, "temperature": 1.0, "seed": 3}
    expected = ib.generate(model, prompts, max_in_flight=1, **options)
    monkeypatch.setattr("implicit_blocks.decoding.generation.uses_slots", lambda model: True)
    found = ib.generate(model, prompts, **options)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.statistics.tokens_in_flight > 1
