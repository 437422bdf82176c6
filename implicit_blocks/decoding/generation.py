"""Generation: the prompts are solved in one window, then each token in a window of its own.

Shape legend: B batch, L tokens of the longest prompt, N new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks.decoding.generated import CallStatistics, Generated, Step
from implicit_blocks.decoding.processors import (
    Criteria,
    Processors,
    check_processors,
    ends_text,
    process_logits,
)
from implicit_blocks.decoding.prompts import (
    Prompts,
    check_model,
    check_prompts,
    check_search,
    check_stop_token_ids,
    lay_out,
    needed_ids,
)
from implicit_blocks.decoding.sampling import Sampling, noise_keys, seeds_of
from implicit_blocks.decoding.slots.generation import SlotGeneration
from implicit_blocks.decoding.slots.in_flight import decodes_in_flight, report_sequential
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count


class Options(SearchKwargs, total=False):
    """The options of ``stream``: those of ``generate``, which describes them."""

    max_new_tokens: int
    attention_mask: Tensor | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | Sequence[int]
    stop_token_ids: Sequence[int]
    logits_processor: Processors | None
    stopping_criteria: Criteria | None
    pad_token: int
    max_length: int | None
    window_length: int | None
    max_in_flight: int | None


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] = (),
    logits_processor: Processors | None = None,
    stopping_criteria: Criteria | None = None,
    pad_token: int = 0,
    max_length: int | None = None,
    window_length: int | None = None,
    max_in_flight: int | None = None,
    return_logits: bool = False,
    on_step: Callable[[Step], None] | None = None,
    **search: Unpack[SearchKwargs],
) -> Generated:
    """Continue prompts, each as it would be continued alone.

    The prompts are solved and committed in one window, or in windows of ``window_length`` tokens; then each
    token is solved to convergence and committed, and the next one chosen. The state is preallocated.

    Args:
        model: an ``ImplicitLM`` or ``ExplicitLM`` in evaluation mode.
        prompts: (B, L) int64, or a list of lists of tokens, of any lengths.
        max_new_tokens: number of tokens per row, unless the row stops earlier.
        attention_mask: (B, L), 0 at padding on either side of a prompt; for prompts in one tensor.
        temperature: 0 selects the most likely token; otherwise tokens are sampled (``Sampling``).
        top_k: sample from the ``top_k`` most likely tokens.
        top_p: sample from the most likely tokens that together have this probability.
        seed: one seed per row, or the first one: rows then use ``seed``, ``seed + 1``, …
        stop_token_ids: a row ends with the first of these tokens that it generates.
        logits_processor: changes the logits before temperature, top-k and top-p: a function
            ``(input_ids, scores)``, several, or a ``LogitsProcessorList`` of transformers. It is called for
            each row alone (``implicit_blocks.decoding.processors``).
        stopping_criteria: end a row beside the stop tokens: a function ``(input_ids, scores)``, several, or a
            ``StoppingCriteriaList`` of transformers; called for each row alone.
        pad_token: fills rows after their end.
        max_length: maximum number of tokens per row, the prompt included: longer prompts raise, and rows end
            there. None: no limit.
        window_length: number of tokens per window in which the prompts are solved; None: one window.
        max_in_flight: maximum number of tokens of a row that are searched at the same time, as in
            ``ContinuousDecoder``; 1 decodes them one after the other. A text that ends soon has fewer in
            flight, also if the number exceeds its length. None: the default there, and 1 with processors or
            criteria, which the host would call for every provisional token.
        return_logits: keep the logits of all tokens: B · N · V numbers.
        on_step: called with each step as soon as it is generated.
        search: options of the searches, instead of the spec's (``SearchOptions``), such as ``tolerance`` or
            ``loops``; all but ``start`` and ``trajectory``.

    Returns:
        Generated: tokens (B, N) int64, the outcome of each search, and on request the model's logits
        (B, N, V), before processors.

    Raises:
        ValueError: for prompts that are empty, too long or have unknown tokens, options out of range, a
            processor that excludes all tokens, or a model in training mode.

    """
    run = _Run(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        attention_mask=attention_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        pad_token=pad_token,
        max_length=max_length,
        window_length=window_length,
        max_in_flight=max_in_flight,
        **search,
    )
    steps, made = Stream(run), []
    for step in steps:
        if on_step is not None:
            on_step(step)
        made.append(step)
    return run.summed_up(made, steps.statistics, with_logits=return_logits)


def stream(model: LanguageModel, prompts: Prompts, **options: Unpack[Options]) -> Stream:
    """Iterate over the tokens of ``generate`` as they are generated; arguments as for ``generate``.

    The tokens of a step are (B,). Prompts and options are validated by this call, not by the first ``next``.
    """
    return Stream(_Run(model, prompts, **options))


class Stream(Iterator[Step]):
    """The steps of a generation, and its statistics."""

    def __init__(self, run: _Run) -> None:
        self._run, self._steps = run, run.steps()

    def __next__(self) -> Step:
        return next(self._steps)

    @property
    def statistics(self) -> CallStatistics:
        """The calls of the map so far, the tokens in flight and their restarts."""
        run = self._run
        return run.statistics if run.slots is None else run.slots.decoder.statistics


class _Run:
    """One generation: its validated options and its progress."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Prompts,
        *,
        max_new_tokens: int = 0,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] = 0,
        stop_token_ids: Sequence[int] = (),
        logits_processor: Processors | None = None,
        stopping_criteria: Criteria | None = None,
        pad_token: int = 0,
        max_length: int | None = None,
        window_length: int | None = None,
        max_in_flight: int | None = None,
        **search: Unpack[SearchKwargs],
    ) -> None:
        check_model(model)
        check_search(search)
        self.search_kwargs = search
        self.search = SearchOptions.of_call(generate, search) if search else None
        require_count("max_new_tokens", max_new_tokens)
        self.model, self.count, self.pad_token = model, max_new_tokens, pad_token
        self.device = model.embedding.weight.device
        self.window_length = window_length
        self.ids, mask = lay_out(prompts, attention_mask, device=self.device)
        self.valid = check_prompts(self.ids, mask, vocab_size=model.spec.vocab_size, max_length=max_length)
        self.texts = [row if self.valid is None else row[self.valid[n]] for n, row in enumerate(self.ids)]
        """The tokens of each row so far, for processors and criteria."""
        if self.valid is not None:  # on the right, without IDs that may be outside the vocabulary
            self.ids, self.valid = lay_out(self.texts, device=self.device)
        batch, length = self.ids.shape
        self.sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        self.seeds = seeds_of(seed, batch)
        self.keys_BN = noise_keys(self.seeds, self.count, device=self.device) if self.sampling.draws else None
        self.stops = check_stop_token_ids(stop_token_ids, vocab_size=model.spec.vocab_size)
        self.stop_token_ids = torch.tensor(self.stops, dtype=torch.int64, device=self.device)
        if logits_processor is not None or stopping_criteria is not None:
            check_processors(logits_processor, stopping_criteria)
        self.processor, self.criteria = logits_processor, stopping_criteria
        lengths = self.ids.new_full((batch,), length) if self.valid is None else self.valid.sum(1)
        self.limit_B = lengths.new_full((batch,), self.count)
        if max_length is not None:
            self.limit_B = self.limit_B.minimum(max_length - lengths)
        if max_in_flight is None and (logits_processor is not None or stopping_criteria is not None):
            max_in_flight = 1
        if max_in_flight is not None:
            require_count("max_in_flight", max_in_flight)
        self.max_in_flight = max_in_flight
        self.several_in_flight = (max_in_flight or 1) > 1 and decodes_in_flight(
            model, self.search or SearchOptions(), asked=True
        )
        self.statistics = CallStatistics(0, 1.0, 0)
        self.slots: SlotGeneration | None = None
        self.prompt: Solution | None = None
        self.stopped_B = torch.zeros(batch, dtype=torch.bool, device=self.device)

    def steps(self) -> Iterator[Step]:
        """Yield the tokens as they are generated.

        Slots generate them on a GPU, where their steps are captured as graphs, and with tokens in flight.
        """
        limits = self.limit_B.tolist()
        if self.several_in_flight and min(limits) < 1:
            report_sequential("a prompt has max_length tokens, so that its row gets no new ones", True)
        if not (self.several_in_flight or uses_slots(self.model)) or min(limits) < 1:
            yield from self._steps_together()
            return
        self.slots = slots = SlotGeneration(
            self.model,
            self.texts,
            limits=limits,
            sampling=self.sampling,
            seeds=self.seeds,
            stop_token_ids=self.stops,
            pad_token=self.pad_token,
            window_length=self.window_length,
            max_in_flight=self.max_in_flight,
            logits_processor=self.processor,
            stopping_criteria=self.criteria,
            **self.search_kwargs,
        )
        for step in slots.steps():
            self.prompt = self.prompt or slots.prompt
            yield step
        self.stopped_B |= torch.tensor(slots.stopped, device=self.device)
        self.statistics, self.slots = slots.decoder.statistics, None

    @torch.no_grad()
    def _steps_together(self) -> Iterator[Step]:
        """Yield the tokens of one batch, in which each token waits for the slowest row.

        Rows that have ended are padding, which takes part in no search. They are removed from the batch once
        they are half of it.
        """
        model, (batch, length) = self.model, self.ids.shape
        weights = model.cache_weights()
        rows = torch.arange(batch, device=self.device)  # the batch rows that are still computed
        live = self.limit_B > 0  # of these, the rows that have not ended
        state = model.initial_state(batch, max_seq_len=length + self.count)
        ids, valid, window_length = self.ids, self.valid, self.window_length
        for number in range(self.count):
            encoded = model.encode(
                model.embedding(ids),
                ids_BL=needed_ids(model, ids),
                attention_mask=valid,
                state=state,
                return_state=True,
                window_length=window_length,
                search=self.search,
                weights=weights,
            )
            assert encoded.state is not None
            state = encoded.state
            self.prompt = encoded.solution if number == 0 else self.prompt
            end = _last_real(ids, valid)
            logits = model.predict(encoded.hidden_BLD[torch.arange(len(rows), device=self.device), end])
            logits = logits[:, : model.spec.vocab_size]
            keys = None if self.keys_BN is None else self.keys_BN[rows, number]
            tokens = self.sampling.choose(self._processed(logits, rows, live), keys)
            tokens = tokens.masked_fill(~live, self.pad_token)
            step = self._step(tokens, logits, _status(encoded.solution, end), rows, live)
            if number > 0:  # the first search is the prompts'; a committing call follows each
                calls = 1 if step.iterations is None else int(step.iterations.max()) + 1
                self.statistics = CallStatistics(self.statistics.calls + calls, 1.0, 0)
            yield step
            ends = torch.isin(tokens, self.stop_token_ids) | self._ends(tokens, logits, rows, live)
            stopped = live & ends
            self.stopped_B[rows] |= stopped
            live = live & ~stopped & (number + 1 < self.limit_B[rows])
            remaining = int(live.sum())
            if remaining == 0:
                return
            if 2 * remaining <= len(rows):
                kept = live.nonzero().squeeze(1)
                state = state.select_rows(kept, model.state_blocks())
                rows, tokens, live = rows[kept], tokens[kept], live[kept]
            # 0 at padding: the pad token may be outside the vocabulary.
            ids, window_length = tokens.masked_fill(~live, 0)[:, None], None
            valid = None if remaining == len(rows) else live[:, None]

    def _processed(self, logits: Tensor, rows: Tensor, live: Tensor) -> Tensor:
        """Return the logits of the computed rows after the processors."""
        if self.processor is None:
            return logits
        pairs = zip(rows.tolist(), logits, live.tolist(), strict=True)
        return torch.stack(
            [process_logits(self.processor, self.texts[n], one) if on else one for n, one, on in pairs]
        )

    def _ends(self, tokens: Tensor, logits: Tensor, rows: Tensor, live: Tensor) -> Tensor:
        """Append the tokens to their texts, and return where a criterion holds, (B,) bool."""
        ends = torch.zeros_like(live)
        if self.processor is None and self.criteria is None:
            return ends
        for place, (row, on) in enumerate(zip(rows.tolist(), live.tolist(), strict=True)):
            if on:
                self.texts[row] = torch.cat((self.texts[row], tokens[place : place + 1]))
                ends[place] = ends_text(self.criteria, self.texts[row], logits[place])
        return ends

    def _step(
        self, tokens: Tensor, logits: Tensor, status: tuple[Tensor, ...], rows: Tensor, live: Tensor
    ) -> Step:
        """Return the results of the computed rows as a step of the whole batch."""
        if len(rows) == len(self.ids) and bool(live.all()):
            return Step(tokens, live, logits, *status)
        index = rows[live]

        def whole(part: Tensor, fill: int | bool) -> Tensor:
            everything = part.new_full((len(self.ids), *part.shape[1:]), fill)
            everything[index] = part[live]
            return everything

        found = [whole(part, fill) for part, fill in zip(status, (0, 0, True), strict=False)]
        return Step(whole(tokens, self.pad_token), whole(live, False), whole(logits, 0), *found)

    def summed_up(self, steps: Sequence[Step], statistics: CallStatistics, *, with_logits: bool) -> Generated:
        """Return the steps stacked along the tokens."""

        def side_by_side(name: str) -> Tensor | None:
            parts = [getattr(step, name) for step in steps]
            return None if parts[0] is None else torch.stack(parts, dim=1)

        return Generated(
            tokens=torch.stack([step.tokens for step in steps], dim=1),
            lengths=torch.stack([step.active for step in steps]).sum(0),
            stopped=self.stopped_B,
            logits=side_by_side("logits") if with_logits else None,
            iterations=side_by_side("iterations"),
            residual=side_by_side("residual"),
            converged=side_by_side("converged"),
            prompt=self.prompt,
            statistics=statistics,
        )


def uses_slots(model: LanguageModel) -> bool:
    """Whether rows are decoded by slots: on a GPU, where captured steps remove the host's overhead."""
    weight = model.embedding.weight
    if not weight.is_cuda:
        return False
    try:
        model.backbone.blocks()[0].mixer.slots(1, device=weight.device, dtype=weight.dtype, max_seq_len=1)
    except ValueError:
        return False
    return True


def _last_real(ids_BL: Tensor, valid_BL: Tensor | None) -> Tensor:
    """Return the index of each row's last real token, (B,) int64; 0 in rows of padding."""
    order = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    return order[-1].expand(len(ids_BL)) if valid_BL is None else (valid_BL * order).amax(1)


def _status(solution: Solution | None, end_B: Tensor) -> tuple[Tensor, ...]:
    """Return iterations, residual and converged of these tokens, (B,) each, or of their rows."""
    if solution is None:
        return ()
    if solution.token_iterations is None:
        return solution.iterations, solution.residual, solution.converged
    of_tokens = (solution.token_iterations, solution.token_residual, solution.token_converged)
    return tuple(part.gather(1, end_B[:, None]).squeeze(1) for part in of_tokens if part is not None)
