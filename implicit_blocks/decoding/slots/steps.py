"""Parts of a step of continuous decoding: prompts enter slots, tokens are chosen, tokens fly.

Shape legend: R slots of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.decoding.slots.batch import report_searches
from implicit_blocks.decoding.slots.in_flight import drain, land
from implicit_blocks.decoding.slots.prefill import Prefill
from implicit_blocks.decoding.slots.texts import (
    Chosen,
    Flown,
    Text,
    by_rule,
    draw_in_flight,
    draw_tokens,
    filled_up,
)
from implicit_blocks.decoding.slots.wavefront import Wavefront

if TYPE_CHECKING:
    from implicit_blocks.decoding.slots.continuous import ContinuousDecoder


def admit(decoder: ContinuousDecoder) -> None:
    """Solve queued prompts in free slots, those that are alike together; choose their first tokens."""
    if decoder.prefill is not None:
        _admit_chunk(decoder, decoder.prefill)
        return
    began = None
    while decoder.waiting:  # repeated if a text ends with its first token
        free = [slot for slot, text in enumerate(decoder.texts) if text is None]
        counts = {"waiting": len(decoder.waiting), "free": len(free)}
        running = len(decoder.texts) - len(free)
        if began is None and not decoder.admission.is_due(time.perf_counter(), running=running, **counts):
            return
        entering = list(zip(free, decoder.waiting, strict=False))
        if not entering:
            break
        if began is None:
            if decoder.before_prompts is not None:
                decoder.before_prompts()
            began = time.perf_counter()
        follow(decoder, [text for _, text in entering])
        for group in decoder.prompts.groups(entering):
            for _, text in group:
                decoder.waiting.remove(text)
            solution = decoder.prompts.solve(group)  # after an error its slots are free, for the other texts
            for slot, text in group:
                decoder.texts[slot] = text
            if decoder.on_prompts is not None:
                decoder.on_prompts([text.number for _, text in group], solution)
            choose(decoder, [slot for slot, _ in group])
    if began is not None:
        decoder.admission.took(time.perf_counter() - began)


def choose(decoder: ContinuousDecoder, slots: Sequence[int]) -> None:
    """Choose the next token of slots whose last is committed, and start its search."""
    if not slots:
        return
    rows = filled_up(decoder.texts, slots, decoder.buckets)
    size, place_of = len(rows), {slot: place for place, slot in enumerate(rows)}
    texts = {place_of[slot]: text for slot in slots if (text := decoder.texts[slot]) is not None}
    for place, text in texts.items():
        text.begun = decoder.calls
        if text.chosen + 1 == text.request.max_new_tokens:
            decoder.texts[rows[place]] = None
    on = [place in texts and decoder.texts[slot] is not None for place, slot in enumerate(rows)]
    decoder.batch.point("choose", rows, [place in texts for place in range(size)], on)
    decoder.batch.predict(size)
    places = decoder.batch.places("choose", size)
    logits = places.logits_RV.clone()  # the model's, which processors change
    draw_tokens(decoder.batch, places, texts)
    if decoder.wavefront is None or decoder.tokens_in_flight == 1:
        decoder.batch.begin(size)
        if decoder.quantized is not None:
            decoder.quantized.begin(places.rows_R, places.where_R & places.on_R)
    else:
        for place, text in texts.items():
            request = text.request
            decoder.wavefront.enter(
                rows[place], prompt=text.length, count=request.max_new_tokens, seed=request.seed
            )
            text.in_flight = True
        report_searches(decoder.batch, size)
        decoder.wavefront.begin(places.rows_R, places.where_R, places.on_R)
    decoder._chosen.append(Chosen(decoder.calls, rows, texts, logits, AsyncHostCopy(places.report_4R)))
    for text in texts.values():
        text.chosen += 1


def _admit_chunk(decoder: ContinuousDecoder, prefill: Prefill) -> None:
    """Assign queued prompts to free slots, and solve one chunk of the first of them."""
    entering = prefill.texts
    for slot, text in enumerate(decoder.texts):
        if text is None and slot not in entering and decoder.waiting:
            prefill.enter(slot, decoder.waiting.popleft())
    entering = prefill.texts
    if (ready := prefill.step()) is not None:
        follow(decoder, [entering[ready]])
        decoder.texts[ready] = entering[ready]
        choose(decoder, [ready])


def follow(decoder: ContinuousDecoder, entering: Sequence[Text] = ()) -> list[int]:
    """Set the number of tokens in flight for the texts that are active and ``entering``.

    Texts change between sequential decoding and the wavefront after a committed token. From sequential
    decoding each one changes when its token is committed, and then waits for the others. To sequential
    decoding, or to fewer tokens in flight, all change together: tokens that are not solved begin anew.

    Returns:
        The slots of active texts.

    """
    busy, wavefront = _active(decoder), decoder.wavefront
    if wavefront is None:
        return busy
    tokens = _most_in_flight(decoder, busy, entering)
    if tokens < decoder.tokens_in_flight and (flying := slots_in_flight(decoder)):
        if flying == busy:  # otherwise they wait for other texts, and none has a solved token
            _drain(decoder, wavefront, flying)
            busy = flying = _active(decoder)
            tokens = _most_in_flight(decoder, busy, entering)
        if tokens == 1 and flying:
            _land(decoder, wavefront, flying)
    if tokens > 1:
        wavefront.resize(tokens)
    decoder.tokens_in_flight = tokens
    return busy


def _active(decoder: ContinuousDecoder) -> list[int]:
    return [slot for slot, text in enumerate(decoder.texts) if text is not None]


def slots_in_flight(decoder: ContinuousDecoder) -> list[int]:
    """Return the slots of active texts with tokens in flight."""
    return [slot for slot, text in enumerate(decoder.texts) if text is not None and text.in_flight]


def _most_in_flight(decoder: ContinuousDecoder, busy: Sequence[int], entering: Sequence[Text]) -> int:
    """Return the maximum number of tokens in flight of active and ``entering`` texts.

    It is 1 for texts with processors, which the host calls for every token, if it is 1 for a full batch.
    """
    count = len(busy) + len(entering)
    tokens = decoder.numbers_in_flight[next(size for size in decoder.buckets if size >= count)]
    if tokens == 1 or decoder.numbers_in_flight[decoder.buckets[-1]] > 1:
        return tokens
    texts = [*entering, *(decoder.texts[slot] for slot in busy)]
    return 1 if any(text is not None and text.tokens_T is not None for text in texts) else tokens


def _drain(decoder: ContinuousDecoder, wavefront: Wavefront, slots: list[int]) -> None:
    """Commit all solved tokens, drop the provisional ones, and read the tokens chosen so far."""
    size = decoder._point(slots)
    wavefront.resize(decoder.numbers_in_flight[size])
    drain(wavefront, lambda: fly(decoder, wavefront, size))
    decoder._made = decoder._collected()
    for text in decoder.texts:
        if text is not None:
            text.chosen = text.made


def _land(decoder: ContinuousDecoder, wavefront: Wavefront, slots: list[int]) -> None:
    """Continue texts with one token in flight by sequential decoding."""
    land(wavefront)
    rows = filled_up(decoder.texts, slots, decoder.buckets)
    where = [slot in slots for slot in rows]
    decoder.batch.point("choose", rows, where, where)
    decoder.batch.begin(len(rows))
    for slot in slots:
        text = decoder.texts[slot]
        assert text is not None
        text.in_flight, text.begun = False, decoder.calls


def search_tokens(decoder: ContinuousDecoder, size: int) -> None:
    """Call the map on the tokens of texts without tokens in flight, and choose those after solved ones."""
    batch, quantized = decoder.batch, decoder.quantized
    committing = [] if decoder.on_gpu else decoder._committing()
    before = decoder._done
    if quantized is not None and quantized.wants(decoder.texts, size=size):
        quantized.step(size)
    else:
        batch.step(size, commit=decoder.on_gpu or bool(committing))
    decoder._done = AsyncHostCopy(batch.search.done)
    if quantized is not None:
        quantized.read(calls=decoder.calls, wait=not decoder.on_gpu)
    if decoder.on_gpu:
        committing = decoder._committing(before)
    decoder.calls += batch.loops
    decoder.rows_called += size * batch.loops
    choose(decoder, committing)


def fly(decoder: ContinuousDecoder, wavefront: Wavefront, size: int) -> None:
    """Call the map on all tokens in flight, and choose the tokens after them."""
    rows_R = decoder.batch.places("step", size).rows_R
    texts = {place: text for place, slot in enumerate(decoder._rows) if (text := decoder.texts[slot])}
    results = wavefront.results(size)
    if by_rule(texts):
        wavefront.call(size)
        logits = results.logits.clone()  # the model's, which processors change
        draw_in_flight(wavefront, size, rows_R, texts)
        wavefront.decide(size)
    else:
        wavefront.advance(size)
        logits = results.logits.clone()  # the next call replaces them
    decoder.calls += 1
    decoder.rows_called += size
    report = AsyncHostCopy(results.report)
    decoder._chosen.append(Flown(decoder.calls, list(decoder._rows), texts, logits, report))
