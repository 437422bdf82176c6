"""The three abstractions of the library: ``Solver``, ``GradientEstimator``, ``Mixer``.

An implicit layer is a map ``f`` and a point where ``z = f(z)``. The driver
(``implicit_blocks.search.search``) runs the loop that finds the point; a *solver* is the rule for its next
step, a *gradient estimator* defines what is differentiated, and a *mixer* is the part of ``f`` that mixes the
tokens of a sequence.

Shape legend: B batch, L tokens of a window, T tokens so far (committed and window), D model width,
E elements of a search (rows, or tokens with prefix scope), F features of an element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import Component
from implicit_blocks.windows import Window

if TYPE_CHECKING:
    from implicit_blocks.search.agreement import Agreement
    from implicit_blocks.search.loops import LoopCounts
    from implicit_blocks.search.search import Search

State = Any  # a tensor, or nested tuples, lists and dicts of tensors

Map = Callable[[Tensor], Tensor]
"""A map whose fixed point is sought: its value has the shape, dtype and device of its argument."""


@runtime_checkable
class RowMap(Protocol):
    """A map that can be restricted to some rows of its batch, so that converged rows can leave the loop."""

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, …)."""

    def select_rows(self, rows: Tensor, /) -> RowMap:
        """Return the same map for the rows with these indices, (R,) int64."""


@runtime_checkable
class SteppingMap(Protocol):
    """A map with its own implementation of damped steps, cheaper than separate calls and sums.

    Phantom gradients use it. Values and gradients equal those of separate calls and sums.
    """

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, …)."""

    def damped_steps(self, z: Tensor, /, *, count: int, damping: float) -> Tensor:
        """Return the point after ``count`` steps ``z ← (1 − λ) z + λ f(z)``, (B, …); λ is the damping."""


@runtime_checkable
class LowPrecisionMap(Protocol):
    """A map that may have a cheaper approximation, by which a search then begins."""

    begins_low: bool
    """Whether searches should begin with the approximation."""

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, …)."""

    def low_precision(self) -> Map | None:
        """Return the approximation, or None where there is none; without gradients."""


@runtime_checkable
class SequenceMap(Protocol):
    """A causal map of sequences that can be restricted to its first tokens or to those after them."""

    def __call__(self, z: Tensor, /) -> Tensor:
        """Return ``f(z)``, of ``z``'s shape, (B, L, …)."""

    def first(self, tokens: int, /) -> SequenceMap:
        """Return the same map for the first ``tokens`` tokens alone."""

    def after(self, z: Tensor, /) -> SequenceMap:
        """Commit the first tokens, whose solution is ``z`` (B, T, …), and return the map of the others.

        Calls the map once, for those tokens.
        """


# --------------------------------------------------------------------------------------------- components


class Solver(Component, ABC):
    """An update rule for ``z = f(z)``: the next point, given a point and its value.

    The driver calls ``f``, measures residuals, stops and freezes; a solver only proposes the next point. Each
    *element* of the search is one row of F features, (E, F): a whole sequence, or with prefix scope a single
    token. Elements must not influence each other. All tensors of a state have E as their first dimension,
    counters included, so that elements can be frozen, selected and dropped. ``update`` returns a new state
    and never modifies the old one in place.
    """

    differentiable: ClassVar[bool] = False
    """Whether ``update`` may be differentiated, as the unrolled gradient does."""

    @abstractmethod
    def init(self, z0_EF: Tensor) -> State:
        """Return the state before the first call of ``f``."""

    @abstractmethod
    def update(self, z_EF: Tensor, fz_EF: Tensor, state: State, f: Map) -> tuple[Tensor, State]:
        """Return the next point and state, given ``fz = f(z)``.

        ``f`` is the driver's handle on the map for the same elements, for rules that need further calls.
        """


@runtime_checkable
class SearchingSolver(Protocol):
    """A solver with its own stopping rule, which ``Search`` calls instead of its loop.

    For published rules whose stopping is part of their definition. It reads ``stopping``, ``valid``,
    ``trace``, ``trajectory`` and ``agree`` of the search, and documents what it departs from.
    """

    def run(self, f: Map, z0: Tensor, search: Search, /) -> Solution:
        """Search for ``z = f(z)`` from ``z0`` (B, …), without gradients, which are disabled."""


