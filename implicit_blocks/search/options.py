"""Search options of one call, which override those of a model's spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from pydantic import ValidationError

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.specs import ExitSpec, SolverSpec, Stopping
from implicit_blocks.specs.base import Spec, require_count, require_part, require_share, validate
from implicit_blocks.specs.errors import format_error

if TYPE_CHECKING:
    from torch import Tensor

    from implicit_blocks.search.loops import LoopCounts

_Spec = TypeVar("_Spec", bound=Spec)


class SearchKwargs(TypedDict, total=False):
    """The keyword arguments of ``SearchOptions``, as every call that searches accepts them."""

    tolerance: float | None
    max_iterations: int | None
    damping: float | None
    warm_start: bool
    moving_average: float | None
    loops: int | tuple[int, int] | LoopCounts | None
    start: Tensor | None
    trajectory: Sequence[int]
    exit: ExitSpec | None


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

    ``loops`` takes a fixed number of undamped calls of the map, instead of searching to a tolerance: n, or
    (n, k) with the last k of them differentiated, or counts for each row (``LoopCounts``). Calls refuse
    ``damping``, ``max_iterations`` and ``moving_average`` with a fixed number of loops, the spec's included.
    ``tolerance`` then only decides what is reported as converged.

    ``start`` (B, L, D) replaces the spec's start, D being the core's width.

    ``trajectory`` has the numbers of calls, from 1, after which the point is kept (``Solution.trajectory``).

    ``exit`` is the exit criterion of evaluation, such as ``KLExitSpec(tolerance=1e-3)``. Calls refuse
    ``tolerance`` with a criterion that has a threshold of its own.

    Raises:
        ValueError: for α outside (0, 1], fewer than one loop, more differentiated loops than loops, a start
            that is not (B, L, D) or is given with ``warm_start``, calls below 1, and an exit criterion that
            is not a spec or is given with ``loops``.

    """

    tolerance: float | None = None
    max_iterations: int | None = None
    damping: float | None = None
    warm_start: bool = False
    moving_average: float | None = None
    loops: int | tuple[int, int] | LoopCounts | None = None
    start: Tensor | None = field(default=None, repr=False, compare=False)
    trajectory: Sequence[int] = ()
    exit: ExitSpec | None = None

    def __post_init__(self) -> None:
        if self.moving_average is not None:
            require_share("moving_average", self.moving_average)
        if self.loops is not None:
            _check_loops(self.loops)
        if self.start is not None:
            _check_start(self.start, warm_start=self.warm_start)
        _check_trajectory(self.trajectory)
        object.__setattr__(self, "trajectory", tuple(self.trajectory))
        require_part("exit", self.exit, ExitSpec, such_as="KLExitSpec(tolerance=1e-3)")
        if self.loops is not None and self.exit is not None:
            raise ValueError(
                f"exit is {self.exit!r}, but loops takes a fixed number of calls; leave one of them out"
            )

    def of_window(self, first: int, tokens: int, *, length: int) -> SearchOptions:
        """Return the options of the window from token ``first``; a start for ``length`` tokens is cut."""
        if self.start is None or self.start.shape[1] != length:
            return self
        return replace(self, start=self.start[:, first : first + tokens])

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options, as ``forward`` and ``generate`` accept them."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of_call(cls, call: Callable[..., Any], search: SearchKwargs) -> SearchOptions:
        """Return the options among the keyword arguments of a call.

        Raises:
            TypeError: for an unknown keyword argument; names the nearest one of the call.

        """
        for name in search.keys() - cls.names():
            known = {*cls.names(), *signature(call).parameters} - {"search"}
            error = f"{call.__qualname__}() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{error}; {did_you_mean(name, known)}")
        return cls(**search)

    def limited(self, tolerance: float | None, max_iterations: int | None) -> SearchOptions:
        """Return these options with other limits, where they are not None."""
        limits: dict[str, Any] = {"tolerance": tolerance, "max_iterations": max_iterations}
        return replace(self, **{name: limit for name, limit in limits.items() if limit is not None})

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


def _check_loops(loops: int | tuple[int, int] | LoopCounts) -> None:
    if hasattr(loops, "total"):  # LoopCounts checks itself
        return
    if not isinstance(loops, tuple):
        _require_integer("loops", loops)
        return
    if len(loops) != 2:
        raise ValueError(
            f"loops is {loops!r}; give a number n, or (n, k) with the last k of n loops differentiated"
        )
    total, differentiated = loops
    _require_integer("loops[0]", total)
    if differentiated != 0:
        _require_integer("loops[1]", differentiated)
    if differentiated > total:
        raise ValueError(
            f"loops is {loops}: of {total} loops, {differentiated} cannot be differentiated; choose at most "
            f"{total}"
        )


def _check_start(start: Tensor, *, warm_start: bool) -> None:
    if getattr(start, "ndim", None) != 3 or not start.is_floating_point():
        shape = tuple(getattr(start, "shape", ())) or type(start).__name__
        raise ValueError(
            f"start is {shape}; give a floating-point tensor (batch, tokens, width), with the core's width"
        )
    if warm_start:
        raise ValueError("start and warm_start both choose the initial point; leave one of them out")


def _check_trajectory(trajectory: Sequence[int]) -> None:
    if isinstance(trajectory, str) or not isinstance(trajectory, Sequence):
        raise ValueError(f"trajectory is {trajectory!r}; give the numbers of calls, such as (1, 2, 4)")
    for number in trajectory:
        _require_integer("a call of trajectory", number)


def _require_integer(name: str, value: int) -> None:
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; choose an integer of at least 1")
    require_count(name, value)


def _changed(spec: _Spec, changes: Mapping[str, Any]) -> _Spec:
    """Return the spec with these changes; an error has one line for each value out of range."""
    try:
        return validate(type(spec), {**dict(spec), **changes})
    except ValidationError as error:
        raise format_error(error, {}, source="") from None
