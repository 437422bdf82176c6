"""How the search of one call differs from what a model's spec says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import ValidationError

from implicit_blocks._utils.validation import require_share
from implicit_blocks.specs import SolverSpec, Stopping
from implicit_blocks.specs.base import Spec, validate
from implicit_blocks.specs.errors import format_error

_Spec = TypeVar("_Spec", bound=Spec)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Knobs of a single forward pass; None, and False, keep what the spec says.

    ``tolerance`` and ``max_iterations`` change the stopping rule in force (of training or of evaluation),
    ``damping`` the solver's, for solvers that have one.

    ``warm_start`` begins the search of a token at the solution of the one committed before it, instead of the
    spec's start; all tokens of a window begin at that of the last token before the window. The result is the
    same, to the tolerance, where the map has one fixed point; it pays where consecutive solutions lie close
    to each other, and costs iterations where they don't: 1 to 3 % more in a model trained on products of
    permutations half of which are the identity, 10 to 30 % more where none is favored, from zeros being as
    good a start as any.

    ``moving_average`` is α in ``m ← (1 − α) m + α f(z)``, begun with the first ``f(z)``: the search answers
    with the average m of its iterates instead of the last, and measures the residual ``m − z̄``, z̄ being the
    same average of the points z. For maps that are noisy, as on analog hardware, where single iterates never
    settle below the noise; with an exact map it costs iterations, about ``ln(tolerance) / ln(1 − α)``.

    Raises:
        ValueError: where α is outside (0, 1].

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
        """Return the knobs' names, those of the parameters of ``forward`` and ``generate``."""
        return tuple(field.name for field in fields(cls))

    def solver(self, spec: SolverSpec) -> SolverSpec:
        """Return the solver's spec with these options.

        Raises:
            ValueError: where the solver has no damping, or it is outside (0, 1].

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
    """Return the spec with these changes, refused in a line each where they are out of range."""
    try:
        return validate(type(spec), {**dict(spec), **changes})
    except ValidationError as error:
        raise format_error(error, {}, source="") from None
