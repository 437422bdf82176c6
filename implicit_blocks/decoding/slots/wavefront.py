"""Wavefront decoding: the successors of a token start before its search has ended.

A token's iterate predicts its successor, which starts at once as a *provisional* token; all tokens in flight
of a slot share each call of the map, as a window after the committed tokens. Causality makes a token
independent of its successors. When its prediction changes, its successor begins anew with the new token, and
the tokens after that are dropped.

A token is solved once its residual and those of the tokens in flight before it are within the tolerance in
two successive calls. The second one corresponds to the committing call of sequential decoding: its value
predicts the next token for good, and the next call commits the state at it. (A prediction from the first
one's value has the error of one iteration less, so that texts differed more often from sequential decoding.
The second call is at the solver's next point: at the first one's value, as in sequential decoding, a damped
search can leave the tolerance again, and took 7.6 instead of 4.4 calls per token.)

A token that misses the tolerance, or diverges, is committed as in sequential decoding: as the head of its
window, whose context is committed, it gets ``max_iterations`` calls; if it did not begin as the head, it then
begins anew, and its second search is the sequential one.

All tensors have fixed addresses and ``call`` and ``decide`` read no value from the device where they are
captured: every window then has W tokens, of which the last ones may be idle.

Shape legend: S slots, R of them in a call, W tokens in flight, L ≤ W tokens of a call, D model width, C core
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.decoding.slots.flight import Flight
from implicit_blocks.decoding.slots.fused_flight import fused_flight
from implicit_blocks.decoding.slots.fused_windows import MANY, WindowStep, fused_windows
from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.parts import OutputMap, scaled
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.ops.noise import keys_at
from implicit_blocks.search.state import Status, deciding_residual
from implicit_blocks.solution import SMALLEST_SCALE, finite_or
from implicit_blocks.windows import Window


class Inputs(NamedTuple):
    """What the core of a window reads: embedded tokens, the prelude's output, and what is injected."""

    x_RLD: Tensor
    c_RLD: Tensor
    u_RLU: Tensor | None
    e_RLE: Tensor | None


class Results(NamedTuple):
    """The results of a call, for R slots; only the first L tokens of a window have any."""

    value: Tensor
    """(R, W, C): the map's values."""
    following: Tensor
    """(R, W, C): the solver's next points."""
    logits: Tensor
    """(R, W, V): predictions of the tokens after those of the window."""
    chosen: Tensor
    """(R, W) int64: the tokens chosen from them."""
    report: Tensor
    """(5, R, W) float64: solved in this call, chosen token, iterations, residual, converged."""


Procedure = Callable[[Tensor, Results], None]


