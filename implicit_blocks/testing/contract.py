"""Helpers shared by the checks of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from implicit_blocks.registry import UnknownKindError
from implicit_blocks.registry.contracts import ContractError, describe_component, require

__all__ = ["ContractError", "check_gradients", "named", "relative_error", "require"]

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


def check_gradients(
    component: Any,
    loss: Callable[[], Tensor],
    tensors: Mapping[str, Tensor],
    *,
    seed: int = 2,
    tolerance: float = 1e-6,
    way: str = "",
) -> dict[str, float]:
    """Compare gradients of a loss with central finite differences along one random direction of each tensor.

    Args:
        component: named by the error.
        loss: computes the loss, a float64 scalar, from the current values of the tensors.
        tensors: float64 leaves that require gradients, by name.
        seed: of the directions.
        tolerance: largest difference, relative to the finite difference where that exceeds 1.
        way: begins the error's message: "through forward, ".

    Returns:
        the derivative along each direction; 0 where no gradient reaches the tensor.

    Raises:
        ContractError: they differ; names the tensor and both values.

    """
    value, leaves = loss(), list(tensors.values())
    constant = not value.requires_grad
    found = [None] * len(leaves) if constant else torch.autograd.grad(value, leaves, allow_unused=True)
    generator, step = torch.Generator().manual_seed(seed), 1e-6
    derivatives = {}
    for (name, tensor), gradient in zip(tensors.items(), found, strict=True):
        direction = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            tensor += step * direction
            above = loss()
            tensor -= 2 * step * direction
            numeric = float((above - loss()) / (2 * step))
            tensor += step * direction
        analytic = 0.0 if gradient is None else float((gradient * direction).sum())
        require(
            abs(numeric - analytic) <= tolerance * max(1.0, abs(numeric)),
            component,
            "gradients",
            f"{way}along a random direction of {name} the gradient is {analytic:.8g}, finite differences "
            f"{numeric:.8g}; detach nothing",
        )
        derivatives[name] = analytic
    return derivatives


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
            broken = f"breaks the contract '{contract.__name__.replace('_', ' ')}': it raised"
            found = f"{broken} {type(error).__name__}: {error}"
            if isinstance(error, UnknownKindError):
                found = f"cannot be checked: {error}; install its package, or register it by registry.add"
            raise ContractError(f"{describe_component(subject)} {found}") from error

    return check
