"""A learned exit gate: the distribution of exits over the calls, and the first exit at a threshold.

R.-J. Zhu et al., "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025 (arXiv 2510.25741): with
λ_t = σ(gate(h_t)), a token leaves after call t with probability ``p_t = λ_t ∏_{s<t} (1 − λ_s)``.

Shape legend: N loops, B rows, L tokens, E elements of a search, F features of an element.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.exits.exit import Exit
from implicit_blocks.specs.base import require_share


def exit_distribution(gate_logits_NBL: Tensor) -> Tensor:
    """Return the probability of each exit, (B, L, N), in float32 or better.

    The last loop takes the mass that remains; its gate has no effect.

    Raises:
        ValueError: for logits that are not (N, B, L) with at least one loop.

    """
    if gate_logits_NBL.ndim != 3 or not gate_logits_NBL.shape[0]:
        raise ValueError(
            f"gate logits have shape {tuple(gate_logits_NBL.shape)}; give (loops, batch, tokens), with at "
            "least one loop"
        )
    remaining = torch.ones_like(gate_logits_NBL[0], dtype=_precision(gate_logits_NBL))
    parts = []
    for logits_BL in gate_logits_NBL[:-1]:
        part, remaining = _leave(logits_BL, remaining)
        parts.append(part)
    return torch.stack([*parts, remaining], dim=-1)


def first_exit(distribution_BLN: Tensor, threshold: float) -> Tensor:
    """Return the first loop, from 0, at which the cumulative probability reaches the threshold, (B, L).

    The last loop where none does: the sum may stay below 1 by rounding. Near a threshold of 1 it may also
    reach 1 before the last loop, where the mass that remains is below the precision.

    Raises:
        ValueError: the threshold is outside (0, 1].

    """
    require_share("threshold", threshold)
    reached = distribution_BLN.cumsum(-1) >= threshold
    reached[..., -1] = True
    return reached.to(torch.uint8).argmax(-1)


class Mass(NamedTuple):
    """The probability of not having left, and of having left, of E elements."""

    remaining_E: Tensor
    left_E: Tensor


class GateExit(Exit):
    """The cumulative exit probability has reached ``threshold``: Ouro's rule, per token and causal.

    The gate reads ``f(z)``. The measure is 0 where the cumulative probability has reached the threshold, and
    2 plus the probability of staying elsewhere, so that it falls from call to call. Unlike in the published
    code the search ends at the exit, and the calls that remain are saved. A token also waits for those before
    it, as with every criterion. Use it for models trained with an exit gate.

    Args:
        threshold: q in (0, 1].

    Raises:
        ValueError: the threshold is outside (0, 1].

    """

    reads: ClassVar[Literal["predict", "gate"] | None] = "gate"
    threshold: float

    def __init__(self, *, threshold: float = 0.5) -> None:
        require_share("threshold", threshold)
        self.threshold = threshold

    def init(self, z_EF: Tensor) -> Mass:
        """Return the state before the first call: all probability remains."""
        remaining = torch.ones_like(z_EF[:, 0], dtype=_precision(z_EF))
        return Mass(remaining, torch.zeros_like(remaining))

    def measure(self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: Mass) -> tuple[Tensor, Mass]:
        """Return 0 where the threshold has been reached, elsewhere 2 plus the probability of staying."""
        assert self.readout is not None
        assert self.readout.gate is not None
        part, remaining = _leave(self.readout.gate(fz_EF).reshape(-1), state.remaining_E)
        left = state.left_E + part
        # Above every threshold by more than rounding; NaN where the gate is, so that the element diverges.
        measure = (2 + remaining).masked_fill(left >= self.threshold, 0.0)
        return measure[:, None], Mass(remaining, left)


def _leave(logits: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of leaving now, and of staying."""
    share = torch.sigmoid(logits.to(remaining.dtype))
    return share * remaining, remaining * (1 - share)


def _precision(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
