"""Parameters of a request that change logits: OpenAI's penalties and biases, min-p, repetition penalty.

Shape legend: T tokens so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_blocks.decoding import Sampling
from implicit_blocks.decoding.processors import LogitsProcessor, with_transformers
from implicit_blocks.serving.jobs import Choice


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


def processors_of(choice: Choice, *, prompt: int) -> tuple[tuple[LogitsProcessor, ...], Sampling]:
    """Return the logits processors of a text after ``prompt`` tokens, and the rule of sampling after them.

    Raises:
        ValueError: as for ``Sampling`` and ``with_transformers``.
        ImportError: as for ``with_transformers``.

    """
    frequency, presence = choice.frequency_penalty, choice.presence_penalty
    own: tuple[LogitsProcessor, ...] = ()
    if choice.bias or frequency or presence:
        own = (Penalties(prompt=prompt, frequency=frequency, presence=presence, bias=choice.bias),)
    sampling = Sampling(temperature=choice.temperature, top_k=choice.top_k, top_p=choice.top_p)
    further, sampling = with_transformers(
        sampling, min_p=choice.min_p, repetition_penalty=choice.repetition_penalty
    )
    return (*own, *further), sampling
