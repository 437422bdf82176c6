"""Slots on the device: their states and searches, and the procedures that advance them.

All tensors have fixed addresses and no value is read from the device, so that on a GPU each procedure is
captured as a graph, one for each number of slots.

Shape legend: S slots, R of them in a procedure, B prompts, D model width, U injection width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from implicit_blocks._utils.module_hooks import any_hooks
from implicit_blocks.cuda.procedures import CapturedGraphs, put_
from implicit_blocks.decoding.slots.ends import SlotEnds, window_of_slots
from implicit_blocks.decoding.slots.fused_map import FusedMap, fused_map
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.exits.exit import Exit
from implicit_blocks.interfaces import SlotStates, Solver
from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.implicit import ImplicitLM, loop_counts
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.solving import exit_of_points
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.solution import finite_or
from implicit_blocks.specs import Stopping
from implicit_blocks.weights.cache import WeightCache

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """The distinct slots of a procedure: ``where_R`` marks those it affects, ``on_R`` those that continue."""

    rows_R: Tensor
    where_R: Tensor
    on_R: Tensor
    logits_RV: Tensor
    report_4R: Tensor  # token, iterations, residual, converged


class SlotBatch:
    """S slots of one model; ``ContinuousDecoder`` schedules them.

    Args:
        model: a model in evaluation mode.
        max_batch_size: S.
        max_seq_len: maximum number of tokens per slot.
        options: options of the searches.
        graphs: capture the procedures, unless modules have hooks, which graphs do not call.
        state_dtype: dtype of recurrent states; None: the mixers' default.

    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_batch_size: int,
        max_seq_len: int,
        options: SearchOptions,
        graphs: bool,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.max_batch_size, self.options = model, max_batch_size, options
        embedding = model.embedding.weight
        self.device = embedding.device
        kind = self.device.type
        self._autocast: torch.dtype | None = None
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            self._autocast = torch.get_autocast_dtype(kind)
        if graphs and any_hooks(model.modules()):
            _LOG.warning("modules of the model have hooks, so decoding runs eagerly: graphs call no hooks")
            graphs = False
        self.captured = CapturedGraphs() if graphs else None
        self._places: dict[tuple[str, int], Places] = {}
        dtype = embedding.dtype
        if self._autocast is not None and dtype != torch.float64:
            dtype = self._autocast
        self.dtype = dtype
        """The dtype of keys, values and products."""
        self.weights = model.cache_weights()
        self.head = (embedding if model.head is None else model.head.weight).to(dtype)
        self.states = [
            block.mixer.slots(max_batch_size, device=self.device, dtype=dtype, max_seq_len=max_seq_len)
            for block in model.backbone.blocks()
        ]
        solver, stopping, criterion = slot_search_config(model, options)
        self.loops = 1 if solver is not None or stopping is None else stopping.max_iterations
        """The number of calls of the map per step: all those of a token if it is not searched."""
        self.search = SlotSearch(
            solver,
            stopping,
            slots=max_batch_size,
            width=model.spec.core_width,
            device=self.device,
            dtype=model.stream_dtype,
            moving_average=options.moving_average,
            exit=criterion,
        )
        self.lengths_S = torch.zeros(max_batch_size, dtype=torch.int64, device=self.device)
        """The number of tokens that each slot has committed."""
        self.tokens_S = torch.zeros_like(self.lengths_S)
        """The token whose solution each slot searches."""
        self.busy_S = torch.zeros(max_batch_size, dtype=torch.bool, device=self.device)
        with self.precision():
            self.ends = SlotEnds(
                model, self.weights, slots=max_batch_size, max_seq_len=max_seq_len, dtype=dtype
            )
        if state_dtype is not None:
            for states in self.every_states():
                states.set_dtype(state_dtype)
        self.fused: FusedMap | None = None
        if graphs:
            self.fused = fused_map(model, self.states, self.weights, max_seq_len=max_seq_len)
            self.ends.fuse()

    def every_states(self) -> tuple[SlotStates, ...]:
        """Return the states of all layers: prelude, core, coda."""
        return (*self.ends.prelude, *self.states, *self.ends.coda)

    def precision(self) -> torch.autocast:
        """Return the autocast mode in which the slots were created."""
        on = self._autocast is not None
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=on, cache_enabled=False)

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self.busy_S[slot] = False
        self.lengths_S[slot] = 0

    # ------------------------------------------------------------------------------------ procedures

    def places(self, what: str, size: int) -> Places:
        """Return the buffers of a procedure's slot indices and of its results."""
        key = ("step" if what == "step" else "choose", size)
        if key not in self._places:
            flags = torch.zeros(2, size, dtype=torch.bool, device=self.device)
            vocabulary = self.model.spec.vocab_size if what != "step" else 0
            precision = torch.promote_types(self.head.dtype, torch.float32)
            self._places[key] = Places(
                torch.arange(size, device=self.device),
                flags[0],
                flags[1],
                torch.zeros(size, vocabulary, device=self.device, dtype=precision),
                torch.zeros(4, size, device=self.device, dtype=torch.float64),
            )
        return self._places[key]

    def point(
        self, what: str, rows: Sequence[int], where: Sequence[bool] = (), on: Sequence[bool] = ()
    ) -> None:
        """Set the slots of the next calls of a procedure."""
        places = self.places(what, len(rows))
        put_(places.rows_R, rows)
        if what != "step":
            put_(places.where_R, where)
            put_(places.on_R, on)

    def step(self, size: int, *, commit: bool = True) -> None:
        """Call the map on the slots set by ``point``, and update their searches.

        Slots that search take a step; those whose search is ``done`` commit their token, which clears the
        flag. ``commit=False`` asserts that no slot commits. With a fixed number of loops, every step is all
        loops of a token and commits it.
        """
        places = self.places("step", size)
        name = "step" if commit else "search"
        self.do(name, size, lambda: self._step(places.rows_R, commit=commit))

    def _step(self, rows_R: Tensor, *, commit: bool) -> None:
        search = self.search
        if commit and self.fused is not None and self.fused.searches(search):
            self.fused.step(self, rows_R)
            return
        lengths = self.lengths_S[rows_R]
        if self.loops > 1:
            search.iterate(rows_R, slot_map(self, rows_R, lengths), self.loops - 1)
        busy, z_RD = self.busy_S[rows_R], search.z[rows_R]
        committing = busy & search.done[rows_R]
        f = slot_map(self, rows_R, lengths, committing if commit else None)
        fz_RD = f(z_RD)
        if search.solver is not None:
            search.take(rows_R, fz_RD, busy & ~committing, f)
        elif search.rule is not None:
            search.report(rows_R, fz_RD, self.loops)
        if commit:
            if search.rule is not None:
                fz_RD = finite_or(fz_RD, z_RD)
            core = self.ends.core_SC
            core[rows_R] = torch.where(committing[:, None], fz_RD, core[rows_R])
            self.ends.pending_S[rows_R] |= committing
            self.lengths_S[rows_R] = lengths + committing
            search.done[rows_R] &= ~committing

    def predict(self, size: int) -> None:
        """Compute the logits of the slots set by ``point``, and select the most likely tokens."""
        places = self.places("choose", size)
        self.do("predict", size, lambda: self._predict(places))

    def _predict(self, places: Places) -> None:
        rows = places.rows_R
        self.ends.finish(rows, self.lengths_S[rows], self.tokens_S[rows])
        logits = linear(self.ends.hidden_SD[rows].to(self.head.dtype), self.head)  # as ``model.predict`` does
        logits = self.model.scale_logits(at_least_float32(logits[:, : self.model.spec.vocab_size]))
        places.logits_RV.copy_(logits)
        self.take_tokens(places, places.logits_RV.argmax(-1), places.where_R)

    def take_tokens(self, places: Places, tokens_R: Tensor, where_R: Tensor) -> None:
        """Set the slots' tokens where ``where_R`` is True."""
        self.tokens_S[places.rows_R] = torch.where(where_R, tokens_R, self.tokens_S[places.rows_R])

    def begin(self, size: int) -> None:
        """Report the slots' last tokens; start the search for the new ones in slots that continue."""
        places = self.places("choose", size)
        self.do("begin", size, lambda: self._begin(places))

    def _begin(self, places: Places) -> None:
        rows, search = places.rows_R, self.search
        tokens = self.tokens_S[rows]
        report_searches(self, len(rows))
        on, ended = places.where_R & places.on_R, places.where_R & ~places.on_R
        start = self.ends.begin(tokens, rows, self.lengths_S[rows], on)
        warm = self.options.warm_start and search.rule is not None
        search.begin(rows, self.ends.core_SC[rows] if warm else start, on)
        self.busy_S[rows] &= ~ended
        self.lengths_S[rows] = self.lengths_S[rows].masked_fill(ended, 0)

    def do(self, name: str, size: int, procedure: Callable[[], None]) -> None:
        """Run a procedure, captured if graphs are."""
        if self.captured is not None and self.captured.replay(name, size):
            return  # entering autocast takes the host longer than the replay
        with self.precision():
            if self.captured is None:
                procedure()
            else:
                self.captured.do(name, size, procedure)


