"""How a broken contract is reported."""

from __future__ import annotations

from torch import Tensor


class ContractError(AssertionError):
    """A component breaks a contract; the message names the component, the contract, and what to look at."""


def require(condition: bool, component: str, contract: str, remedy: str) -> None:
    """Raise ``ContractError`` unless the condition holds."""
    if not condition:
        raise ContractError(f"{component} breaks the contract '{contract}': {remedy}")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ``‖actual − expected‖ / ‖expected‖`` (the numerator where that is 0); NaN counts as infinite."""
    error = float((actual - expected).norm() / (expected.norm() or 1.0))
    return error if error == error else float("inf")
