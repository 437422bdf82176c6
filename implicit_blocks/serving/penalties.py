"""Parameters of a request that change logits: OpenAI's penalties and biases, min-p, repetition penalty.

Shape legend: T tokens so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_blocks.decoding import Sampling
from implicit_blocks.decoding.processors import LogitsProcessor, with_transformers
from implicit_blocks.serving.bodies import CommonBody
from implicit_blocks.serving.errors import ApiError, shown


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """A logits processor: ``logits[v] + bias[v] − frequency · count[v] − presence · (count[v] > 0)``.

    ``count[v]`` is how often token v occurs after the ``prompt`` first tokens (the formula of OpenAI's API
    reference). transformers has no processor for the two penalties.
    """

    prompt: int
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed logits (1, V), given the tokens so far (1, T)."""
        count_V = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        scores = scores - self.frequency * count_V - self.presence * (count_V > 0)
        for token, bias in self.bias:
            scores[:, token] += bias
        return scores


def processors_of(
    body: CommonBody, *, prompt: int, vocab_size: int
) -> tuple[tuple[LogitsProcessor, ...], Sampling]:
    """Return the logits processors of a request after ``prompt`` tokens, and the rule of sampling after them.

    Raises:
        ApiError: 400 for a biased token outside the vocabulary, or if transformers is required and missing.

    """
    bias = []
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 20 and int(name) < vocab_size):
            raise ApiError(
                400,
                f"logit_bias has the token {shown(name)}; the model knows 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        bias.append((int(name), value))
    frequency, presence = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
    own: tuple[LogitsProcessor, ...] = ()
    if bias or frequency or presence:
        own = (Penalties(prompt=prompt, frequency=frequency, presence=presence, bias=tuple(bias)),)
    sampling = body.sampling
    try:
        further, sampling = with_transformers(
            sampling,
            min_p=body.min_p or None if sampling.draws else None,
            repetition_penalty=None if body.repetition_penalty == 1 else body.repetition_penalty,
        )
    except ImportError as error:
        name = "min_p" if body.repetition_penalty in (None, 1) else "repetition_penalty"
        raise ApiError(400, f"{error}, or omit {name}", param=name) from None
    return (*own, *further), sampling