class Wavefront:
    """The tokens in flight of all slots of a batch; ``ContinuousDecoder`` schedules its calls.

    Args:
        batch: the slots, whose mixers serve windows, with room for W − 1 more tokens than texts can have.
        tokens: W, the maximum number of tokens in flight per slot, which ``resize`` changes.

    """

    def __init__(self, batch: SlotBatch, *, tokens: int) -> None:
        solver = batch.search.solver
        assert solver is not None
        self.batch, self.tokens, self.solver = batch, tokens, solver
        self.flight = Flight.empty(solver, tokens=tokens, like_SC=batch.search.z)
        self._flights = {tokens: self.flight}
        self.count_S = torch.zeros_like(batch.lengths_S)
        """The number of tokens in flight of each slot."""
        self.limit_S = torch.zeros_like(batch.lengths_S)
        """The number of tokens that each slot commits at most."""
        self.prompt_S = torch.zeros_like(batch.lengths_S)
        """The length of each slot's prompt."""
        self.seed_S = torch.zeros_like(batch.lengths_S)
        self.counts_3 = torch.zeros(3, device=batch.device, dtype=torch.int64)
        """Tokens in flight and windows, summed over all calls, and tokens that began anew."""
        self.fused = fused_windows(batch.fused, tokens=tokens)
        """The map in fused kernels; None: the layers' own operators."""
        self.whole = fused_flight(self, self.fused)
        """Whole calls in kernels, for some searches; None: plain operators surround the map."""
        self._results: dict[int, Results] = {}
        self._inputs: tuple[list[int], Inputs] | None = None

    def resize(self, tokens: int) -> None:
        """Set W, to at most that of the constructor; a lower W requires ``drain``.

        Calls on one number of slots always have the same W, with which they are captured.
        """
        if tokens not in self._flights:
            self._flights[tokens] = Flight.empty(self.solver, tokens=tokens, like_SC=self.batch.search.z)
        if tokens != self.tokens:
            self._flights[tokens].put(None, self.flight.take(None, tokens))
            self.flight, self.tokens = self._flights[tokens], tokens

    # ------------------------------------------------------------------------------------ texts

    def enter(self, slot: int, *, prompt: int, count: int, seed: int) -> None:
        """Prepare a slot for ``count`` new tokens after its prompt; the last one is not committed."""
        self.prompt_S[slot], self.limit_S[slot], self.seed_S[slot] = prompt, prompt + count - 1, seed
        self.leave(slot)

    def begin(self, rows_R: Tensor, where_R: Tensor, on_R: Tensor) -> None:
        """Begin with the chosen tokens of the slots where ``where_R`` and ``on_R``, (R,), are True.

        The batch searches no tokens in the slots where ``where_R`` is True.
        """
        self.batch.busy_S[rows_R] &= ~where_R
        on = where_R & on_R & (self.batch.lengths_S[rows_R] < self.limit_S[rows_R])
        first = self.flight.tokens[:, 0]
        first[rows_R] = torch.where(on, self.batch.tokens_S[rows_R], first[rows_R])
        self.flight.fresh[rows_R, 0] |= on
        self.count_S[rows_R] = torch.where(on, 1, self.count_S[rows_R])
        self._inputs = None

    def leave(self, slot: int) -> None:
        """Drop the tokens of a slot."""
        self.count_S[slot] = 0
        self.flight.done[slot] = False
        self.flight.fresh[slot] = False
        self._inputs = None

    def results(self, size: int) -> Results:
        """Return the buffers of a call's results."""
        if size not in self._results:
            batch, shape = self.batch, (size, self.tokens)
            points = batch.search.z.new_zeros(*shape, batch.search.z.shape[1])
            precision = torch.promote_types(batch.head.dtype, torch.float32)
            self._results[size] = Results(
                points,
                points.clone(),
                points.new_zeros(*shape, batch.model.spec.vocab_size, dtype=precision),
                points.new_zeros(shape, dtype=torch.int64),
                points.new_zeros(5, *shape, dtype=torch.float64),
            )
        return self._results[size]

    # ------------------------------------------------------------------------------------ procedures

    def call(self, size: int) -> None:
        """Call the map once on the windows of the slots set by ``batch.point("step", …)``.

        Commits the first tokens that are done, and chooses the most likely tokens.
        """
        rows_R, results = self.batch.places("step", size).rows_R, self.results(size)
        call, _ = self._procedures(size)
        self.batch.do("wave", size, lambda: call(rows_R, results))

    def keys(self, rows_R: Tensor) -> Tensor:
        """Return the keys of the noise of the chosen tokens, (R, W)."""
        first = self.batch.lengths_S[rows_R] + 1 - self.prompt_S[rows_R]
        numbers = first[:, None] + torch.arange(self.tokens, device=first.device)
        return keys_at(self.seed_S[rows_R, None], numbers)

    def decide(self, size: int) -> None:
        """Decide which tokens are solved, begin anew, begin or continue, given the chosen tokens."""
        rows_R, results = self.batch.places("step", size).rows_R, self.results(size)
        _, decide = self._procedures(size)
        self.batch.do("decide", size, lambda: decide(rows_R, results))

    def advance(self, size: int) -> None:
        """Call the map and decide, given the most likely tokens."""
        rows_R, results = self.batch.places("step", size).rows_R, self.results(size)
        call, decide = self._procedures(size)

        def both() -> None:
            call(rows_R, results)
            decide(rows_R, results)

        self.batch.do("advance", size, both)

    def _procedures(self, size: int) -> tuple[Procedure, Procedure]:
        """Return what calls the map and what decides, in kernels where whole calls are."""
        whole, tokens = self.whole, size * self.tokens
        if whole is not None and self.batch.fused is not None and tokens <= MANY:
            return whole.call, whole.decide
        return self._call, lambda rows_R, results: _decide(self, rows_R, results)

    def _width(self, rows_R: Tensor) -> int:
        """Return the number of tokens of a call: all W if captured, else those in flight."""
        if self.batch.captured is not None:
            return self.tokens
        return max(1, int(self.count_S[rows_R].max()))

    def _index(self, rows_R: Tensor) -> Tensor | None:
        return None if len(rows_R) == self.batch.max_batch_size else rows_R

    @torch.no_grad()
    def _call(self, rows_R: Tensor, results: Results) -> None:
        batch, length, index = self.batch, self._width(rows_R), self._index(rows_R)
        flight, lengths = self.flight.take(index, length), batch.lengths_S[rows_R]
        order, commits = torch.arange(length, device=batch.device), flight.done.sum(1)
        window = _window(batch, lengths, flight.tokens)
        known = torch.ones_like(lengths, dtype=torch.bool)[:, None]
        prefix = replace(window, valid_BT=torch.cat((known, flight.done), 1), gaps=False, shared={})
        inputs = self._read(rows_R, window, prefix, flight, commits)
        begun = _begun(self, flight, inputs, window, order == commits[:, None])
        z_RLC = begun.z
        fz_RLC = self._mapped(z_RLC, rows_R, window, prefix, inputs, commits)
        value_RLC = finite_or(fz_RLC, z_RLC)
        rule = batch.search.rule
        assert rule is not None
        lowest = begun.lowest[..., None]  # the rule reads its type alone
        status = Status(lowest, lowest, lowest, lowest, lowest, begun.scale[..., None])
        residual, status = rule.residuals(status, z_RLC, fz_RLC)
        further, state = _propose(
            self, begun, fz_RLC, lambda z: _core(batch, window, inputs, z, index).compute(z)
        )
        self.flight.put(
            index,
            begun._replace(
                iterations=begun.iterations + ~begun.done,
                residual=residual[..., 0],
                scale=status.scale[..., 0],
                solver=state,
            ),
        )
        hidden = _finish(self, value_RLC, rows_R, window, prefix, inputs, commits)
        results.value[:, :length] = value_RLC
        results.following[:, :length] = further
        logits = linear(hidden.to(batch.head.dtype), batch.head)[..., : results.logits.shape[-1]]
        results.logits[:, :length] = batch.model.scale_logits(at_least_float32(logits))
        torch.argmax(results.logits, -1, out=results.chosen)

    def _mapped(
        self, z_RLC: Tensor, rows_R: Tensor, window: Window, prefix: Window, inputs: Inputs, commits_R: Tensor
    ) -> Tensor:
        """Return the map's values, and commit the first tokens of each row to the core's states."""
        batch, index = self.batch, self._index(rows_R)
        if self.fused is not None and batch.fused is not None and len(z_RLC.flatten(0, 1)) <= MANY:
            u_TU, e_TE = (
                None if given is None else given.flatten(0, 1).contiguous()
                for given in (inputs.u_RLU, inputs.e_RLE)
            )
            lengths_R = window.positions_BL[:, 0].contiguous()
            step = WindowStep(window.length, rows_R, lengths_R, commits_R, u_TU)
            return self.fused(z_RLC.flatten(0, 1), step, e_TE).view_as(z_RLC)
        fz_RLC, after = _core(batch, window, inputs, z_RLC, index).commit(z_RLC, prefix)
        for states, layer in zip(batch.states, after, strict=True):
            states.write(index, layer, commits_R > 0)
        return fz_RLC

    def _read(
        self, rows_R: Tensor, window: Window, prefix: Window, flight: Flight, commits_R: Tensor
    ) -> Inputs:
        """Return the inputs of the core; run the prelude, and commit its first tokens.

        Where nothing is captured they are those of the last call, unless a token began or was committed.
        """
        batch = self.batch
        model, eager = batch.model, batch.captured is None
        changed = flight.fresh | flight.done
        if eager and self._inputs is not None and not bool(changed.any()):
            rows, inputs = self._inputs
            if rows == rows_R.tolist() and inputs.x_RLD.shape[1] == window.length:
                return inputs
        x_RLD = scaled(model.embedding(flight.tokens), model.spec.embedding_scale)
        c_RLD, index = x_RLD, self._index(rows_R)
        if model.prelude is not None:
            stream = x_RLD.to(model.stream_dtype)
            c_RLD = batch.ends.commit("prelude", stream, index, window, commits_R > 0, prefix)
        if model.prelude_norm is not None:
            c_RLD = model.prelude_norm(c_RLD)
        inputs = Inputs(x_RLD, c_RLD, *model.inject(c_RLD, batch.weights))
        if eager:  # the windows move on after a commit
            self._inputs = None if bool(flight.done.any()) else (rows_R.tolist(), inputs)
        return inputs


