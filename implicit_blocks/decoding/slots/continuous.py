"""Continuous decoding: rows at different tokens, and at different iterations, share every call of the map.

A batch that waits for its slowest row at every token pays for the longest search each time. Here a row whose
search has ended commits its token, chooses the next and starts its search, while the other rows continue
theirs; a waiting prompt replaces a text that has ended.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count
from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.cuda.procedures import put_
from implicit_blocks.decoding.prompts import (
    check_model,
    check_prompts,
    check_search,
    check_stop_token_ids,
    lay_out,
)
from implicit_blocks.decoding.sampling import Sampling, noise_keys, seeds_of
from implicit_blocks.decoding.slots.batch import Places, SlotBatch
from implicit_blocks.interfaces import SlotStates
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued by ``max_new_tokens`` tokens, or up to the first of ``stop_token_ids``.

    ``seed`` is that of the row's random generator. ``tolerance`` and ``max_iterations`` of its searches
    differ from the decoder's where they are not None, which requires ``limits_per_request``.
    """

    prompt: Sequence[int] | Tensor
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    tolerance: float | None = None
    max_iterations: int | None = None


@dataclass(frozen=True)
class NewToken:
    """A generated token, the number of its request, and whether it is the last one.

    ``logits`` (V,) are those that it was chosen from; ``iterations``, ``residual`` and ``converged`` report
    its search, and are None in explicit models.
    """

    request: int
    token: int
    last: bool
    logits: Tensor
    iterations: int | None = None
    residual: float | None = None
    converged: bool | None = None


TOGETHER = 8192  # maximum number of prompt tokens that are solved together