class SearchLike(Protocol):
    """The search passed to a gradient estimator; ``implicit_blocks.search.search.Search`` is one."""

    solver: Solver
    stopping: Stopping
    valid: Tensor | None
    agree: Agreement | None
    loops: LoopCounts | None
    trajectory: tuple[int, ...]
    trace: bool

    def __call__(self, f: Map, z0: Tensor, /) -> Solution:
        """Search for ``z = f(z)`` from ``z0`` without recording gradients."""

    def report(self, z: Tensor, fz: Tensor, *, iterations: int | Tensor) -> Solution:
        """Return a solution for a given pair ``z``, ``f(z)``, both (B, …), measured as in a search."""


class GradientEstimator(Component, ABC):
    """Defines which part of the search for a fixed point is differentiated, and how.

    Exact: ``implicit_function``, by the implicit function theorem, and ``unrolled``, through the steps
    taken. Biased and cheaper: ``phantom``, through a few steps after the search, ``last_loops``, through the
    last of a fixed number of loops, and ``one_step_adjoint``, one step of the adjoint equation. A new
    estimator documents whether it is exact, and its formula; ``implicit_blocks.testing.check_gradient`` tests
    it.
    """

    searches: bool = True
    """Whether the value comes from a search that is expected to reach the tolerance."""
    retains_graph: bool = False
    """Whether backward differentiates a call of ``f`` more than once, with ``retain_graph=True``."""

    @abstractmethod
    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Find the fixed point of ``f`` from ``z0`` (B, …); the solution's ``z`` carries the gradient.

        The search makes at most ``search.stopping.max_iterations`` calls of ``f``, the estimator a fixed
        number of further calls (its ``steps``).
        """


# --------------------------------------------------------------------------------------------- mixers


class SlotStates(ABC):
    """A mixer's committed states of S slots."""

    @property
    def windows(self) -> bool:
        """Whether ``gather``'s state also serves windows of several tokens, and ``write`` their prefixes.

        ``forward`` then mixes such a window, whose tokens may be provisional, without a change to what is
        committed, ``advance_prefix`` returns the state after the first tokens of each row, and ``write``
        commits it. False: the model's tokens are decoded one after the other.
        """
        return False

    @abstractmethod
    def prefill(self, slot: int) -> State:
        """Return the state of a slot before its first token, of one row, in which a prompt is solved."""

    def commit(self, slot: int, state: State) -> None:
        """Store the state after a prompt, of one row, continued from ``prefill``'s state or a new one.

        Only ``commit_rows`` calls it.
        """
        raise NotImplementedError

    def commit_rows(self, mixer: Mixer, slots: Sequence[int], slots_B: Tensor, state: State) -> None:
        """Store the states after prompts, one per row, in these slots; ``slots_B`` int64 are the same.

        Where ``windows`` is True, the rows may end with padding. By default each row is stored alone.
        """
        for row, slot in enumerate(slots):
            self.commit(slot, mixer.select_rows(state, torch.full_like(slots_B[:1], row)))

    @abstractmethod
    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> State:
        """Return the state for a window of one token in each of these slots, after ``lengths_R`` tokens.

        ``rows_R`` int64 are distinct slots; None: all slots in order. The mixer's ``forward`` and ``advance``
        accept the state, with a window whose positions are ``lengths_R`` and whose ``start`` is not 0.
        """

    @abstractmethod
    def write(self, rows_R: Tensor | None, after: State, committed_R: Tensor) -> None:
        """Commit the state that ``advance`` returned for ``gather``'s, where ``committed_R`` (R,) is True.

        Writes in place and reads no value from the device, because a step is captured as a graph.
        """

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Store states in this dtype, where the mixer supports it; call it before the first prompt.

        Raises:
            ValueError: for integer dtypes, where the mixer does not support them.

        """
        if not dtype.is_floating_point:
            kind = type(self).__name__
            raise ValueError(
                f"{kind} cannot store states in {dtype}; choose a floating dtype such as torch.bfloat16"
            )


class Mixer(nn.Module, ABC):
    """Mixes a window of tokens, given the state after the preceding tokens.

    Any division of a sequence into windows must give the same values: one window of length L is training and
    prefill, L windows of one token are decoding. ``forward`` may be called any number of times on a window,
    with any ``z``, and never changes the state; ``advance``, called once the window's fixed point is known,
    also returns the state after the window. A mixer is causal: a token's output depends neither on later
    tokens, nor on padding, nor on other documents packed into its row. ``prepare`` may raise ValueError for
    packed documents, but must accept padding, which every batch of unequal rows has. A bidirectional mixer
    (``causal`` is False) mixes a whole sequence as one window, and ``prepare`` raises ValueError for windows
    after committed tokens.

    A mixer is built as ``MyMixer(spec, d_model=…)`` and must build on the meta device; ``reset_parameters``
    initializes its own parameters (other than those of its submodules).
    """

    truncates: ClassVar[bool] = False
    """Whether ``truncate`` can remove committed tokens; a recurrent state cannot be truncated."""
    causal: bool = True
    """Whether a token's output is independent of later tokens; windows and decoding require it."""
    needs_token_ids: bool = False
    """Whether ``prepare`` needs the token IDs of the window (``Window.ids_BL``)."""
    initial_state_kind: Hashable | None = None
    """Mixers of one kind have equal initial states, which they share; None: each has its own."""

    @property
    @abstractmethod
    def injection_width(self) -> int:
        """Width of the injection ``u`` that the mixer adds to its input projection."""

    @abstractmethod
    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> State:
        """Return the state before the first token, with room for ``max_seq_len`` tokens, if given."""

    @abstractmethod
    def select_rows(self, state: State, rows: Tensor) -> State:
        """Return the state of the rows with these indices, (R,) int64."""

    def truncate(self, state: State, length: int) -> State:
        """Return the state after the first ``length`` committed tokens; see ``truncates``.

        Raises:
            ValueError: if the mixer's state cannot be truncated.

        """
        raise ValueError(
            f"{type(self).__name__} has a recurrent state, which cannot be truncated; keep the earlier state"
        )

    def slots(self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int) -> SlotStates:
        """Return the states of ``count`` slots, which have independent lengths up to ``max_seq_len``.

        A mixer whose state has a fixed size returns ``RecurrentSlots(self, …)`` of
        ``implicit_blocks.mixers.slots``.

        Raises:
            ValueError: if the mixer does not support slots.

        """
        raise ValueError(
            f"{type(self).__name__} does not support slots, which continuous decoding needs; use generate"
        )

    def supports_injection_table(self, window: Window) -> bool:
        """Whether ``u`` may be a table (V, U), indexed by ``window.u_rows_BL``, for this window.

        A small vocabulary has fewer injections than a batch has tokens, and its table fits the GPU's cache.
        """
        return False

    @abstractmethod
    def prepare(self, window: Window) -> Any:
        """Return the data of a window that ``forward`` needs (masks, rotations), computed once per window."""

    @abstractmethod
    def forward(self, z_BLD: Tensor, u_BLU: Tensor | None, state: State, context: Any) -> Tensor:
        """Return the mixed window, (B, L, D). Pure: ``state`` is not modified."""

    @abstractmethod
    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: State, context: Any
    ) -> tuple[Tensor, State]:
        """Return ``forward``'s value and the state after the window, in one pass."""

    def advance_prefix(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: State, context: Any, prefix: Any
    ) -> tuple[Tensor, State]:
        """Return ``forward``'s value, and the state after the first tokens of each row.

        ``prefix`` is the context of the same window in which the other tokens, the last ones, are padding. A
        mixer may save the second pass over the window.
        """
        _, after = self.advance(z_BLD, u_BLU, state, prefix)
        mixed: Tensor = self(z_BLD, u_BLU, state, context)
        return mixed, after

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the linear layers that write into the residual stream, whose initialization is scaled."""
        return ()

    def reset_parameters(self) -> None:
        """Initialize the mixer's own parameters."""