def _finish(
    wavefront: Wavefront,
    value_RLC: Tensor,
    rows_R: Tensor,
    window: Window,
    prefix: Window,
    inputs: Inputs,
    commits_R: Tensor,
) -> Tensor:
    """Return the head's input at the map's values; the coda commits the first tokens."""
    model = wavefront.batch.model
    output = OutputMap.of(model, inputs.c_RLD)
    h_RLD = output.enter(value_RLC)
    if model.coda is not None:
        index = wavefront._index(rows_R)
        h_RLD = wavefront.batch.ends.commit("coda", h_RLD, index, window, commits_R > 0, prefix)
    return output.leave(h_RLD)


def _begun(wavefront: Wavefront, flight: Flight, inputs: Inputs, window: Window, head_RL: Tensor) -> Flight:
    """Return the windows with fresh tokens at their start, and the head's calls counted."""
    model, fresh = wavefront.batch.model, flight.fresh
    start = model.initial_point(inputs.x_RLD, inputs.c_RLD, window.positions_BL).to(flight.z.dtype)
    z_RLC = torch.where(fresh[..., None], start, flight.z)
    begins_as_head = head_RL & (fresh | (flight.as_head == 0))
    initial = wavefront.solver.init(start.flatten(0, 1))
    state = pytree.tree_map(
        lambda new, old: torch.where(_like(fresh, old), new.unflatten(0, fresh.shape), old),
        initial,
        flight.solver,
    )
    return flight._replace(
        z=z_RLC,
        best=torch.where(begins_as_head[..., None], z_RLC, flight.best),
        lowest=flight.lowest.masked_fill(begins_as_head, torch.inf),
        scale=flight.scale.masked_fill(fresh, SMALLEST_SCALE),
        iterations=flight.iterations.masked_fill(fresh, 0),
        as_head=flight.as_head.masked_fill(fresh, 0) + head_RL,
        clean=torch.where(fresh, head_RL, flight.clean),
        within=flight.within.masked_fill(fresh, torch.inf),
        fresh=torch.zeros_like(fresh),
        solver=state,
    )


