"""Logits processors and stopping criteria of other libraries, such as those of transformers.

A logits processor is called as ``processor(input_ids, scores)`` with the tokens before a position, (1, T)
int64, the prompt included, and the logits of the position, (1, V), and returns logits, (1, V). A stopping
criterion is called in the same way after a token is appended, and returns whether the text ends, (1,) bool.
Both see one text alone, without padding, so that a text does not depend on the others; they must be pure
functions of their arguments, because decoding may call them for tokens that it takes back.

Shape legend: T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.decoding.sampling import Sampling

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
StoppingCriterion = Callable[[Tensor, Tensor], Tensor | bool]
Processors = LogitsProcessor | Sequence[LogitsProcessor]
"""One processor, several that are applied in order, or a ``LogitsProcessorList`` of transformers."""
Criteria = StoppingCriterion | Sequence[StoppingCriterion]
"""One criterion, several of which one must hold, or a ``StoppingCriteriaList`` of transformers."""


def check_processors(logits_processor: Processors | None, stopping_criteria: Criteria | None) -> None:
    """Check that processors and criteria can be called.

    Raises:
        ValueError: for other objects.

    """
    for name, argument in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        for one in each(argument):
            if not callable(one):
                raise ValueError(
                    f"{name} has {one!r}, which cannot be called; give functions (input_ids, scores), such "
                    "as the processors and criteria of transformers"
                )


def process_logits(logits_processor: Processors | None, ids_T: Tensor, logits_V: Tensor) -> Tensor:
    """Return the processed logits of one position, (V,), given the tokens before it, (T,) int64.

    Raises:
        ValueError: a processor returns another shape, or excludes all tokens.

    """
    scores = logits_V[None].clone()  # processors may write to it
    for processor in each(logits_processor):
        scores = processor(ids_T[None], scores)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != (1, len(logits_V)):
        raise ValueError(f"a logits processor returned {shape}; expected scores (1, {len(logits_V)})")
    if bool(torch.isneginf(scores).all()):
        raise ValueError(
            f"the logits processors exclude all {len(logits_V)} tokens after {len(ids_T)} tokens; allow at "
            "least one, such as the end-of-text token"
        )
    return scores[0]


def ends_text(stopping_criteria: Criteria | None, ids_T: Tensor, logits_V: Tensor) -> bool:
    """Return whether a criterion holds after the tokens of a text, (T,) int64, the newest included.

    ``logits_V`` are the logits that the newest token was chosen from, before processors.
    """
    return any(
        bool(torch.as_tensor(criterion(ids_T[None], logits_V[None])).all())
        for criterion in each(stopping_criteria)
    )


def with_transformers(
    rule: Sampling, *, min_p: float | None, repetition_penalty: float | None
) -> tuple[tuple[LogitsProcessor, ...], Sampling]:
    """Return processors of transformers in its order, and the rule of sampling after them.

    The order is penalty, temperature, top-k, top-p, min-p. With min-p all of them are processors.

    Args:
        rule: the rule of sampling.
        min_p: sample from the tokens with at least this share of the largest probability; None: from all.
        repetition_penalty: divide the positive logits of tokens that occur in the text by this number, and
            multiply the negative ones; None: leave them.

    Raises:
        ValueError: for values out of range.
        ImportError: transformers is required and not installed.

    """
    if min_p is None and repetition_penalty is None:
        return (), rule
    if repetition_penalty is not None and not 0 < repetition_penalty < float("inf"):
        raise ValueError(
            f"repetition_penalty is {repetition_penalty}; choose a positive number, 1 for no penalty"
        )
    if min_p is not None and not (0 <= min_p <= 1 and rule.draws):
        raise ValueError(f"min_p is {min_p}; choose a number in [0, 1], with a temperature above 0")
    from implicit_blocks.hf import require_transformers

    require_transformers("min_p" if repetition_penalty is None else "repetition_penalty")
    from transformers import generation

    processors: list[LogitsProcessor] = []
    if repetition_penalty is not None:
        processors.append(generation.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if min_p is None:
        return tuple(processors), rule
    processors.append(generation.TemperatureLogitsWarper(float(rule.temperature)))
    if rule.top_k is not None:
        processors.append(generation.TopKLogitsWarper(rule.top_k))
    if rule.top_p is not None:
        processors.append(generation.TopPLogitsWarper(float(rule.top_p)))
    processors.append(generation.MinPLogitsWarper(float(min_p)))
    return tuple(processors), Sampling(temperature=1.0)


def each(argument: Any) -> Sequence[Any]:
    """Return the functions to call; a list class of transformers, which is callable itself, counts as one."""
    if argument is None:
        return ()
    return (argument,) if callable(argument) or not isinstance(argument, Sequence) else argument
