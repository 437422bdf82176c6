"""Log-probabilities of tokens: of the generated ones, and of the prompts'.

Shape legend: B texts, L tokens, V vocabulary, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.decoding.prompts import lay_out, needed_ids
from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.jobs import LogProbability, Order, PromptRead

LOWEST = -9999.0
"""Stands for minus infinity and NaN, which JSON does not have."""
SCORED_TOGETHER = 8192
"""Maximum number of prompt tokens, padding included, that are scored together."""
ROWS_OF_LOGITS = 256
"""Maximum number of tokens whose logits exist at the same time."""


def log_probabilities(logits_LV: Tensor, tokens: Sequence[int], count: int) -> list[LogProbability]:
    """Return the log-probability of each token, and the ``count`` most likely ones."""
    scores = logits_LV.log_softmax(-1).double()
    scores = scores.nan_to_num(nan=LOWEST, neginf=LOWEST, posinf=0.0).clamp(min=LOWEST)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None]).squeeze(1).tolist()
    best = scores.topk(min(count, scores.shape[1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    found = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return [LogProbability(token, value, most) for token, value, most in zip(tokens, own, found, strict=True)]


def first_alike(queue: deque[Order]) -> list[Order]:
    """Take the orders at the head of a queue that share their limits, as many as are scored together."""
    first = queue[0]
    together: list[Order] = []
    longest = 0
    while queue:
        order = queue[0]
        longest = max(longest, len(order.prompt))
        alike = (order.tolerance, order.max_iterations) == (first.tolerance, first.max_iterations)
        if together and (not alike or longest * (len(together) + 1) > SCORED_TOGETHER):
            break
        together.append(queue.popleft())
    return together


def score_orders(model: Any, orders: Sequence[Order]) -> list[PromptRead]:
    """Return the scores of the prompts of orders with the same limits, of those that ask for them."""
    options = SearchOptions(tolerance=orders[0].tolerance, max_iterations=orders[0].max_iterations)
    wanted = [order for order in orders if order.score_prompt and order.logprobs is not None]
    prompts, counts = [order.prompt for order in wanted], [order.logprobs or 0 for order in wanted]
    found = score_prompts(model, prompts, counts, options) if wanted else []
    scored = {order.number: read for order, read in zip(wanted, found, strict=True)}
    return [scored.get(order.number, PromptRead()) for order in orders]


@torch.no_grad()
def score_prompts(
    model: Any, prompts: Sequence[Sequence[int]], counts: Sequence[int], options: SearchOptions
) -> list[PromptRead]:
    """Return the log-probabilities of each prompt's tokens after the first, and the search's iterations.

    All tokens of the prompts are solved together, as ``score`` solves them. A model of transformers reads one
    prompt at a time.
    """
    if not isinstance(model, LanguageModel):
        alone = zip(prompts, counts, strict=True)
        return [PromptRead(None, _scores_alone(model, prompt, count)) for prompt, count in alone]
    known = [prompt for prompt in prompts if len(prompt) > 1]
    if not known:
        return [PromptRead(None, []) for _ in prompts]
    device = model.embedding.weight.device
    ids, mask = lay_out([prompt[:-1] for prompt in known], device=device)
    x_BLD, ids_BL = model.embedding(ids), needed_ids(model, ids)
    encoded = model.encode(x_BLD, attention_mask=mask, search=options, ids_BL=ids_BL)
    rows, solution = iter(range(len(known))), encoded.solution
    found: list[PromptRead] = []
    for prompt, count in zip(prompts, counts, strict=True):
        if len(prompt) < 2:
            found.append(PromptRead(None, []))
            continue
        row = next(rows)
        hidden = encoded.hidden_BLD[row, : len(prompt) - 1]
        scores: list[LogProbability] = []
        for first in range(0, len(prompt) - 1, ROWS_OF_LOGITS):
            part = hidden[first : first + ROWS_OF_LOGITS]
            logits = model.predict(part)[:, : model.spec.vocab_size]
            scores += log_probabilities(logits, prompt[1 + first : 1 + first + len(part)], count)
        found.append(PromptRead(None if solution is None else int(solution.iterations[row]), scores))
    return found


def _scores_alone(model: Any, prompt: Sequence[int], count: int) -> list[LogProbability]:
    """Return the log-probabilities of a prompt's tokens by a model of transformers."""
    if len(prompt) < 2:
        return []
    ids_1L = torch.tensor([prompt[:-1]], device=model.device)
    logits_LV = at_least_float32(model(input_ids=ids_1L, use_cache=False).logits[0])
    return log_probabilities(logits_LV, prompt[1:], count)