def _like(mask_RL: Tensor, whole: Tensor) -> Tensor:
    return mask_RL.view(*mask_RL.shape, *[1] * (whole.ndim - 2))


def _window(batch: SlotBatch, lengths_R: Tensor, tokens_RL: Tensor) -> Window:
    """Return the window of the tokens in flight, after ``lengths_R`` tokens of each slot."""
    model = batch.model
    order = torch.arange(tokens_RL.shape[1], device=batch.device)
    return Window(
        batch_size=len(lengths_R),
        start=1,  # at least; the states hold the length of each slot
        length=tokens_RL.shape[1],
        positions_BL=lengths_R[:, None] + order,
        dtype=model.stream_dtype,
        ids_BL=tokens_RL if model.needs_token_ids else None,
    )


def _core(batch: SlotBatch, window: Window, inputs: Inputs, z_RLC: Tensor, index: Tensor | None) -> BoundMap:
    """Return the map of the core in the window."""
    model = batch.model
    lengths_R = window.positions_BL[:, 0]
    return model.backbone.bind(
        window,
        states=tuple(states.gather(index, lengths_R) for states in batch.states),
        start_BLD=z_RLC,
        weights=batch.weights,
        u_BLU=inputs.u_RLU,
        injection=model.injection,
        e_BLD=inputs.e_RLE,
    )


def _propose(
    wavefront: Wavefront, flight: Flight, fz_RLC: Tensor, f: Callable[[Tensor], Tensor]
) -> tuple[Tensor, object]:
    """Return the solver's next points, (R, L, C), and its state."""
    shape = fz_RLC.shape

    def call(z_EC: Tensor) -> Tensor:
        return f(z_EC.view(shape)).flatten(0, 1)

    state = pytree.tree_map(lambda leaf: leaf.flatten(0, 1), flight.solver)
    further, state = wavefront.solver.update(flight.z.flatten(0, 1), fz_RLC.flatten(0, 1), state, call)
    return further.view(shape), pytree.tree_map(lambda leaf: leaf.unflatten(0, shape[:2]), state)


