"""Specs and registration of the objectives: the loss of a training step, given the iterates of the core.

Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat, model_validator

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.errors import field_error
from implicit_blocks.specs.families import ObjectiveSpec


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in objectives."""
    add("objective", LastObjectiveSpec, "implicit_blocks.models.objectives:LastObjective.from_spec")
    add("objective", UntilErrorSpec, "implicit_blocks.models.objectives:UntilError.from_spec")
    add("objective", IteratesObjectiveSpec, "implicit_blocks.models.objectives:IteratesObjective.from_spec")
    add("objective", ExitMixtureSpec, "implicit_blocks.models.objectives:ExitMixture.from_spec")
    add("objective", ExitExpectationSpec, "implicit_blocks.models.objectives:ExitExpectation.from_spec")


def _an_iterate(value: Any) -> Any:
    if value == "last" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("choose a number of loops, at least 1, or 'last'")


IterateNumber = Annotated[int | Literal["last"], BeforeValidator(_an_iterate)]
"""An iterate: its number of loops, at least 1, or `last`."""


class LastObjectiveSpec(ObjectiveSpec):
    """The cross-entropy of the last iterate's predictions."""

    kind: Literal["last"] = "last"


class UntilErrorSpec(ObjectiveSpec):
    """The cross-entropy of each sequence's tokens up to its first wrong prediction.

    For tasks that track a state: the labels after an error belong to another state than the model's.
    """

    kind: Literal["until_error"] = "until_error"


class IteratesObjectiveSpec(ObjectiveSpec):
    """The weighted mean of the cross-entropies of several iterates' predictions.

    The loss of an iterate before the differentiated loops trains only what follows the core.
    """

    reads_iterates: ClassVar[bool] = True

    kind: Literal["iterates"] = "iterates"
    at: tuple[IterateNumber, ...] = ("last",)
    """The iterates, by their number of loops; `last` is the output."""
    weights: tuple[PositiveFloat, ...] | None = None
    """The weight of each; null: equal weights."""

    @property
    def latest_iterate(self) -> int | None:
        """The largest number in `at`."""
        return max((t for t in self.at if isinstance(t, int)), default=None)

    @model_validator(mode="after")
    def _iterates_fit(self) -> Self:
        if not self.at:
            raise field_error("there are no iterates; choose for example [2, 4, last]", "at", value=self.at)
        if len(set(self.at)) < len(self.at):
            twice = next(t for t in self.at if self.at.count(t) > 1)
            raise field_error(f"iterate {twice!r} occurs twice; name each once", "at", value=self.at)
        return self

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.at):
            message = f"{len(self.weights)} weights for {len(self.at)} iterates; give one weight each"
            raise field_error(message, "weights", value=self.weights)
        return self


class ExitMixtureSpec(ObjectiveSpec):
    """The cross-entropy of the iterates' logits, averaged by the exit gate's distribution: Ouro's code."""

    reads_iterates: ClassVar[bool] = True
    needs_gate: ClassVar[bool] = True

    kind: Literal["exit_mixture"] = "exit_mixture"


class ExitExpectationSpec(ObjectiveSpec):
    """The expected cross-entropy under the exit gate's distribution, less its entropy: Ouro (2510.25741)."""

    reads_iterates: ClassVar[bool] = True
    needs_gate: ClassVar[bool] = True

    kind: Literal["exit_expectation"] = "exit_expectation"
    entropy_weight: NonNegativeFloat = 0.05
    """Weight β of the entropy, which keeps the gate from always choosing the same loop."""
