"""Exit criteria: when a token leaves the search. Their specs and their registration are in this file.

Importing this package imports no torch; the classes of the criteria are imported on first use. To add a
criterion, write its rule in a file of its own, and add to this file its spec, its line in
`register_components` and its import for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.families import ExitSpec

if TYPE_CHECKING:
    from implicit_blocks.exits.calls import FixedExit as FixedExit
    from implicit_blocks.exits.calls import ResidualExit as ResidualExit
    from implicit_blocks.exits.exit import Exit as Exit
    from implicit_blocks.exits.exit import Readout as Readout
    from implicit_blocks.exits.gate import GateExit as GateExit
    from implicit_blocks.exits.gate import exit_distribution as exit_distribution
    from implicit_blocks.exits.gate import first_exit as first_exit
    from implicit_blocks.exits.predictions import ArgmaxStabilityExit as ArgmaxStabilityExit
    from implicit_blocks.exits.predictions import KLExit as KLExit
    from implicit_blocks.exits.second_difference import SecondDifferenceExit as SecondDifferenceExit


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in exit criteria."""
    add("exit", ResidualExitSpec, "implicit_blocks.exits.calls:ResidualExit.from_spec")
    add(
        "exit",
        SecondDifferenceExitSpec,
        "implicit_blocks.exits.second_difference:SecondDifferenceExit.from_spec",
    )
    add("exit", KLExitSpec, "implicit_blocks.exits.predictions:KLExit.from_spec")
    add("exit", ArgmaxStabilityExitSpec, "implicit_blocks.exits.predictions:ArgmaxStabilityExit.from_spec")
    add("exit", GateExitSpec, "implicit_blocks.exits.gate:GateExit.from_spec")
    add("exit", FixedExitSpec, "implicit_blocks.exits.calls:FixedExit.from_spec")


class ResidualExitSpec(ExitSpec):
    """A token leaves once its residual is within the tolerance of the stopping rule."""

    per_token: ClassVar[bool] = False

    kind: Literal["residual"] = "residual"


class SecondDifferenceExitSpec(ExitSpec):
    """A token leaves once consecutive steps hardly differ: Pappone et al., 2025."""

    kind: Literal["second_difference"] = "second_difference"
    tolerance: PositiveFloat = 0.01
    """Largest norm of the difference between two consecutive steps, relative to that of f(z)."""


class KLExitSpec(ExitSpec):
    """A token leaves once consecutive predictions hardly differ: Geiping et al., 2025."""

    reads: ClassVar[Literal["predict", "gate"] | None] = "predict"

    kind: Literal["kl"] = "kl"
    tolerance: PositiveFloat = 5e-4
    """Largest Kullback-Leibler divergence between two consecutive predictions, in nats."""


class ArgmaxStabilityExitSpec(ExitSpec):
    """A token leaves once its most likely prediction stays the same: Geiping et al., 2025."""

    reads: ClassVar[Literal["predict", "gate"] | None] = "predict"

    kind: Literal["argmax_stability"] = "argmax_stability"
    calls: PositiveInt = 2
    """Consecutive calls, each of which leaves the most likely token unchanged."""


class GateExitSpec(ExitSpec):
    """A token leaves once a learned gate has assigned enough probability to its exits: Ouro, 2025."""

    reads: ClassVar[Literal["predict", "gate"] | None] = "gate"

    kind: Literal["gate"] = "gate"
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The cumulative exit probability q at which a token leaves."""


class FixedExitSpec(ExitSpec):
    """Every token leaves after the same number of calls."""

    per_token: ClassVar[bool] = False

    kind: Literal["fixed"] = "fixed"
    loops: PositiveInt
    """Number of calls of the map in the search."""


if not TYPE_CHECKING:
    __getattr__ = names_of_components(
        __name__,
        register_components,
        Exit="implicit_blocks.exits.exit",
        Readout="implicit_blocks.exits.exit",
        exit_distribution="implicit_blocks.exits.gate",
        first_exit="implicit_blocks.exits.gate",
    )
