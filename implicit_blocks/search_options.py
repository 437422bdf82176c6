"""How the search of one call differs from what a model's spec says."""

from __future__ import annotations

from dataclasses import dataclass

from implicit_blocks.specs import SolverSpec, Stopping


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Knobs of a single forward pass; None keeps what the spec says.

    ``tolerance`` and ``max_iterations`` change the stopping rule in force (of training or of evaluation),
    ``damping`` the solver's, for solvers that have one.
    """

    tolerance: float | None = None
    max_iterations: int | None = None
    damping: float | None = None

    @property
    def changes_solver(self) -> bool:
        """Whether the solver is another than the spec's."""
        return self.damping is not None

    def solver(self, spec: SolverSpec) -> SolverSpec:
        """Return the solver's spec with these options.

        Raises:
            ValueError: where the solver has no damping, or it is outside (0, 1].

        """
        if self.damping is None:
            return spec
        if "damping" not in type(spec).model_fields:
            raise ValueError(f"solver {spec.kind!r} has no damping; leave it out or choose another solver")
        return type(spec).model_validate({**dict(spec), "damping": self.damping})

    def stopping(self, stopping: Stopping) -> Stopping:
        """Return the stopping rule with these options.

        Raises:
            ValueError: for a negative tolerance or fewer than one iteration.

        """
        given = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        changes = {name: value for name, value in given.items() if value is not None}
        return Stopping.model_validate({**dict(stopping), **changes}) if changes else stopping
