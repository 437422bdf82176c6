"""Checks of what solvers, gradients and mixers return, so that an error names the broken contract.

They look at shapes and types only, which are known without waiting for a device.

Shape legend: E elements of a search, F features, B batch, L tokens of the window, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import GradientEstimator, Mixer, Solver
from implicit_blocks.registry.contracts import require
from implicit_blocks.solution import Solution


def check_solver_state(solver: Solver, state: Any, elements: int) -> None:
    """Check that every leaf of a solver's state is a tensor (E, …).

    Raises:
        ContractError: another kind of leaf, or another first dimension.

    """
    for leaf in pytree.tree_leaves(state):
        fits = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == elements
        if not fits:  # the description below is costly
            require(
                False,
                solver,
                "state layout",
                f"its state contains {_describe(leaf)}, but the search has {elements} elements; every leaf, "
                "counters included, must be a tensor with the elements as first dimension",
            )


def check_updated_state(solver: Solver, state: Any, before: Any, elements: int) -> None:
    """Check that an update keeps the state's structure, shapes and types.

    Raises:
        ContractError: one of them has changed.

    """
    check_solver_state(solver, state, elements)
    (old, old_form), (new, new_form) = pytree.tree_flatten(before), pytree.tree_flatten(state)
    same = old_form == new_form
    if not same or any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(old, new, strict=True)):
        was, now = (", ".join(map(_describe, leaves)) or "nothing" for leaves in (old, new))
        require(
            False,
            solver,
            "state layout",
            f"update received a state of {was} and returned a state of {now}; structure, shapes and types "
            "must stay the same, so keep past points in tensors of fixed size that init creates",
        )


def point_and_state(solver: Solver, returned: Any) -> tuple[Any, Any]:
    """Return the next point and the state that an update returned.

    Raises:
        ContractError: it did not return a tuple of two; a tensor would be unpacked by its rows.

    """
    return _pair(solver, returned, "next point", "update", "the next point and the state: z, state")


def mixed_and_state(mixer: Mixer, returned: Any) -> tuple[Any, Any]:
    """Return the mixed window and the state that ``advance`` returned.

    Raises:
        ContractError: it did not return a tuple of two.

    """
    return _pair(mixer, returned, "mixes a window", "advance", "the mixed window and the state after it")


def _pair(part: Solver | Mixer, returned: Any, contract: str, method: str, what: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        require(False, part, contract, f"{method} returned {_describe(returned)}; return a tuple of {what}")
    first, second = returned
    return first, second


def check_next_point(solver: Solver, proposed: Any, z_EF: Tensor) -> None:
    """Check that the point that a solver proposes has the shape (E, F) and type of the one before.

    Raises:
        ContractError: it has not.

    """
    if not isinstance(proposed, Tensor) or proposed.shape != z_EF.shape or proposed.dtype != z_EF.dtype:
        require(
            False,
            solver,
            "next point",
            f"update returned {_describe(proposed)} for a point that is {_describe(z_EF)}; they must agree",
        )


def check_solution(gradient: GradientEstimator, solution: Any, z0: Tensor) -> None:
    """Check that a gradient estimator returns a ``Solution`` whose value has the shape of the start.

    Raises:
        ContractError: it does not.

    """
    if not isinstance(solution, Solution):
        require(
            False,
            gradient,
            "returns a Solution",
            f"it returned {_describe(solution)}; return the search's solution with your value: "
            "solution.with_value(z)",
        )
    elif solution.z.shape != z0.shape:
        require(
            False,
            gradient,
            "returns a Solution",
            f"its value is {_describe(solution.z)}, the start is {_describe(z0)}; their shapes must agree",
        )


def check_mixed(mixer: Mixer, mixed: Any, z_BLD: Tensor) -> None:
    """Check that a mixer returns a floating-point tensor of the window's shape, (B, L, D).

    Raises:
        ContractError: it does not.

    """
    if not isinstance(mixed, Tensor) or mixed.shape != z_BLD.shape or not mixed.is_floating_point():
        require(
            False,
            mixer,
            "mixes a window",
            f"it returned {_describe(mixed)} for {_describe(z_BLD)}; return the window's shape and a "
            "floating-point type (and from advance a tuple of that and the state after the window)",
        )


def shape_and_type(tensor: Tensor) -> str:
    """Describe a tensor for a message: ``(2, 3) of float32``."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _describe(value: Any) -> str:
    return f"a tensor {shape_and_type(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
