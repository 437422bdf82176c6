"""The three abstractions that everything else combines: ``Solver``, ``GradientEstimator``, ``Mixer``.

An implicit layer is a map ``f`` and a point where ``z = f(z)``. The driver
(``implicit_blocks.search.search``) owns the loop that finds the point; a *solver* is the rule for its next
step, a *gradient estimator* says what of the search is differentiated, and a *mixer* is the part of ``f``
that mixes the tokens of a sequence.

Shape legend: B batch, L tokens of a window, T tokens so far (committed and window), D model width,
E elements of a search (rows, or tokens with prefix scope), F features of an element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from implicit_blocks._utils.padding import PaddingPermutation, of_last_real
from implicit_blocks.registry import build
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ComponentSpec, Stopping

_Made = TypeVar("_Made")
State = Any  # a tensor, or nested tuples, lists and dicts of tensors

Map = Callable[[Tensor], Tensor]
"""What fixed points are of: a function of a tensor that gives one of the same shape, dtype and device."""


@runtime_checkable
class RowMap(Protocol):
    """A map that can be restricted to some rows of its batch, so that converged rows can leave the loop."""

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, …)."""

    def select_rows(self, rows: Tensor, /) -> RowMap:
        """Return the same map for the rows with these indices, (R,) int64."""


@runtime_checkable
class SteppingMap(Protocol):
    """A map that takes damped steps by itself, for less than calls and sums one after the other cost.

    Phantom gradients leave theirs to it. Values and gradients are those of the calls and sums.
    """

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, …)."""

    def damped_steps(self, z: Tensor, /, *, count: int, damping: float) -> Tensor:
        """Return where ``count`` steps ``z ← (1 − λ) z + λ f(z)`` lead, (B, …); λ is the damping."""


@runtime_checkable
class SequenceMap(Protocol):
    """A causal map of sequences that can be cut in time: its first tokens, or those after committed ones."""

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, L, …)."""

    def first(self, tokens: int, /) -> SequenceMap:
        """Return the same map for the first so many tokens alone."""

    def after(self, z: Tensor, /) -> SequenceMap:
        """Commit the first tokens, whose solution is ``z`` (B, T, …), and return the map of the others.

        One call of the map for those tokens.
        """


# --------------------------------------------------------------------------------------------- components


