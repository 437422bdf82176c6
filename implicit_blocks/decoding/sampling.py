"""The choice of the next token, and its noise: a function of the seed of a text and the token's number.

Samples are drawn by the Gumbel-max trick (E. J. Gumbel, "Statistical Theory of Extreme Values", 1954): the
token with the largest sum of log-probability and noise. A small change of the logits thus rarely changes the
sample, so that the token chosen from an iterate of a search is usually the one chosen from its solution.

Shape legend: B batch, V vocabulary, N new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from implicit_blocks.ops.noise import gumbel_at, keys_at
from implicit_blocks.specs.base import require_count


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule for choosing a token from logits: the most likely token, or a sample.

    Args:
        temperature: 0 selects the most likely token; otherwise logits are divided by it and sampled from.
        top_k: sample from the ``top_k`` most likely tokens; None: no limit.
        top_p: sample from the most likely tokens that together have this probability, including the one that
            reaches it (A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020); None: no
            limit. Applied after ``top_k``.

    Raises:
        ValueError: for values out of range.

    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; choose 0 for the most likely token, or a positive number"
            )
        if self.top_k is not None:
            require_count("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; choose a number in (0, 1], or None")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p require a temperature above 0; choose a temperature")

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled."""
        return self.temperature > 0

    def choose(self, logits_BV: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """Return the next tokens, (B,) int64, given the key of each row's noise (``noise_keys``), int64.

        A row's token depends only on its own logits and key.
        """
        if not self.draws:
            return logits_BV.argmax(-1)
        assert keys_B is not None
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            # By logits: a large temperature may make different logits equal.
            best = logits_BV.topk(self.top_k, dim=-1).indices
            logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, best, logits_BV.gather(-1, best))
        probabilities = self._nucleus(_tempered(logits_BV.double(), self.temperature).softmax(-1), logits_BV)
        return (probabilities.log() + gumbel_at(keys_B, logits_BV.shape[1])).argmax(-1)

    def _nucleus(self, probabilities_BV: Tensor, logits_BV: Tensor) -> Tensor:
        """Return the probabilities of the tokens that ``top_p`` keeps, 0 for the others."""
        if self.top_p is None or self.top_p == 1:
            return probabilities_BV
        tokens = logits_BV.argsort(dim=-1, descending=True, stable=True)
        ordered = probabilities_BV.gather(-1, tokens)
        before = ordered.cumsum(-1) - ordered
        beyond = before >= self.top_p * ordered.sum(-1, keepdim=True)
        beyond[:, 0] = False  # the product may underflow to 0
        return torch.zeros_like(ordered).scatter(-1, tokens, ordered.masked_fill(beyond, 0.0))


def _tempered(logits_BV: Tensor, temperature: float) -> Tensor:
    """Return the logits over the temperature, up to a constant per row; the largest become 0 exactly.

    The largest logit is subtracted before the division, which may overflow: a temperature near 0 leaves only
    the largest logits, and infinite logits exclude all smaller ones. NaN counts as the largest, as in
    ``argmax``.
    """
    largest_B1 = logits_BV.amax(-1, keepdim=True)  # NaN where the row has one
    scaled = ((logits_BV - largest_B1) / temperature).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return scaled.masked_fill((logits_BV == largest_B1) | logits_BV.isnan(), 0.0)


def seeds_of(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return the seed of each row: those given, or ``seed``, ``seed + 1`` and so on.

    Raises:
        ValueError: for another number of seeds, or an invalid one.

    """
    if isinstance(seed, Integral):
        seeds = list(range(int(seed), int(seed) + rows))
    else:
        seeds = list(seed) if isinstance(seed, Iterable) else [seed] * rows
    if len(seeds) != rows:
        raise ValueError(f"there are {len(seeds)} seeds for {rows} rows; give one per row, or an integer")
    for one in seeds:
        if not isinstance(one, Integral) or not -(2**63) <= one < 2**63:
            raise ValueError(f"a seed is {one!r}; choose integers from 0 to 2^63 - 1")
    return seeds


def noise_keys(seeds: Sequence[int], count: int, *, device: torch.device) -> Tensor:
    """Return the keys of the noise of each row's new tokens, (B, N) int64.

    They depend on the row's seed and the number of the token alone, on every device.
    """
    seeds_B = torch.tensor(list(seeds), dtype=torch.int64)
    return keys_at(seeds_B[:, None], torch.arange(count)).to(device)
