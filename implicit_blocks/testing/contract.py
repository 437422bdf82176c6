"""What the checks of all families share."""

from __future__ import annotations

from torch import Tensor

from implicit_blocks.contracts import ContractError, require

__all__ = ["ContractError", "relative_error", "require"]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``‖actual − expected‖ / ‖expected‖`` (the numerator where that is 0); NaN counts as infinite."""
    actual, expected = actual.detach(), expected.detach()
    error = float((actual - expected).norm() / (expected.norm() or 1.0))
    return error if error == error else float("inf")