class ContinuousDecoder:
    """Continues any number of prompts, ``max_batch_size`` at a time, each independent of the others.

    ```python
    decoder = ContinuousDecoder(model, max_batch_size=16, max_seq_len=512)
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=100))
    for made in decoder.run():
        print(made.request, made.token)
    ```

    A step calls the map once, on all busy slots. States are preallocated: the keys of attention layers are
    written in place, and slots are indexed, not copied. Each step is padded with idle slots to one of the
    ``buckets`` sizes, so that few shapes occur.

    Use it where searches or texts differ in length; where every token takes the same number of iterations,
    ``generate`` gives the same result with less overhead.

    Args:
        model: an ``ImplicitLM`` or ``ExplicitLM`` in evaluation mode; its weights must not change meanwhile.
        max_batch_size: number of texts that are decoded simultaneously.
        max_seq_len: maximum number of tokens of a text, its prompt included.
        buckets: sizes of a step, each at most ``max_batch_size``; None: ``max_batch_size`` and its halves,
            down to 1.
        window_length: number of tokens per window in which prompts are solved; None: one window.
        graphs: capture steps as CUDA graphs on a GPU, one for each of ``buckets``: a step is then one launch.
        state_dtype: dtype of states. ``torch.bfloat16`` applies to recurrent states such as Mamba2's, which
            are in float32 or better by default: it halves the memory traffic and rounds at every token.
            ``torch.int8`` applies to keys and values: it halves the memory traffic of 16 bits and rounds each
            head once, to multiples of 1/127 of its largest feature.
        limits_per_request: accept requests with their own ``tolerance`` and ``max_iterations``. On a GPU the
            steps then run without the fused kernel of the search, which has one rule for all slots.
        search: options of the searches, instead of the spec's (``SearchOptions``), such as ``tolerance`` or
            ``loops``; all but ``start`` and ``trajectory``.

    Raises:
        ValueError: for sizes out of range, a model in training mode, or a mixer without slots.

    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        *,
        max_batch_size: int,
        max_seq_len: int,
        buckets: Sequence[int] | None = None,
        window_length: int | None = None,
        graphs: bool = True,
        state_dtype: torch.dtype | None = None,
        limits_per_request: bool = False,
        **search: Unpack[SearchKwargs],
    ) -> None:
        check_model(model)
        check_search(search)
        for name, size in (
            ("max_batch_size", max_batch_size),
            ("max_seq_len", max_seq_len),
            ("window_length", window_length),
        ):
            if size is not None:
                require_count(name, size)
        halves = {-(-max_batch_size // (1 << times)) for times in range(max_batch_size.bit_length() + 1)}
        sizes = halves if buckets is None else {*buckets, max_batch_size}
        if not all(1 <= size <= max_batch_size for size in sizes):
            raise ValueError(
                f"buckets are {sorted(sizes)}; choose sizes from 1 to the {max_batch_size} slots"
            )
        self.model, self.max_seq_len, self.buckets = model, max_seq_len, sorted(sizes)
        self.window_length = window_length
        self.device = model.embedding.weight.device
        self.on_gpu = self.device.type == "cuda"
        self.batch = SlotBatch(
            model,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            options=SearchOptions(**search),
            graphs=graphs and self.on_gpu,
            state_dtype=state_dtype,
            limits_per_slot=limits_per_request,
        )
        self.texts: list[_Text | None] = [None] * max_batch_size
        self.waiting: deque[_Text] = deque()
        self.submitted = 0
        self.calls = 0
        """The number of calls of the map on busy slots so far, without those for prompts."""
        self.rows_called = 0
        """The number of rows in those calls, padding included."""
        self._done: AsyncHostCopy | None = None  # the slots whose searches had ended after the last call
        self._chosen: deque[_Chosen] = deque()  # tokens that are being copied to the host
        self._rows: list[int] = []  # of the last call
        self.on_prompts: Callable[[list[int], Solution | None], None] | None = None
        """Called with the numbers of requests whose prompts were solved together, and their solution."""

    @property
    def states(self) -> list[SlotStates]:
        """Each layer's states of all slots."""
        return self.batch.states

    def submit(self, request: Request) -> int:
        """Queue a prompt and return its number, counted from 0.

        Raises:
            ValueError: for a prompt that is empty, too long or has unknown tokens, stop tokens outside the
                vocabulary, an invalid seed, ``max_new_tokens`` below 1, or a tolerance or maximum number of
                iterations that is invalid or that the decoder does not accept.

        """
        _check_limits(request, self.batch.search.stopping, accepted=self.accepts_limits)
        require_count("max_new_tokens", request.max_new_tokens)
        ids, _ = lay_out([request.prompt], device=self.device)
        room = self.max_seq_len - request.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens is {request.max_new_tokens}, and max_seq_len {self.max_seq_len} leaves no "
                "room for a prompt; reduce max_new_tokens, or increase max_seq_len"
            )
        limit = f"max_seq_len {self.max_seq_len} minus max_new_tokens {request.max_new_tokens}"
        vocab_size = self.model.spec.vocab_size
        check_prompts(ids, vocab_size=vocab_size, max_length=room, limit=limit)
        check_stop_token_ids(request.stop_token_ids, vocab_size=vocab_size)
        self.waiting.append(_Text(self.submitted, request, ids))
        self.submitted += 1
        return self.submitted - 1

    @property
    def accepts_limits(self) -> bool:
        """Whether requests can have their own tolerance and maximum number of iterations."""
        return self.batch.search.limits is not None

    def cancel(self, number: int) -> bool:
        """End a text early, and free its slot; return False if it has ended before."""
        for text in self.waiting:
            if text.number == number:
                self.waiting.remove(text)
                return True
        active = [text for text in self.texts if text is not None and text.number == number]
        active += [text for chosen in self._chosen for text in chosen.texts.values() if text.number == number]
        for text in active:
            if text.ended:
                return False
            text.ended = True  # tokens that are being copied are dropped
            if text in self.texts:
                slot = self.texts.index(text)
                self.texts[slot] = None
                self.batch.leave(slot)
            return True
        return False

    def run(self) -> Iterator[NewToken]:
        """Yield tokens as they are generated, until all submitted texts have ended."""
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether a text is active or queued, or a token has not been returned yet."""
        return bool(self.waiting or self._chosen) or any(text is not None for text in self.texts)

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Fill free slots, call the map once, and return the new tokens that are known, possibly none.

        On a GPU the host is one call ahead of the device: the flags of ended searches and the chosen tokens
        are read while the next call runs. The call after the end of a search commits its token, so that only
        the end of a text by a stop token is noticed late.
        """
        self._admit()
        size = self._point()
        if not size:
            return self._collected()
        committing = [] if self.on_gpu else self._committing()
        before = self._done
        self.batch.step(size, commit=self.on_gpu or bool(committing))
        self._done = AsyncHostCopy(self.batch.search.done)
        if self.on_gpu:
            committing = self._committing(before)
        self.calls += 1
        self.rows_called += size
        self._choose(committing)
        return self._collected(before=self.calls if self.on_gpu else None)

    def _committing(self, done: AsyncHostCopy | None = None) -> list[int]:
        """Return the slots that commit in the call after the one that ``done`` belongs to."""
        in_work = [(slot, text) for slot, text in enumerate(self.texts) if text is not None]
        if self.batch.search.solver is None:
            return [slot for slot, _ in in_work]
        done = done if done is not None else self._done
        if done is None:
            return []
        flags = done.read()
        return [slot for slot, text in in_work if flags[slot] and text.begun < self.calls]

    def _point(self) -> int:
        """Set the slots of the next call and return their number, 0 if none is busy."""
        busy = [slot for slot, text in enumerate(self.texts) if text is not None]
        if not busy:
            return 0
        size = next(size for size in self.buckets if size >= len(busy))
        rows = _filled_up(self.texts, busy, size)
        if rows != self._rows:
            self.batch.point("step", rows)
            self._rows = rows
        return size

    # ------------------------------------------------------------------------------------ tokens

    def _admit(self) -> None:
        """Solve queued prompts in free slots, those that are alike together; choose their first tokens."""
        while self.waiting:  # repeated if a text ends with its first token
            free = [slot for slot, text in enumerate(self.texts) if text is None]
            entering = [(slot, self.waiting.popleft()) for slot in free[: len(self.waiting)]]
            if not entering:
                return
            for group in _alike(entering):
                for slot, text in group:
                    self.texts[slot] = text
                slots = [slot for slot, _ in group]
                ids = torch.cat([text.ids for _, text in group])
                request = group[0][1].request
                solution = self.batch.encode(
                    slots,
                    ids,
                    window_length=self.window_length,
                    tolerance=request.tolerance,
                    max_iterations=request.max_iterations,
                )
                if self.on_prompts is not None:
                    self.on_prompts([text.number for _, text in group], solution)
                self._choose(slots)

    def _choose(self, slots: Sequence[int]) -> None:
        """Choose the next token of slots whose last is committed, and start its search."""
        if not slots:
            return
        size = next(size for size in self.buckets if size >= len(slots))
        rows = _filled_up(self.texts, slots, size)
        texts = {rows.index(slot): text for slot in slots if (text := self.texts[slot]) is not None}
        for place, text in texts.items():
            text.begun = self.calls
            if text.chosen + 1 == text.request.max_new_tokens:
                self.texts[rows[place]] = None
        on = [place in texts and self.texts[slot] is not None for place, slot in enumerate(rows)]
        self.batch.point("choose", rows, [place in texts for place in range(size)], on)
        self.batch.predict(size)
        places = self.batch.places("choose", size)
        _draw(self.batch, places, texts)
        self.batch.begin(size)
        kept = places.logits_RV.clone()
        logits = {place: kept[place] for place in texts}
        self._chosen.append(_Chosen(self.calls, rows, texts, logits, AsyncHostCopy(places.report_4R)))
        for text in texts.values():
            text.chosen += 1

    def _collected(self, *, before: int | None = None) -> list[NewToken]:
        """Return the tokens chosen before this call, or all; end texts at stop tokens."""
        made: list[NewToken] = []
        while self._chosen and (before is None or self._chosen[0].call < before):
            made += _read_chosen(self, self._chosen.popleft())
        return made


