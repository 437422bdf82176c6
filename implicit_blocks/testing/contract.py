"""Helpers shared by the checks of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor

from implicit_blocks.registry.contracts import ContractError, describe_component, require

__all__ = ["ContractError", "named", "relative_error", "require"]

P = ParamSpec("P")


def relative_error(actual: Tensor, expected: Tensor, *, least: float = 0.0) -> float:
    """Return ``‖actual − expected‖ / ‖expected‖`` (the numerator if the denominator is 0).

    ``least`` is a lower bound for the root mean square of ``expected``: values that are 0 up to rounding have
    no relative error. Tensors have any shape; the result is infinite if shapes differ or a value is NaN.
    """
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach(), expected.detach()
    size = max(float(expected.norm()), least * expected.numel() ** 0.5)
    error = float((actual - expected).norm()) / (size or 1.0)
    return error if error == error else float("inf")


def named(contracts: Iterable[Callable[P, None]]) -> dict[str, Callable[P, None]]:
    """Return the contracts by name; they convert other errors of a component to ``ContractError``."""
    return {contract.__name__: _reported(contract) for contract in contracts}


def _reported(contract: Callable[P, None]) -> Callable[P, None]:
    @wraps(contract)
    def check(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            contract(*arguments, **options)
        except ContractError:
            raise
        except Exception as error:
            subject: Any = arguments[0] if arguments else "a component"
            raise ContractError(
                f"{describe_component(subject)} breaks the contract '{contract.__name__.replace('_', ' ')}': "
                f"it raised {type(error).__name__}: {error}"
            ) from error

    return check
