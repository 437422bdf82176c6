"""Continuous decoding: rows at different tokens, and at different iterations, share every call of the map.

A batch that waits for its slowest row at every token pays for the longest search each time. Here a row whose
search has ended commits its token, chooses the next and starts its search, while the other rows continue
theirs; a waiting prompt replaces a text that has ended.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Unpack

import torch

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.decoding.generated import CallStatistics
from implicit_blocks.decoding.prompts import (
    check_model,
    check_prompts,
    check_search,
    check_stop_token_ids,
    token_rows,
)
from implicit_blocks.decoding.slots.admission import Admission
from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.decoding.slots.in_flight import most_in_flight, wavefront_of
from implicit_blocks.decoding.slots.prefill import Prefill, check_prefill
from implicit_blocks.decoding.slots.prompts import SlotPrompts
from implicit_blocks.decoding.slots.quantized import quantized_search
from implicit_blocks.decoding.slots.steps import admit, fly, follow, search_tokens, slots_in_flight
from implicit_blocks.decoding.slots.texts import (
    Chosen,
    Flown,
    NewToken,
    Request,
    Text,
    check_limits,
    filled_up,
)
from implicit_blocks.interfaces import SlotStates
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count


class ContinuousDecoder:
    """Continues any number of prompts, ``max_batch_size`` at a time, each independent of the others.

    ```python
    decoder = ContinuousDecoder(model, max_batch_size=16, max_seq_len=512)
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=100))
    for made in decoder.run():
        print(made.request, made.token)
    ```

    A step calls the map once, on all busy slots; with a fixed number of loops it makes all calls of a token.
    States are preallocated: the keys of attention layers are written in place, and slots are indexed, not
    copied. Each step is padded with idle slots to one of the ``buckets`` sizes, so that few shapes occur.

    Use it where searches or texts differ in length; where every token takes the same number of iterations,
    ``generate`` gives the same result with less overhead.

    Args:
        model: an ``ImplicitLM`` or ``ExplicitLM`` in evaluation mode; its weights must not change meanwhile.
        max_batch_size: number of texts that are decoded simultaneously.
        max_seq_len: maximum number of tokens of a text, its prompt included.
        buckets: sizes of a step, each at most ``max_batch_size``; None: ``max_batch_size`` and its halves,
            down to 1, and 4.
        window_length: number of tokens per window in which prompts are solved; None: one window.
        graphs: capture steps as CUDA graphs on a GPU, one for each of ``buckets``: a step is then one launch.
        state_dtype: dtype of states. ``torch.bfloat16`` applies to recurrent states such as Mamba2's, which
            are in float32 or better by default: it halves the memory traffic and rounds at every token.
            ``torch.int8`` applies to keys and values: it halves the memory traffic of 16 bits and rounds each
            head once, to multiples of 1/127 of its largest feature.
        max_in_flight: maximum number of tokens of a text that are searched at the same time (wavefront
            decoding). 1 decodes them one after the other, as is done, with a line in the log, where a mixer
            or an option of the search does not support several. None: on a GPU where fused kernels compute
            the whole call 8 while at most 2 texts are active and 4 while at most 4 are, otherwise 1.
        search_dtype: ``torch.int8`` or ``torch.float8_e4m3fn``: iterations far from a token's fixed point
            read weights in 8 bits, with one scale per output; ``"auto"``: the faster of both. The last
            iterations, and therefore the solution, are in full precision. Tokens are then decoded one after
            the other. On a GPU kernels serve calls of one or two texts; other calls, and models without the
            kernels of single tokens, use full precision, with a line in the log. None: full precision.
        prefill_chunk: number of tokens per step in which prompts are solved while texts are running; the
            memory of a prompt's search is then that of one chunk. None: whole prompts, between two steps.
        gather_seconds: maximum time for which texts wait for others while some are running, so that their
            prompts are solved together (``Admission``). 0: texts enter free slots at once.
        prefix_cache_bytes: size of a cache of the states after the chunks of prompts, in bytes: a prompt that
            begins with the chunks of an earlier one, such as a system prompt, continues from there, with the
            same result. Requires ``prefill_chunk``. 0: no cache.
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
        max_in_flight: int | None = None,
        search_dtype: torch.dtype | Literal["auto"] | None = None,
        prefill_chunk: int | None = None,
        prefix_cache_bytes: int = 0,
        gather_seconds: float = 0.0,
        **search: Unpack[SearchKwargs],
    ) -> None:
        check_model(model)
        check_search(search)
        require_count("max_batch_size", max_batch_size)
        require_count("max_seq_len", max_seq_len)
        if window_length is not None:
            require_count("window_length", window_length)
        check_prefill(prefill_chunk, prefix_cache_bytes, window_length)
        self.model, self.max_seq_len = model, max_seq_len
        self.buckets = _sizes_of_steps(buckets, max_batch_size)
        self.device = model.embedding.weight.device
        self.on_gpu = self.device.type == "cuda"
        options = SearchOptions.of_call(ContinuousDecoder, search)
        fused = graphs and self.on_gpu and search_dtype is None
        self.numbers_in_flight = {
            size: most_in_flight(max_in_flight, texts=size, max_seq_len=max_seq_len, fused=fused)
            for size in self.buckets
        }
        """The maximum number of tokens in flight per text, by the size of a step."""
        most = max(self.numbers_in_flight.values())
        self.batch = SlotBatch(
            model,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len + most - 1,  # keys are written for all tokens in flight
            options=options,
            graphs=graphs and self.on_gpu,
            state_dtype=state_dtype,
        )
        self.prompts = SlotPrompts(self.batch, window_length=window_length)
        self.quantized = quantized_search(self.batch, search_dtype, in_flight=max_in_flight)
        self.wavefront = wavefront_of(self.batch, most, asked=max_in_flight is not None)
        self.tokens_in_flight = 1
        """The maximum number of tokens in flight per text now, which follows the number of active texts."""
        self.prefill: Prefill | None = None
        if prefill_chunk is not None:
            self.prefill = Prefill(self.batch, chunk=prefill_chunk, cache_bytes=prefix_cache_bytes)
        self.texts: list[Text | None] = [None] * max_batch_size
        self.waiting: deque[Text] = deque()
        self.submitted = 0
        self.calls = 0
        """The number of calls of the map on busy slots so far, without those for prompts."""
        self.rows_called = 0
        """The number of rows in those calls, padding included."""
        self._done: AsyncHostCopy | None = None  # the slots whose searches had ended after the last call
        self._chosen: deque[Chosen | Flown] = deque()  # tokens that are being copied to the host
        self._rows: list[int] = []  # of the last call
        self._searched = 0  # single tokens in calls, summed over all calls
        self._made: list[NewToken] = []  # tokens that are returned by the current step
        self.admission = Admission(gather_seconds)
        self.before_prompts: Callable[[], None] | None = None
        """Called before prompts are solved."""
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
                vocabulary, an invalid seed, ``max_new_tokens`` below 1, processors or criteria that cannot be
                called, or a tolerance or maximum number of iterations that is invalid or that the decoder
                does not accept.

        """
        check_limits(request, self.batch.search.stopping, accepted=self.accepts_limits)
        require_count("max_new_tokens", request.max_new_tokens)
        ids = token_rows([request.prompt], device=torch.device("cpu"))[0][None]  # a check on a GPU waits
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
        self.waiting.append(Text(self.submitted, request, ids.to(self.device, non_blocking=True)))
        self.submitted += 1
        return self.submitted - 1

    @property
    def statistics(self) -> CallStatistics:
        """The calls of the map so far, the tokens in flight and their restarts."""
        if self.wavefront is None:
            return CallStatistics(self.calls, 1.0, 0)
        tokens, windows, restarts = self.wavefront.counts_3.tolist()
        mean = (tokens + self._searched) / max(1, windows + self._searched)
        return CallStatistics(self.calls, mean, restarts)

    @property
    def accepts_limits(self) -> bool:
        """Whether requests can have their own tolerance and iterations: searches end by their residuals."""
        return self.batch.search.limits is not None

    def cancel(self, number: int) -> bool:
        """End a text early, and free its slot; return False if it has ended before."""
        for text in self.waiting:
            if text.number == number:
                self.waiting.remove(text)
                return True
        for slot, text in ({} if self.prefill is None else self.prefill.texts).items():
            if text.number == number:
                self._leave(slot)
                return True
        active = [text for text in self.texts if text is not None and text.number == number]
        active += [text for chosen in self._chosen for text in chosen.texts.values() if text.number == number]
        for text in active:
            if text.ended:
                return False
            text.ended = True  # tokens that are being copied are dropped
            if text in self.texts:
                self._leave(self.texts.index(text))
            return True
        return False

    def run(self) -> Iterator[NewToken]:
        """Yield tokens as they are generated, until all submitted texts have ended."""
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether a text is active or queued, or a token has not been returned yet."""
        prompts = self.prefill is not None and bool(self.prefill.texts)
        return bool(self.waiting or self._chosen) or prompts or any(text is not None for text in self.texts)

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Fill free slots, call the map once, and return the new tokens that are known, possibly none.

        With several tokens in flight a call can end several searches of a text.

        On a GPU the host is one call ahead of the device: the flags of ended searches and the chosen tokens
        are read while the next call runs. The call after the end of a search commits its token, so that only
        the end of a text by a stop token is noticed late.
        """
        admit(self)
        busy = follow(self)
        if not busy:
            return self._collected()
        size = self._point(busy)
        searching = len(busy) if self.tokens_in_flight == 1 else len(busy) - len(slots_in_flight(self))
        if self.wavefront is not None and not searching:
            fly(self, self.wavefront, size)
        else:
            self._searched += searching
            search_tokens(self, size)
        return self._collected(before=self.calls if self.on_gpu else None)

    def _committing(self, done: AsyncHostCopy | None = None) -> list[int]:
        """Return the slots that commit in the call after the one that ``done`` belongs to."""
        in_work = [(slot, text) for slot, text in enumerate(self.texts) if text and not text.in_flight]
        if self.batch.search.solver is None:
            return [slot for slot, _ in in_work]
        done = done if done is not None else self._done
        if done is None:
            return []
        flags = done.read()
        return [slot for slot, text in in_work if flags[slot] and text.begun < self.calls]

    def _point(self, busy: list[int]) -> int:
        """Set the slots of the next call, at least these, and return their number."""
        rows = filled_up(self.texts, busy, self.buckets)
        if rows != self._rows:
            self.batch.point("step", rows)
            self._rows = rows
        return len(rows)

    # ------------------------------------------------------------------------------------ tokens

    def _collected(self, *, before: int | None = None) -> list[NewToken]:
        """Return the tokens chosen before this call, or all; end texts at stop tokens."""
        made, self._made = self._made, []
        searched = self.batch.search.rule is not None
        while self._chosen and (before is None or self._chosen[0].call < before):
            for slot, text, new in self._chosen.popleft().read(searched=searched):
                made.append(new)
                if text.ended and self.texts[slot] is text:  # it continued until the token was known
                    self._leave(slot)
        return made

    def _leave(self, slot: int) -> None:
        self.texts[slot] = None
        if self.prefill is not None:
            self.prefill.leave(slot)
        self.batch.leave(slot)
        if self.wavefront is not None:
            self.wavefront.leave(slot)


def _sizes_of_steps(buckets: Sequence[int] | None, slots: int) -> list[int]:
    """Return the sizes of steps, ascending; by default the number of slots, its halves and 4."""
    halves = {-(-slots // (1 << times)) for times in range(slots.bit_length() + 1)}
    sizes = halves | {min(4, slots)} if buckets is None else {*buckets, slots}
    if not all(1 <= size <= slots for size in sizes):
        raise ValueError(f"buckets are {sorted(sizes)}; choose sizes from 1 to {slots} (slots)")
    return sorted(sizes)