def slot_map(
    batch: SlotBatch,
    rows_R: Tensor,
    lengths_R: Tensor,
    committing_R: Tensor | None = None,
    weights: WeightCache | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return the map of the slots ``rows_R``, (R, D) → (R, D), with the batch's weights or with others.

    Its first call commits where ``committing_R`` is True; None: no call commits.
    """
    if batch.fused is not None and weights is None:
        return batch.fused.bind(rows_R, batch.ends, lengths_R, committing_R)
    index = None if len(rows_R) == batch.max_batch_size else rows_R

    def call(z_RD: Tensor) -> Tensor:
        nonlocal lengths_R, committing_R
        f = _bound_map(batch, rows_R, index, z_RD, lengths_R, weights)
        if committing_R is None:
            return f.compute(z_RD[:, None])[:, 0]
        mapped, after = f.commit(z_RD[:, None])
        for states, layer in zip(batch.states, after, strict=True):
            states.write(index, layer, committing_R)
        # A solver's own call may follow the call that commits, and must not undo it.
        lengths_R, committing_R = lengths_R + committing_R, None
        return mapped[:, 0]

    return call


def _bound_map(
    batch: SlotBatch,
    rows_R: Tensor,
    index_R: Tensor | None,
    z_RD: Tensor,
    lengths_R: Tensor,
    weights: WeightCache | None,
) -> BoundMap:
    model, ends = batch.model, batch.ends
    return model.backbone.bind(
        window_of_slots(model, lengths_R, batch.tokens_S[rows_R]),
        states=tuple(states.gather(index_R, lengths_R) for states in batch.states),
        start_BLD=z_RD[:, None],
        weights=batch.weights if weights is None else weights,
        u_BLU=None if ends.u_SU is None else ends.u_SU[rows_R][:, None],
        injection=model.injection,
        e_BLD=None if ends.e_SE is None else ends.e_SE[rows_R][:, None],
    )


def slot_search_config(
    model: LanguageModel, options: SearchOptions
) -> tuple[Solver | None, Stopping | None, Exit | None]:
    """Return solver, stopping rule and exit criterion of single tokens.

    Without a solver there is no search; a stopping rule then has the number of calls.

    Raises:
        ValueError: the model keeps one state per loop, or the criterion reads predictions after a coda.

    """
    solver, stopping = model.search_config(options)
    if solver is None or stopping is None or not isinstance(model, ImplicitLM):
        return None, None, None
    if model.core_loops > 1:
        raise ValueError(
            "the model keeps one state per loop, which slots do not support; use generate, or set "
            "state_policy: converged"
        )
    loops = loop_counts(model, 1, options)
    if loops is None:
        return solver, stopping, exit_of_points(model, options)
    return None, stopping.model_copy(update={"max_iterations": loops.maximum}), None


def report_searches(batch: SlotBatch, size: int) -> None:
    """Report the slots' last tokens, and the searches before them."""
    places = batch.places("choose", size)
    rows, search = places.rows_R, batch.search
    reported = (batch.tokens_S[rows], search.iterations[rows], search.residual[rows], search.converged[rows])
    for place, value in zip(places.report_4R, reported, strict=True):
        place.copy_(value)
