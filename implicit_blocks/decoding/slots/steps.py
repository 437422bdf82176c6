"""Parts of a step of continuous decoding: prompts enter slots, tokens are chosen, tokens fly.

Shape legend: R slots of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.decoding.slots.batch import report_searches
from implicit_blocks.decoding.slots.prefill import Prefill
from implicit_blocks.decoding.slots.texts import (
    Chosen,
    Flown,
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
        entering = [(slot, decoder.waiting.popleft()) for slot in free[: len(decoder.waiting)]]
        if not entering:
            break
        if began is None:
            if decoder.before_prompts is not None:
                decoder.before_prompts()
            began = time.perf_counter()
        for group in decoder.prompts.groups(entering):
            for slot, text in group:
                decoder.texts[slot] = text
            solution = decoder.prompts.solve(group)
            if decoder.on_prompts is not None:
                decoder.on_prompts([text.number for _, text in group], solution)
            choose(decoder, [slot for slot, _ in group])
    if began is not None:
        decoder.admission.took(time.perf_counter() - began)


def choose(decoder: ContinuousDecoder, slots: Sequence[int]) -> None:
    """Choose the next token of slots whose last is committed, and start its search."""
    if not slots:
        return
    size = next(size for size in decoder.buckets if size >= len(slots))
    rows = filled_up(decoder.texts, slots, size)
    place_of = {slot: place for place, slot in enumerate(rows)}
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
    if decoder.wavefront is None:
        decoder.batch.begin(size)
        if decoder.quantized is not None:
            decoder.quantized.begin(places.rows_R, places.where_R & places.on_R)
    else:
        for place, text in texts.items():
            request = text.request
            length = text.ids.shape[1]
            decoder.wavefront.enter(
                rows[place], prompt=length, count=request.max_new_tokens, seed=request.seed
            )
        report_searches(decoder.batch, size)
        decoder.wavefront.begin(places.rows_R, places.where_R & places.on_R)
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
    ready = prefill.step()
    if ready is not None:
        decoder.texts[ready] = entering[ready]
        choose(decoder, [ready])


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
