"""Scoring: the log-probabilities of given continuations, solved with their prompts in one window.

Shape legend: B batch, L tokens fed, N tokens of the longest continuation, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks.decoding.prompts import (
    check_model,
    check_prompts,
    check_search,
    lay_out,
    needed_ids,
    token_rows,
)
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution


@dataclass(frozen=True)
class Scored:
    """Log-probabilities (B, N) of the tokens of each continuation, in nats, 0 after its end.

    ``is_greedy`` (B, N) bool is True where greedy decoding selects the token, and after the end; ``lengths``
    (B,) int64 counts a continuation's tokens. ``solution`` is that of prompts and continuations, None in
    explicit models.
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
        """Whether greedy decoding generates the whole continuation, (B,) bool."""
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
    """Return the log-probability of each continuation given its prompt, independent of the other rows.

    All tokens are known, so they are solved together, or in windows of ``window_length``: within the
    tolerance the result equals that of decoding token by token, at a fraction of the cost.

    Args:
        model: an ``ImplicitLM`` or ``ExplicitLM`` in evaluation mode.
        prompts: lists of tokens, of any lengths, at least one token each.
        continuations: one per prompt, at least one token each.
        max_length: maximum number of tokens of a prompt and its continuation; None: no limit.
        window_length: number of tokens per window; None: one window.
        search: options of the search, instead of the spec's (``SearchOptions``), such as ``tolerance`` or
            ``loops``; all but ``start`` and ``trajectory``.

    Raises:
        ValueError: for lists that do not match, are empty, too long or have unknown tokens, or a model in
            training mode.

    """
    check_model(model)
    check_search(search)
    if len(prompts) != len(continuations):
        raise ValueError(
            f"{len(prompts)} prompts and {len(continuations)} continuations; give one continuation per prompt"
        )
    device = model.embedding.weight.device
    prompt_rows = token_rows(prompts, device=device)
    forced = token_rows(continuations, device=device, name="continuation")
    whole = [torch.cat(parts) for parts in zip(prompt_rows, forced, strict=True)]
    ids, mask = lay_out(whole, device=device)
    valid = check_prompts(ids, mask, vocab_size=model.spec.vocab_size, max_length=max_length)
    encoded = model.encode(  # all but the last token of each row: padding begins one position earlier
        model.embedding(ids[:, :-1]),
        ids_BL=needed_ids(model, ids[:, :-1]),
        attention_mask=None if valid is None else valid[:, 1:],
        window_length=window_length,
        search=SearchOptions.of_call(score, search),
    )
    lengths = torch.tensor([len(row) for row in forced], device=device)
    count = int(lengths.max())
    precision = torch.promote_types(encoded.hidden_BLD.dtype, torch.float32)
    found = encoded.hidden_BLD.new_zeros(len(forced), count, dtype=precision)
    is_greedy = torch.ones(len(forced), count, dtype=torch.bool, device=device)
    for number, row in enumerate(forced):  # row by row: the logits of all rows would be large
        hidden = encoded.hidden_BLD[number, len(prompt_rows[number]) - 1 :][: len(row)]
        logits = model.predict(hidden)[:, : model.spec.vocab_size]
        found[number, : len(row)] = logits.log_softmax(-1).gather(1, row[:, None]).squeeze(1)
        is_greedy[number, : len(row)] = logits.argmax(-1) == row
    return Scored(found, is_greedy, lengths, encoded.solution)