class _Text:
    """An active text: its request, the number of tokens ``chosen``, and the number returned (``made``).

    ``begun`` is the call of the map after which its last token was chosen.
    """

    def __init__(self, number: int, request: Request, ids: Tensor) -> None:
        self.number, self.request, self.ids = number, request, ids
        self.chosen = self.made = self.begun = 0
        self.ended = False
        count, sampling = request.max_new_tokens, request.sampling
        seeds = seeds_of(request.seed, 1)
        self.keys_N = noise_keys(seeds, count, device=ids.device)[0] if sampling.draws else None


@dataclass(frozen=True)
class _Chosen:
    """Tokens chosen after a call of the map, and their texts by index among the slots."""

    call: int
    rows: list[int]
    texts: dict[int, _Text]
    logits: dict[int, Tensor]
    report: AsyncHostCopy


def _check_limits(request: Request, stopping: Stopping | None, *, accepted: bool) -> None:
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
            f"the request has {named}, and this decoder searches all texts by one rule; omit them, or create "
            "the decoder with limits_per_request=True, for an implicit model that searches to a tolerance"
        )
    SearchOptions(tolerance=request.tolerance, max_iterations=request.max_iterations).stopping(stopping)


def _filled_up(texts: Sequence[_Text | None], slots: Sequence[int], size: int) -> list[int]:
    """Return slots padded to ``size`` with others, idle ones first, in ascending order."""
    others = sorted((text is not None, n) for n, text in enumerate(texts) if n not in slots)
    return sorted([*slots, *(slot for _, slot in others[: size - len(slots)])])