class Component:
    """A part that a spec can name: it is made from the spec's fields."""

    @classmethod
    def from_spec(cls, spec: ComponentSpec) -> Self:
        """Make the component: the spec's fields are the constructor's keywords, nested ones built first."""
        values = {name: getattr(spec, name) for name in type(spec).model_fields if name != "kind"}
        return cls(**{n: build(v) if isinstance(v, ComponentSpec) else v for n, v in values.items()})

    def __repr__(self) -> str:
        """Show the constructor's options that the component keeps under their names."""
        names = [name for name in signature(type(self).__init__).parameters if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Solver(Component, ABC):
    """An update rule for ``z = f(z)``: where to call ``f`` next, given what it returned.

    The driver calls ``f``, measures, stops and freezes; a solver only proposes. It sees each *element* of the
    search as one row of F features, (E, F): a whole sequence, or with prefix scope a single token. Elements
    are solved side by side and must not influence each other. A state is made of tensors that all lead with
    E, counters included, so that elements can be frozen, selected and dropped; ``update`` returns a new state
    and never changes the old one in place.
    """

    differentiable: ClassVar[bool] = False
    """Whether ``update`` may be differentiated, as the unrolled gradient does."""

    @abstractmethod
    def init(self, z0_EF: Tensor) -> State:
        """Return the state before the first call of ``f``."""

    @abstractmethod
    def update(self, z_EF: Tensor, fz_EF: Tensor, state: State, f: Map) -> tuple[Tensor, State]:
        """Return the next point and state, given ``fz = f(z)``.

        ``f`` is the driver's handle on the map for the same elements, for the rare rule that needs further
        calls.
        """


class SearchLike(Protocol):
    """What a gradient estimator is given to search with; ``implicit_blocks.search.search.Search`` is one."""

    solver: Solver
    stopping: Stopping
    valid: Tensor | None

    def __call__(self, f: Map, z0: Tensor, /) -> Solution:
        """Search for ``z = f(z)`` from ``z0`` without recording gradients."""

    def report(self, z: Tensor, fz: Tensor, *, iterations: int) -> Solution:
        """Return a solution for a given pair ``z``, ``f(z)``, both (B, …), measured as a search would."""


class GradientEstimator(Component, ABC):
    """What of the search for a fixed point is differentiated, and how.

    Exact: ``implicit_function``, by the implicit function theorem, and ``unrolled``, of the steps taken.
    Biased, and cheaper: ``phantom``, of a few steps behind the search. A new one says which it is, with its
    formula, and ``implicit_blocks.testing.check_gradient`` holds it to that.
    """

    searches: bool = True
    """Whether its value comes from a search that is supposed to reach the tolerance."""

    @abstractmethod
    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Find the fixed point of ``f`` from ``z0`` (B, …); the solution's ``z`` carries the gradient.

        At most ``search.stopping.max_iterations`` calls of ``f`` go to the search, and a fixed number of the
        estimator's own come on top (its ``steps``).
        """


# --------------------------------------------------------------------------------------------- mixers


@dataclass(frozen=True)
class Window:
    """A run of tokens that is solved together, after ``start`` committed ones.

    ``positions_BL`` (1 or B, L) int64 count the real tokens of each row from 0, whatever its documents.
    ``valid_BT`` (B, T) bool is False at padding, ``documents_BT`` (B, T) int64 numbers the documents packed
    into a row; both cover the committed tokens too, T = start + length, and are None where there is no
    padding and one document. ``gaps`` is False where it is known that no padding stands between two tokens of
    a row. ``dtype`` is that of the residual stream. ``u_rows_BL`` (B, L) int64 is there where the mixers said
    that they read the injection from a table (``Mixer.supports_injection_table``): which row each token
    takes.
    """

    batch_size: int
    start: int
    length: int
    positions_BL: Tensor
    valid_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    gaps: bool = True
    dtype: torch.dtype = torch.float32
    u_rows_BL: Tensor | None = None
    shared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the window's tokens."""
        return self.positions_BL.device

    @property
    def valid_BL(self) -> Tensor | None:
        """Where the window's own tokens are real, (B, L) bool, or None: everywhere."""
        return None if self.valid_BT is None else self.valid_BT[:, self.start :]

    @property
    def documents_BL(self) -> Tensor | None:
        """The documents of the window's own tokens, (B, L) int64, or None: all of one."""
        return None if self.documents_BT is None else self.documents_BT[:, self.start :]

    def real_first(self) -> PaddingPermutation | None:
        """Return the order that moves padding behind each row's real tokens, or None: there is no padding."""
        valid = self.valid_BL
        if valid is None:
            return None
        return self.once("real first", lambda: PaddingPermutation.of(valid))

    def documents_before(self, count: int) -> Tensor | None:
        """Return the documents of the last real tokens before the window, (B, S) int64, the latest last.

        S is ``count``, or the number of committed tokens where that is less. None where there is one
        document. Rows with fewer real tokens have those of padding in front.
        """
        if self.documents_BT is None:
            return None
        start = self.start
        valid = None if self.valid_BT is None else self.valid_BT[:, :start]
        return of_last_real(self.documents_BT[:, :start], valid, count)

    def once(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return ``make()``, made once a window however many layers ask: masks, rotation tables."""
        if key not in self.shared:
            self.shared[key] = make()
        made: _Made = self.shared[key]
        return made

    def cut(self, first: int, stop: int) -> Window:
        """Return the window of its tokens from ``first`` up to ``stop``, those before them committed."""
        end = self.start + stop
        return replace(
            self,
            start=self.start + first,
            length=stop - first,
            positions_BL=self.positions_BL[:, first:stop],
            valid_BT=None if self.valid_BT is None else self.valid_BT[:, :end],
            documents_BT=None if self.documents_BT is None else self.documents_BT[:, :end],
            u_rows_BL=None if self.u_rows_BL is None else self.u_rows_BL[:, first:stop],
            shared={},
        )

    def select_rows(self, rows: Tensor) -> Window:
        """Return the window of these rows, (R,) int64 indices."""
        positions = self.positions_BL if self.positions_BL.shape[0] == 1 else self.positions_BL[rows]
        return replace(
            self,
            batch_size=rows.numel(),
            positions_BL=positions,
            valid_BT=None if self.valid_BT is None else self.valid_BT[rows],
            documents_BT=None if self.documents_BT is None else self.documents_BT[rows],
            u_rows_BL=None if self.u_rows_BL is None else self.u_rows_BL[rows],
            shared={},
        )


class SlotStates(ABC):
    """What a mixer has committed in each of S slots."""

    @abstractmethod
    def prefill(self, slot: int) -> State:
        """Return the state of a slot before its first token, of one row, to commit a prompt to."""

    @abstractmethod
    def commit(self, slot: int, state: State) -> None:
        """Keep the state, of one row, that committing a prompt to ``prefill``'s or to a new one has left."""

    @abstractmethod
    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> State:
        """Return the state for a window of one token in each of these slots, behind so many tokens.

        ``rows_R`` int64 are different slots, None all of them in order. The mixer's ``forward`` and
        ``advance`` take it, with a window whose positions are ``lengths_R`` and whose ``start`` is not 0.
        """

    @abstractmethod
    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """Commit, where ``committed_R`` (R,) bool says so, what ``advance`` left of ``gather``'s state.

        In the memory that is there, and without asking the device for a value: a step is captured as a graph.
        """

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Keep in this type what is kept in a wider one, where that is foreseen; before the first text.

        Raises:
            ValueError: for integers, where they are not foreseen.

        """
        if not dtype.is_floating_point:
            kind = type(self).__name__
            raise ValueError(
                f"{kind} can't keep states in {dtype}; choose a floating type, as torch.bfloat16"
            )


class Mixer(nn.Module, ABC):
    """Mixes a window of tokens, given the state left by the tokens before it.

    Cutting a sequence into windows in any way must give the same values: one window of length L is training
    and prefill, L windows of one token are decoding. ``forward`` may be called any number of times on a
    window, with any ``z``, and never changes the state; ``advance``, called once when the window's fixed
    point is known, also returns the state after it. A mixer is causal: a token's output depends on no later
    token, nor on padding, nor on other documents packed into its row. ``prepare`` may refuse packed documents
    by a ``ValueError``. It must accept padding, which every batch of unequal rows has.

    A mixer is built as ``MyMixer(spec, d_model=…)`` and must build on the meta device; parameters of its own
    (beyond those of its submodules) are initialized in ``reset_parameters``.
    """

    truncates: ClassVar[bool] = False
    """Whether committed tokens can be taken back, by ``truncate``; not where they are folded into one."""

    @property
    @abstractmethod
    def injection_width(self) -> int:
        """Width of the injection ``u`` that the mixer adds to its input projection."""

    @abstractmethod
    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> State:
        """Return the state before the first token; ``max_seq_len`` tokens are expected, if given."""

    @abstractmethod
    def select_rows(self, state: State, rows: Tensor) -> State:
        """Return the state of the rows with these indices, (R,) int64."""

    def truncate(self, state: State, length: int) -> State:
        """Return the state as it was after the first ``length`` committed tokens; see ``truncates``.

        Raises:
            ValueError: where the mixer cannot.

        """
        raise ValueError(
            f"{type(self).__name__} has folded its tokens into one state and cannot take any back; keep the "
            "state from before them"
        )

    def slots(self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int) -> SlotStates:
        """Return the states of ``count`` rows that are each at a length of their own, up to ``max_seq_len``.

        A mixer whose state has one size returns ``RecurrentSlots(self, …)`` of
        ``implicit_blocks.mixers.slots``.

        Raises:
            ValueError: where the mixer has no such states.

        """
        raise ValueError(
            f"{type(self).__name__} keeps no states of rows at lengths of their own, which continuous "
            "decoding needs; use generate"
        )

    def supports_injection_table(self, window: Window) -> bool:
        """Whether ``u`` may be a table (V, U) here, of which ``window.u_rows_BL`` says each token's row.

        A small vocabulary's injections are fewer than the tokens', and stay in the GPU's cache.
        """
        return False

    @abstractmethod
    def prepare(self, window: Window) -> Any:
        """Return what ``forward`` needs to know of a window (masks, rotations), made once for the loop."""

    @abstractmethod
    def forward(self, z_BLD: Tensor, u_BLU: Tensor | None, state: State, context: Any) -> Tensor:
        """Return the mixed window, (B, L, D). Pure: ``state`` is read, never written."""

    @abstractmethod
    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: State, context: Any
    ) -> tuple[Tensor, State]:
        """Return ``forward``'s value and the state after the window; one pass for both."""

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the linear layers that write into the residual stream: the model scales their start."""
        return ()

    def reset_parameters(self) -> None:
        """Initialize the parameters that belong to the mixer itself."""
