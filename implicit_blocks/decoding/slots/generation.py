"""Generation by continuous decoding: rows proceed independently, and their tokens are combined to steps.

Shape legend: B batch, L tokens of the longest prompt, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from implicit_blocks.decoding.generated import Step
from implicit_blocks.decoding.processors import Criteria, Processors
from implicit_blocks.decoding.sampling import Sampling
from implicit_blocks.decoding.slots.continuous import ContinuousDecoder
from implicit_blocks.decoding.slots.texts import NewToken, Request
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs
from implicit_blocks.solution import Solution

_LOG = logging.getLogger(__name__)

EMPTY = {"iterations": 0, "residual": 0.0, "converged": True, "diverged": False}
"""The report of a solution for padding."""


class SlotGeneration:
    """One generation with one slot per row; ``generate`` describes the options.

    Args:
        model: a model in evaluation mode whose mixers support slots.
        prompts: the tokens of each row.
        limits: maximum number of tokens of each row, at least 1.
        sampling: the rule for choosing tokens.
        seeds: the seed of each row.
        stop_token_ids: tokens that end a row.
        pad_token: fills rows after their end.
        window_length: number of tokens per window of the prompts.
        max_in_flight: maximum number of tokens of a row in flight, at most the longest row's length; None:
            the decoder's default.
        logits_processor: changes the logits of each row.
        stopping_criteria: end rows, beside the stop tokens.
        search: options of the searches that differ from the spec.

    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Tensor],
        *,
        limits: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
        pad_token: int,
        window_length: int | None,
        max_in_flight: int | None = None,
        logits_processor: Processors | None = None,
        stopping_criteria: Criteria | None = None,
        **search: Unpack[SearchKwargs],
    ) -> None:
        self.pad_token = pad_token
        max_seq_len = max(len(row) + limit for row, limit in zip(prompts, limits, strict=True))
        if max_in_flight is not None and max_in_flight > max_seq_len:
            _report_once(max_in_flight)
            max_in_flight = max_seq_len
        self.decoder = ContinuousDecoder(
            model,
            max_batch_size=len(prompts),
            max_seq_len=max_seq_len,
            window_length=window_length,
            max_in_flight=max_in_flight,
            **search,
        )
        self.decoder.on_prompts = self._keep
        self._prompts: dict[int, tuple[Solution, int, int]] = {}
        """Of each row: the solution with its prompt, and its row and number of tokens in it."""
        self._lengths = [len(row) for row in prompts]
        for row, limit, seed in zip(prompts, limits, seeds, strict=True):
            request = Request(
                prompt=row,
                max_new_tokens=limit,
                sampling=sampling,
                seed=seed,
                stop_token_ids=stop_token_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
            )
            self.decoder.submit(request)
        self.made: list[list[NewToken]] = [[] for _ in prompts]
        self.stopped = [False] * len(prompts)

    def steps(self) -> Iterator[Step]:
        """Yield one token of every row that has not ended, as soon as the last row has generated it."""
        number = 0
        while True:
            while not self._ready(number):
                for new in self.decoder.step():
                    self.made[new.request].append(new)
                    self.stopped[new.request] |= new.stopped
            if not any(len(row) > number for row in self.made):
                return
            yield self._step(number)
            number += 1

    def _ready(self, number: int) -> bool:
        return all(len(row) > number or (row and row[-1].last) for row in self.made)

    def _step(self, number: int) -> Step:
        device = self.decoder.device
        news = [row[number] if len(row) > number else None for row in self.made]
        some = next(new for new in news if new is not None)
        tokens = torch.tensor([self.pad_token if new is None else new.token for new in news], device=device)
        active = torch.tensor([new is not None for new in news], device=device)
        nothing = torch.zeros_like(some.logits)
        logits = torch.stack([nothing if new is None else new.logits for new in news])
        for new in news:  # the step keeps the logits
            if new is not None:
                self.made[new.request][number] = NewToken(new.request, new.token, new.last, nothing)
        if some.iterations is None:
            return Step(tokens, active, logits)

        def gathered(name: str) -> Tensor:
            values = [EMPTY[name] if new is None else getattr(new, name) for new in news]
            return torch.tensor(values, device=device)

        residual = gathered("residual").to(logits.dtype)
        return Step(tokens, active, logits, gathered("iterations"), residual, gathered("converged"))

    # ------------------------------------------------------------------------------------ prompts

    def _keep(self, numbers: list[int], solution: Solution | None) -> None:
        if solution is not None:
            self._prompts |= {
                number: (solution, row, self._lengths[number]) for row, number in enumerate(numbers)
            }

    @property
    def prompt(self) -> Solution | None:
        """The solution of all prompts, as if they had been solved together; None before all are solved."""
        if len(self._prompts) < len(self.made):
            return None
        parts = [self._prompts[number] for number in range(len(self.made))]
        z = self._padded([s.z[row, :length] for s, row, length in parts], 0.0)
        assert z is not None

        def of_rows(name: str) -> Tensor:
            return torch.stack([getattr(s, name)[row] for s, row, _ in parts])

        def of_tokens(name: str) -> Tensor | None:
            found = [(getattr(s, f"token_{name}"), *where) for s, *where in parts]
            cut = [None if t is None else t[row, :length] for t, row, length in found]
            return self._padded(cut, EMPTY[name])

        return Solution(
            z=z,
            iterations=of_rows("iterations"),
            residual=of_rows("residual"),
            converged=of_rows("converged"),
            diverged=of_rows("diverged"),
            token_iterations=of_tokens("iterations"),
            token_residual=of_tokens("residual"),
            token_converged=of_tokens("converged"),
            token_diverged=of_tokens("diverged"),
        )

    def _padded(self, rows: Sequence[Tensor | None], fill: float) -> Tensor | None:
        """Return the values of each row's tokens with padding after them, (B, L, …)."""
        given = [row for row in rows if row is not None]
        return None if len(given) < len(rows) else pad_sequence(given, batch_first=True, padding_value=fill)


@cache
def _report_once(asked: int) -> None:
    _LOG.warning("max_in_flight is %d, and all texts are shorter: fewer tokens are in flight", asked)
