"""Scoring: how likely given continuations are, each solved with its prompt rather than token by token.

Shape legend: B batch, L tokens fed, N tokens of the longest continuation, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks.decoding.prompts import check_model, check_prompts, lay_out, token_rows
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution


@dataclass(frozen=True)
class Scored:
    """Log-probabilities (B, N) of every continuation's tokens, in nats, 0 behind its end.

    ``is_greedy`` (B, N) bool says where the token is the one that greedy decoding takes, True behind the end;
    ``lengths`` (B,) int64 counts a continuation's tokens. ``solution`` is the search over prompts and
    continuations, None in explicit models.
    """

    log_probabilities: Tensor
    is_greedy: Tensor
    lengths: Tensor
    solution: Solution | None = None

    @property
    def total(self) -> Tensor:
        """The log-probability of each continuation, (B,)."""
        return self.log_probabilities.sum(1)

    @property
    def greedy(self) -> Tensor:
        """Whether greedy decoding would give the whole continuation, (B,) bool."""
        return self.is_greedy.all(1)


@torch.no_grad()
def score(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tensor],
    continuations: Sequence[Sequence[int] | Tensor],
    *,
    max_length: int | None = None,
    window_length: int | None = None,
    **search: Unpack[SearchKwargs],
) -> Scored:
    """Return how likely each continuation is behind its prompt, as it would be alone.

    All tokens are known, so all are solved together, or in windows of ``window_length``: this is what token
    by token would find, to the tolerance, at a fraction of its price.

    Args:
        model: of this library, in evaluation mode.
        prompts: lists of tokens, of any lengths, at least one token each.
        continuations: as many, at least one token each.
        max_length: tokens that prompt and continuation may have together; None: any number.
        window_length: of the windows; None: one.
        search: ``tolerance``, ``max_iterations``, ``damping``, ``warm_start`` and ``moving_average`` of the
            search, instead of the spec's (``SearchOptions``).

    Raises:
        ValueError: for lists that do not match, are empty, too long or have unknown tokens, or a model in
            training mode.

    """
    check_model(model)
    if len(prompts) != len(continuations):
        raise ValueError(
            f"{len(prompts)} prompts and {len(continuations)} continuations; give as many of each"
        )
    device = model.embedding.weight.device
    given = token_rows(prompts, device=device)
    forced = token_rows(continuations, device=device, name="continuation")
    whole = [torch.cat(parts) for parts in zip(given, forced, strict=True)]
    ids, mask = lay_out(whole, device=device)
    valid = check_prompts(ids, mask, vocab_size=model.spec.vocab_size, max_length=max_length)
    encoded = model.encode(
        model.embedding(ids[:, :-1]),
        attention_mask=None if valid is None else valid[:, :-1],
        window_length=window_length,
        search=SearchOptions(**search),
    )
    lengths = torch.tensor([len(row) for row in forced], device=device)
    count = int(lengths.max())
    precision = torch.promote_types(encoded.hidden_BLD.dtype, torch.float32)
    found = encoded.hidden_BLD.new_zeros(len(forced), count, dtype=precision)
    is_greedy = torch.ones(len(forced), count, dtype=torch.bool, device=device)
    for number, row in enumerate(forced):  # one at a time: the logits of all would be large
        logits = model.predict(encoded.hidden_BLD[number, -len(row) :])[:, : model.spec.vocab_size]
        found[number, : len(row)] = logits.log_softmax(-1).gather(1, row[:, None]).squeeze(1)
        is_greedy[number, : len(row)] = logits.argmax(-1) == row
    return Scored(found, is_greedy, lengths, encoded.solution)
