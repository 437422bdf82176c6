"""Criteria on the predictions: their change from call to call, and the stability of the most likely token.

J. Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach", 2025
(arXiv 2502.05171), section 6.

Shape legend: E elements of a search, F features of an element, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.exits.exit import UNDECIDED, Exit, Readout
from implicit_blocks.specs.base import require_count

PART = 1024
"""Points whose logits are in memory together, where each is read alone."""


class Values(NamedTuple):
    """``f(z)`` of the call before, and whether there was one."""

    value_EF: Tensor
    known_E: Tensor


class KLExit(Exit):
    """``KL(p_before ‖ p)``, the divergence between the predictions of two consecutive calls, in nats.

    Cannot be met by the first call. Every call reads the head twice, for the values of this call and of the
    one before, so that no logits are kept between calls; for large vocabularies this costs more than a call
    of a small map, and ``second_difference`` is cheaper.

    Args:
        tolerance: largest divergence at which a token leaves, above 0.

    Raises:
        ValueError: the tolerance is not positive.

    """

    reads: ClassVar[Literal["predict", "gate"] | None] = "predict"

    def __init__(self, *, tolerance: float = 5e-4) -> None:
        if not 0 < tolerance < float("inf"):
            raise ValueError(f"tolerance is {tolerance}; choose a number above 0")
        self.tolerance = self.threshold = tolerance

    def init(self, z_EF: Tensor) -> Values:
        """Return the state before the first call: no prediction is known."""
        return Values(z_EF, torch.zeros_like(z_EF[:, 0], dtype=torch.bool))

    def measure(
        self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: Values
    ) -> tuple[Tensor, Values]:
        """Return the divergence from the prediction of the call before."""
        assert self.readout is not None
        kl = _in_parts(self.readout, _divergence, state.value_EF, fz_EF)
        measure = kl.masked_fill(~state.known_E, UNDECIDED)
        return measure[:, None], Values(fz_EF, torch.ones_like(state.known_E))


class Stability(NamedTuple):
    """The most likely token of the call before, −1 before the first, and the calls that left it unchanged."""

    token_E: Tensor
    unchanged_E: Tensor


class ArgmaxStabilityExit(Exit):
    """The most likely token has not changed for ``calls`` consecutive calls, for greedy decoding.

    The measure is the number of further calls that must leave it unchanged, so that a token leaves after
    ``calls + 1`` calls at the earliest. Probabilities may still change; for sampling use ``kl``.

    Args:
        calls: consecutive calls, each of which predicts the same most likely token as the call before it.

    Raises:
        ValueError: fewer than one call.

    """

    reads: ClassVar[Literal["predict", "gate"] | None] = "predict"
    threshold = 0.0

    def __init__(self, *, calls: int = 2) -> None:
        require_count("calls", calls)
        self.calls = calls

    def init(self, z_EF: Tensor) -> Stability:
        """Return the state before the first call: no token."""
        none = z_EF.new_full(z_EF.shape[:1], -1, dtype=torch.int64)
        return Stability(none, torch.zeros_like(none))

    def measure(
        self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: Stability
    ) -> tuple[Tensor, Stability]:
        """Return the number of calls that must still leave the most likely token unchanged."""
        assert self.readout is not None
        token = _in_parts(self.readout, lambda logits: logits.argmax(-1), fz_EF)
        unchanged = (state.unchanged_E + 1).masked_fill(token != state.token_E, 0)
        measure = (self.calls - unchanged).clamp(min=0).to(residual_E1.dtype)
        return measure[:, None], Stability(token, unchanged)


def _divergence(before_EV: Tensor, now_EV: Tensor) -> Tensor:
    before, now = (torch.log_softmax(logits, dim=-1) for logits in (before_EV, now_EV))
    weight = before.exp()
    # a token of probability 0 contributes nothing, though its logit may be −∞ in both
    kl = (weight * (before - now)).masked_fill(weight == 0, 0.0).sum(-1)
    return kl.clamp(min=0)  # rounding may leave less


def _in_parts(readout: Readout, read: Callable[..., Tensor], *points: Tensor) -> Tensor:
    """Return ``read`` of the logits at points (E, F), (E,)."""

    def apply(*some: Tensor) -> Tensor:
        logits = [readout.predict(part) for part in some]
        return read(*(each.to(torch.promote_types(each.dtype, torch.float32)) for each in logits))

    if not readout.pointwise or len(points[0]) <= PART:
        return apply(*points)
    return torch.cat([apply(*some) for some in zip(*(each.split(PART) for each in points), strict=True)])