def _read_chosen(decoder: ContinuousDecoder, chosen: _Chosen) -> Iterator[NewToken]:
    """Yield the chosen tokens of texts that have not ended; end texts at stop tokens."""
    searched = decoder.batch.search.solver is not None
    tokens, iterations, residual, converged = chosen.report.read()
    for place, text in chosen.texts.items():
        if text.ended:
            continue
        token = int(tokens[place])
        text.made += 1
        text.ended = text.made == text.request.max_new_tokens or token in text.request.stop_token_ids
        how = (int(iterations[place]), residual[place], bool(converged[place])) if searched else ()
        yield NewToken(text.number, token, text.ended, chosen.logits[place], *how)
        slot = chosen.rows[place]
        if text.ended and decoder.texts[slot] is text:  # the slot continued until its token was known
            decoder.texts[slot] = None
            decoder.batch.leave(slot)


def _alike(entering: Sequence[tuple[int, _Text]]) -> Iterator[list[tuple[int, _Text]]]:
    """Yield groups of texts with prompts of one length and the same limits, with at most TOGETHER tokens."""
    alike: dict[tuple[int, float | None, int | None], list[tuple[int, _Text]]] = defaultdict(list)
    for slot, text in entering:
        key = (text.ids.shape[1], text.request.tolerance, text.request.max_iterations)
        alike[key].append((slot, text))
    for (length, *_), group in alike.items():
        count = max(1, TOGETHER // length)
        yield from (group[first : first + count] for first in range(0, len(group), count))


def _draw(batch: SlotBatch, places: Places, texts: dict[int, _Text]) -> None:
    """Sample tokens for the texts that request it; texts with the same rule are sampled together."""
    by_rule: dict[Sampling, list[int]] = defaultdict(list)
    for place, text in texts.items():
        if text.request.sampling.draws:
            by_rule[text.request.sampling].append(place)
    for sampling, drawing in by_rule.items():
        keys = [torch.zeros((), dtype=torch.int64, device=batch.device)] * len(places.rows_R)
        for place in drawing:
            keys_N = texts[place].keys_N
            assert keys_N is not None
            keys[place] = keys_N[texts[place].chosen]
        where = torch.zeros_like(places.where_R)
        put_(where, [place in drawing for place in range(len(keys))])
        chosen = sampling.choose(places.logits_RV, torch.stack(keys))
        batch.take_tokens(places, chosen, where)
