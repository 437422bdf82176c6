"""Texts of continuous decoding: requests, their progress, and the reports of their tokens.

Shape legend: V vocabulary, R slots of a step, W tokens in flight, T tokens of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.cuda.procedures import put_
from implicit_blocks.decoding.processors import (
    Criteria,
    Processors,
    check_processors,
    ends_text,
    process_logits,
)
from implicit_blocks.decoding.sampling import Sampling, noise_keys, seeds_of
from implicit_blocks.decoding.slots.batch import Places, SlotBatch
from implicit_blocks.decoding.slots.wavefront import Wavefront
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.specs import Stopping


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued by ``max_new_tokens`` tokens, or up to the first of ``stop_token_ids``.

    ``seed`` is that of the row's random generator. ``tolerance`` and ``max_iterations`` of its searches
    differ from the decoder's where they are not None; ``ContinuousDecoder.accepts_limits`` must be True.
    ``logits_processor`` changes the logits before ``sampling``, and ``stopping_criteria`` end the text, as in
    ``generate``.
    """

    prompt: Sequence[int] | Tensor
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    tolerance: float | None = None
    max_iterations: int | None = None
    logits_processor: Processors | None = None
    stopping_criteria: Criteria | None = None


class NewToken(NamedTuple):  # which is made three times faster than a frozen dataclass
    """A generated token, the number of its request, and whether it is the last one.

    ``logits`` (V,) are the model's that it was chosen from, before processors; ``iterations``, ``residual``
    and ``converged`` report its search, and are None in explicit models. ``stopped``: a stop token or a
    criterion ended the text.
    """

    request: int
    token: int
    last: bool
    logits: Tensor
    iterations: int | None = None
    residual: float | None = None
    converged: bool | None = None
    stopped: bool = False


class Text:
    """An active text: its request, the number of tokens ``chosen``, and the number returned (``made``).

    ``begun`` is the call of the map after which its last token was chosen. ``in_flight``: its tokens are
    searched by the wavefront, not one after the other.
    """

    def __init__(self, number: int, request: Request, ids: Tensor) -> None:
        self.number, self.request, self.ids = number, request, ids
        self.length = ids.shape[1]
        self.chosen = self.made = self.begun = 0
        self.ended = self.in_flight = False
        count, sampling = request.max_new_tokens, request.sampling
        seeds = seeds_of(request.seed, 1)
        self.keys_N = noise_keys(seeds, count, device=ids.device)[0] if sampling.draws else None
        self.tokens_T: Tensor | None = None
        """The prompt and the new tokens, for processors and criteria."""
        if request.logits_processor is not None or request.stopping_criteria is not None:
            check_processors(request.logits_processor, request.stopping_criteria)
            self.tokens_T = torch.cat((ids[0], ids.new_zeros(count)))

    def took(self, numbers: Sequence[float], logits_V: Tensor, *, searched: bool) -> NewToken:
        """Count a token, given the numbers of a report, and end the text if it is the last one."""
        token, iterations, residual, converged = numbers
        stopped = token in self.request.stop_token_ids
        if self.tokens_T is not None:
            end = self.ids.shape[1] + self.made
            self.tokens_T[end] = int(token)
            stopped |= ends_text(self.request.stopping_criteria, self.tokens_T[: end + 1], logits_V)
        self.made += 1
        self.ended = stopped or self.made == self.request.max_new_tokens
        if not searched:
            return NewToken(self.number, int(token), self.ended, logits_V, stopped=stopped)
        search = int(iterations), residual, bool(converged)
        return NewToken(self.number, int(token), self.ended, logits_V, *search, stopped)

    def process(self, length: int, logits_V: Tensor) -> None:
        """Apply the processors in place to the logits after the first ``length`` tokens."""
        assert self.tokens_T is not None
        if self.request.logits_processor is not None:
            logits_V.copy_(process_logits(self.request.logits_processor, self.tokens_T[:length], logits_V))


@dataclass(frozen=True)
class Chosen:
    """Tokens chosen after a call of the map, and their texts by index among the slots.

    ``report`` is (4, R): the token, and iterations, residual and status of the search before it.
    """

    call: int
    rows: list[int]
    texts: dict[int, Text]
    logits: Tensor
    """(R, V)."""
    report: AsyncHostCopy

    def read(self, *, searched: bool) -> Iterator[tuple[int, Text, NewToken]]:
        """Yield the slots, texts and tokens of texts that have not ended, and count the tokens."""
        numbers = list(zip(*self.report.read(), strict=True))
        logits = self.logits.unbind()  # at once, since there may be hundreds
        for place, text in self.texts.items():
            if not text.ended:
                yield self.rows[place], text, text.took(numbers[place], logits[place], searched=searched)