@torch.no_grad()
def _decide(wavefront: Wavefront, rows_R: Tensor, results: Results) -> None:
    batch, tokens, index = wavefront.batch, wavefront.tokens, wavefront._index(rows_R)
    rule, limits = batch.search.rule, batch.search.limits
    assert rule is not None
    assert limits is not None
    flight, count = wavefront.flight.take(index, tokens), wavefront.count_S[rows_R]
    tolerance_R1, most_R1 = (limit_S[rows_R, None] for limit_S in limits)
    order = torch.arange(tokens, device=batch.device)
    flying, done = order < count[:, None], flight.done
    commits = done.sum(1)
    head = (order == commits[:, None]) & flying
    finite = flight.residual.isfinite()
    # A successor that is in flight stays so if its own token is still the one chosen, and finite.
    own = flight.residual.masked_fill(done, 0.0)
    chosen = torch.where(done & flight.converged, flight.next, results.chosen)
    before = torch.cat((chosen[:, :1], chosen[:, :-1]), 1)
    stays = ((flight.tokens == before) & (finite | head | done)) | (order == 0)
    stays = stays & ((order <= commits[:, None]) | ~(head & ~finite).any(1, keepdim=True))
    stays = (stays & flying).cumprod(1).bool()
    end = stays.sum(1)  # the number of tokens that stay in flight
    within = stays & ~done & (deciding_residual(own) <= tolerance_R1)
    solved = within & (flight.within < torch.inf)
    # The head decides as in sequential decoding.
    status = Status(flight.lowest, flight.lowest, flight.lowest, flight.iterations, head, flight.scale)
    (_, lowest, *_), improved, _ = rule.update(status, flight.residual)
    best = torch.where(improved[..., None], results.value, flight.best)
    stops = head & stays & ~solved & (~finite | ((flight.as_head >= most_R1) & ~within))
    given_up, again = stops & flight.clean, stops & ~flight.clean
    z = torch.where((stays & ~done)[..., None], results.following, flight.z)
    z = torch.where(solved[..., None], results.value, z)
    z = torch.where(given_up[..., None], best, z)
    z = finite_or(z, flight.z)
    reported = solved | (done & ~flight.converged)
    for place, value in zip(
        results.report,
        (
            reported,
            chosen,
            flight.iterations - (~done).long(),  # without the second call within the tolerance
            torch.where(done, lowest, flight.within),
            ~done | (lowest <= tolerance_R1),
        ),
        strict=True,
    ):
        place.copy_(value)
    flight = flight._replace(
        z=z,
        best=best,
        lowest=lowest,
        next=chosen,
        fresh=again,
        within=flight.residual.masked_fill(~within, torch.inf),
        done=solved | given_up,
        converged=solved,
    )
    _advance(wavefront, rows_R, index, flight, chosen, commits=commits, end=end, count=count, finite=finite)


def _advance(
    wavefront: Wavefront,
    rows_R: Tensor,
    index: Tensor | None,
    flight: Flight,
    chosen: Tensor,
    *,
    commits: Tensor,
    end: Tensor,
    count: Tensor,
    finite: Tensor,
) -> None:
    """Move the windows past the committed tokens, and begin one token after those that stay."""
    batch, tokens = wavefront.batch, wavefront.tokens
    order = torch.arange(tokens, device=batch.device)
    lengths = batch.lengths_S[rows_R]
    last = (end - 1).clamp(min=0)[:, None]
    usable = (finite | flight.done | (order < commits[:, None])).gather(1, last)[:, 0]
    begins = (count > 0) & (end - commits < tokens) & (lengths + end < wavefront.limit_S[rows_R]) & usable
    token = chosen.gather(1, last)
    if batch.captured is not None or bool(commits.any()):
        flight = flight.shifted(commits)
    place = (end - commits)[:, None]
    fresh = (order == place) & begins[:, None]
    within = order < place
    again_R = (flight.fresh & within).any(1)
    flight = flight._replace(
        tokens=torch.where(fresh, token, flight.tokens),
        z=flight.z.masked_fill(~within[..., None], 0.0),
        fresh=(flight.fresh & within) | fresh,
        done=flight.done & within,
    )
    wavefront.flight.put(index, flight)
    wavefront.count_S[rows_R] = end - commits + begins
    batch.lengths_S[rows_R] = lengths + commits
    anew = ((end < count) & begins).sum() + again_R.sum()
    wavefront.counts_3 += torch.stack((count.sum(), (count > 0).sum(), anew))
