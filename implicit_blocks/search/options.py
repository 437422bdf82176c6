"""Search options of one call, which override those of a model's spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from pydantic import ValidationError

from implicit_blocks._utils.validation import require_share
from implicit_blocks.specs import SolverSpec, Stopping
from implicit_blocks.specs.base import Spec, validate
from implicit_blocks.specs.errors import format_error

_Spec = TypeVar("_Spec", bound=Spec)


class SearchKwargs(TypedDict, total=False):
    """The keyword arguments of ``SearchOptions``, as every call that searches accepts them."""

    tolerance: float | None
    max_iterations: int | None
    damping: float | None
    warm_start: bool
    moving_average: float | None


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of the search of one call; None, and False, keep the values of the spec.

    ``tolerance`` and ``max_iterations`` change the stopping rule in force (of training or of evaluation),
    ``damping`` the solver's, for solvers that have one.

    ``warm_start`` starts the search of a token at the solution of the token committed before it, instead of
    the spec's start; all tokens of a window start at the solution of the last token before the window. Where
    the map has a single fixed point the result is the same within the tolerance. Fewer iterations are needed
    where consecutive solutions are close, and more where they are not: 1 to 3 % more in a model trained on
    products of permutations half of which are the identity, 10 to 30 % more where all permutations are
    equally frequent, because zeros are as good a start as any.

    ``moving_average`` is α in ``m ← (1 − α) m + α f(z)``, initialized with the first ``f(z)``: the search
    returns the average m of its iterates instead of the last one, and measures the residual ``m − z̄``, where
    z̄ is the same average of the points z. For noisy maps, as on analog hardware, where single iterates do not
    settle below the noise; with an exact map it costs iterations, about ``ln(tolerance) / ln(1 − α)``.

    Raises:
        ValueError: for α outside (0, 1].

    """

    tolerance: float | None = None
    max_iterations: int | None = None
    damping: float | None = None
    warm_start: bool = False
    moving_average: float | None = None

    def __post_init__(self) -> None:
        if self.moving_average is not None:
            require_share("moving_average", self.moving_average)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options, as ``forward`` and ``generate`` accept them."""
        return tuple(field.name for field in fields(cls))

    def solver(self, spec: SolverSpec) -> SolverSpec:
        """Return the solver's spec with these options.

        Raises:
            ValueError: for a solver without damping, or a damping outside (0, 1].

        """
        if self.damping is None:
            return spec
        if "damping" not in type(spec).model_fields:
            raise ValueError(f"solver {spec.kind!r} has no damping; leave it out or choose another solver")
        return _changed(spec, {"damping": self.damping})

    def stopping(self, stopping: Stopping) -> Stopping:
        """Return the stopping rule with these options.

        Raises:
            ValueError: for a negative tolerance or fewer than one iteration.

        """
        given = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        changes = {name: value for name, value in given.items() if value is not None}
        return _changed(stopping, changes) if changes else stopping


def _changed(spec: _Spec, changes: Mapping[str, Any]) -> _Spec:
    """Return the spec with these changes; an error has one line for each value out of range."""
    try:
        return validate(type(spec), {**dict(spec), **changes})
    except ValidationError as error:
        raise format_error(error, {}, source="") from None