@dataclass(frozen=True)
class Flown:
    """The tokens in flight after a call of the map; ``report`` is (5, R, W), as in ``Results``."""

    call: int
    rows: list[int]
    texts: dict[int, Text]
    logits: Tensor
    """(R, W, V)."""
    report: AsyncHostCopy

    def read(self, *, searched: bool) -> Iterator[tuple[int, Text, NewToken]]:
        """Yield the slots, texts and tokens after tokens that were solved, and count the tokens."""
        solved, *report = self.report.read()
        for place, text in self.texts.items():
            for number, flag in enumerate(solved[place]):
                if flag and not text.ended:
                    numbers = [row[place][number] for row in report]
                    logits = self.logits[place, number]
                    yield self.rows[place], text, text.took(numbers, logits, searched=searched)


def check_limits(request: Request, stopping: Stopping | None, *, accepted: bool) -> None:
    """Check the limits of a request's searches.

    Raises:
        ValueError: they are not accepted, or invalid.

    """
    limits = {"tolerance": request.tolerance, "max_iterations": request.max_iterations}
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        return
    if not accepted or stopping is None:
        named = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(
            f"the request has {named}, but no search of this decoder ends by its residual: the model is "
            f"explicit, or has a fixed number of loops or another exit criterion; omit {' and '.join(given)}"
        )
    SearchOptions(tolerance=request.tolerance, max_iterations=request.max_iterations).stopping(stopping)


def filled_up(texts: Sequence[Text | None], slots: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return slots padded to the first of ``sizes`` that fits with others, idle first, in ascending order."""
    chosen, size = set(slots), next(size for size in sizes if size >= len(slots))
    idle = (n for n, text in enumerate(texts) if text is None and n not in chosen)
    busy = (n for n, text in enumerate(texts) if text is not None and n not in chosen)
    return sorted([*slots, *islice(chain(idle, busy), size - len(slots))])


def by_rule(texts: dict[int, Text]) -> dict[Sampling, list[int]]:
    """Return the places of texts that do not take the model's most likely token, by their rule."""
    places: dict[Sampling, list[int]] = defaultdict(list)
    for place, text in texts.items():
        if text.request.sampling.draws or text.request.logits_processor is not None:
            places[text.request.sampling].append(place)
    return places


def mask_of(places: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return a mask (R,) of ``size`` places that is True at these, without synchronizing with the device."""
    mask, chosen = torch.zeros(size, dtype=torch.bool, device=device), set(places)
    put_(mask, [place in chosen for place in range(size)])
    return mask


def draw_tokens(batch: SlotBatch, places: Places, texts: dict[int, Text]) -> None:
    """Process logits and sample tokens for the texts that request it; texts with one rule together."""
    own = [(place, text) for place, text in texts.items() if text.tokens_T is not None]
    for place, text in own:
        text.process(text.ids.shape[1] + text.chosen, places.logits_RV[place])
    for sampling, drawing in by_rule(texts).items():
        keys = [torch.zeros((), dtype=torch.int64, device=batch.device)] * len(places.rows_R)
        for place in drawing:
            keys_N = texts[place].keys_N
            keys[place] = keys[place] if keys_N is None else keys_N[texts[place].chosen]
        chosen = sampling.choose(places.logits_RV, torch.stack(keys))
        batch.take_tokens(places, chosen, mask_of(drawing, len(keys), batch.device))
    for place, text in own:
        assert text.tokens_T is not None
        text.tokens_T[text.ids.shape[1] + text.chosen] = batch.tokens_S[places.rows_R[place]]


def draw_in_flight(wavefront: Wavefront, size: int, rows_R: Tensor, texts: dict[int, Text]) -> None:
    """Choose the tokens after those in flight, for the texts with processors or samples."""
    results = wavefront.results(size)
    for place, text in texts.items():
        if text.tokens_T is not None:
            row = rows_R[place]
            length, count = int(wavefront.batch.lengths_S[row]), int(wavefront.count_S[row])
            text.tokens_T[length : length + count] = wavefront.flight.tokens[row, :count]
            for number in range(count):
                text.process(length + number + 1, results.logits[place, number])
    for sampling, drawing in by_rule(texts).items():
        where = mask_of(drawing, size, rows_R.device)
        keys = wavefront.keys(rows_R)
        drawn = sampling.choose(results.logits.flatten(0, 1), keys.flatten()).view_as(results.chosen)
        results.chosen.copy_(torch.where(where[:, None], drawn, results.chosen))
