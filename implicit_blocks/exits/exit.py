"""``Exit``: the interface of exit criteria, what they may read of a model, and how a search applies them.

Shape legend: E elements of a search (tokens, or rows with scope ``sequence``), F features of an element,
V vocabulary, B rows, T tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import State
from implicit_blocks.registry.contracts import require
from implicit_blocks.solution import narrow
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import Component

UNDECIDED = torch.finfo(torch.float32).max
"""The measure of an element that cannot leave yet: above every threshold and finite, since an element with an
infinite measure has diverged."""

Restriction = Literal["select_rows", "first", "after"]
"""The methods of ``RowMap`` and ``SequenceMap`` with which rows and tokens leave a search."""


@dataclass(frozen=True)
class Readout:
    """What exit criteria read of a model, at points (E, F) of a search.

    Args:
        predict: returns the logits of the next token, (E, V). A function of each point alone; or, where a
            coda mixes the tokens, an object that knows its rows and tokens, with the methods ``select_rows``,
            ``first`` and ``after`` of ``RowMap`` and ``SequenceMap``, which receives all points at once.
        gate: returns the logit of the exit gate, (E,) or (E, 1); None: the model has no gate.

    """

    predict: Callable[[Tensor], Tensor]
    gate: Callable[[Tensor], Tensor] | None = None

    @property
    def pointwise(self) -> bool:
        """Whether ``predict`` is a function of each point alone, so that points can be read in parts."""
        return not hasattr(self.predict, "select_rows")

    def restrict(self, method: Restriction, argument: Any) -> Readout:
        """Return the readout of some rows or tokens, as ``method`` of the map with this argument does."""

        def restricted(part: Any) -> Any:
            change = getattr(part, method, None)
            return part if change is None else change(argument)

        return Readout(restricted(self.predict), restricted(self.gate))


class Exit(Component, ABC):
    """An exit criterion: a measure of each element that takes the place of the residual in a search.

    A token leaves once its own measure and those of all tokens before it are at most ``threshold``. The value
    returned is the ``f(z)`` with the lowest deciding measure, of equal ones the latest. The driver calls
    ``measure`` once per call of the map; an element that has left is measured too, and the result ignored.
    Elements must not influence each other. All tensors of a state lead with the elements, so that elements
    can be selected and dropped; ``measure`` returns a new state and never modifies the old one in place.

    A criterion that cannot be measured yet returns ``UNDECIDED``. An infinite measure, or NaN, means that the
    element has diverged; the driver sees to elements whose ``f(z)`` is not finite.
    """

    threshold: float | None = None
    """An element may leave at a measure up to this; None: up to the tolerance of the stopping rule."""
    exact_calls: int | None = None
    """The number of calls after which all elements leave; None: the points decide."""
    per_token: ClassVar[bool] = True
    """Whether elements must be tokens; such a criterion is refused with scope ``sequence``."""
    measures: ClassVar[bool] = True
    """Whether there is something to measure; otherwise a search applies its stopping rule as without."""
    reads: ClassVar[Literal["predict", "gate"] | None] = None
    """What the criterion reads of the model, by its readout."""
    readout: Readout | None = None
    """Set by ``bind``."""

    @abstractmethod
    def init(self, z_EF: Tensor) -> State:
        """Return the state before the first call of the map, from the start."""

    @abstractmethod
    def measure(self, z_EF: Tensor, fz_EF: Tensor, residual_E1: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the measure of each element, (E, 1) float32 or better, and the next state.

        ``fz`` is ``f(z)``, and ``residual`` that of the stopping rule's norm.
        """

    def bind(self, readout: Readout) -> Self:
        """Return the criterion with what it reads of a model."""
        bound = copy(self)
        bound.readout = readout
        return bound

    def restrict(self, method: Restriction, argument: Any) -> Self:
        """Return the criterion for some rows or tokens, as ``method`` of the map with this argument does."""
        return self if self.readout is None else self.bind(self.readout.restrict(method, argument))


def effective(exit: Exit, stopping: Stopping) -> Exit | None:
    """Return the criterion for a search by this rule; None for one that is the rule itself.

    Raises:
        ValueError: the scope is not ``prefix``, the model's readout is missing, or the iterations are fewer
            than the criterion's number of calls.

    """
    if not exit.measures:
        return None
    name = type(exit).__name__
    if exit.per_token and stopping.scope != "prefix":
        raise ValueError(
            f"exit criterion {name} decides per token, but stopping.scope is {stopping.scope!r}; set it to "
            "'prefix', or choose the criterion 'residual' or 'fixed'"
        )
    if exit.reads is not None and getattr(exit.readout, exit.reads, None) is None:
        what = "an exit gate" if exit.reads == "gate" else "predictions"
        remedy = "a model with exit_gate: true" if exit.reads == "gate" else "a language model"
        raise ValueError(
            f"exit criterion {name} reads {what}, and none is bound; use {remedy}, or call "
            f"bind(Readout({exit.reads}=…)) first"
        )
    if exit.exact_calls is not None and exit.exact_calls > stopping.max_iterations:
        raise ValueError(
            f"exit criterion {name} takes {exit.exact_calls} calls, but stopping.max_iterations is "
            f"{stopping.max_iterations}; set it to at least {exit.exact_calls}"
        )
    return exit


def begin(exit: Exit, z_EF: Tensor) -> State:
    """Return the criterion's state before the first call, checked.

    Raises:
        ContractError: a leaf is not a tensor that leads with the elements.

    """
    state = exit.init(z_EF)
    leaves = pytree.tree_leaves(state)
    require(
        all(isinstance(leaf, Tensor) and leaf.shape[:1] == z_EF.shape[:1] for leaf in leaves),
        exit,
        "state layout",
        f"every leaf of the state, counters included, must be a tensor with the {z_EF.shape[0]} elements as "
        "first dimension",
    )
    return state


def measured(
    exit: Exit,
    z: Tensor,
    fz: Tensor,
    residual: Tensor,
    state: State,
    valid: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Return the measure of each element, of ``residual``'s shape and type, and the criterion's state.

    The measure is not finite where the residual is not, since the element has then diverged, and 0 at
    padding.

    Args:
        exit: the criterion.
        z: points, (E, F), or (B, T, F).
        fz: ``f(z)``, of the same shape.
        residual: (E, 1), or (B, T, 1).
        state: the criterion's.
        valid: (B, T) bool, False at padding, for points (B, T, F).

    Raises:
        ContractError: the measure is not (E, 1).

    """
    features = z.shape[-1]
    returned, state = exit.measure(
        z.reshape(-1, features), fz.reshape(-1, features), residual.reshape(-1, 1), state
    )
    require(
        isinstance(returned, Tensor) and returned.shape == (residual.numel(), 1),
        exit,
        "measure",
        f"measure must return a tensor ({residual.numel()}, 1), one number per element",
    )
    measure = returned.view(residual.shape)
    if measure.dtype.itemsize > residual.dtype.itemsize:
        measure = narrow(measure, residual.dtype)
    measure = torch.where(residual.isfinite(), measure, residual)
    if valid is not None and residual.ndim == 3:
        measure = measure.masked_fill(~valid[..., None], 0.0)
    return measure, state
