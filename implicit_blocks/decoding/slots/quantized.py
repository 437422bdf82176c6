"""The first iterations of a token's search with weights in 8 bits; the last ones are in full precision.

For a few rows the time of a call is that of reading the weights, and an iteration far from the fixed point
does not need them in full precision: with one scale per row of a matrix, their rounding changes the map's
value by about 1 % (int8) or 3 % (``float8_e4m3fn``). A search begins with them, continues in full precision
once its residual is below ``BEGIN_FINE``, and converges and commits there, so that its solution is that of
full precision. Only calls in full precision count as converged, or as the best iterate.

Shape legend: S slots, R of them in a step, D model width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.decoding.slots.batch import SlotBatch, slot_map
from implicit_blocks.decoding.slots.fused_layers import FEW, FusedStep
from implicit_blocks.decoding.slots.fused_map import FusedMap
from implicit_blocks.decoding.slots.texts import Text
from implicit_blocks.interfaces import SearchingSolver
from implicit_blocks.layers import Linear
from implicit_blocks.ops.quantization import eight_bits
from implicit_blocks.search.state import Status
from implicit_blocks.solvers import Picard
from implicit_blocks.weights.cache import WeightCache

_LOG = logging.getLogger(__name__)

BEGIN_FINE = {torch.int8: 0.03, torch.float8_e4m3fn: 0.1}
"""Residual from which a search is in full precision: three times the rounding error of the weights."""
LEAST = 4
"""The lowest ``max_iterations`` with calls in 8 bits: up to half of them and one, before the last one."""


def quantized_search(
    batch: SlotBatch, dtype: torch.dtype | Literal["auto"] | None, *, in_flight: int | None
) -> QuantizedSearch | None:
    """Return the searches of a batch with weights in ``dtype``; None, and a line in the log, without kernels.

    Raises:
        ValueError: a dtype that is not one of 8 bits, or tokens in flight.

    """
    if dtype is None:
        return None
    if dtype == "auto":
        dtype = torch.int8
        _LOG.info("search_dtype is %s, which is faster than 8-bit floats on all GPUs measured", dtype)
    if dtype not in BEGIN_FINE:
        known = ", ".join(map(str, BEGIN_FINE))
        raise ValueError(f"search_dtype is {dtype}; choose {known}, 'auto', or None for full precision")
    if in_flight is not None and in_flight > 1:
        raise ValueError(
            f"search_dtype is {dtype} and max_in_flight {in_flight}, and such a search is of one token per "
            "text; give one of them"
        )
    why = _obstacle(batch, dtype)
    if why is not None:
        _report_once(why)
        return None
    return QuantizedSearch(batch, dtype)


def _obstacle(batch: SlotBatch, dtype: torch.dtype) -> str | None:
    """Return the reason why searches cannot use weights in 8 bits, or None."""
    search = batch.search
    if search.limits is None or search.averages is not None:
        return "no search ends by its residual"
    if isinstance(search.solver, SearchingSolver):
        return f"the solver {type(search.solver).__name__} has a stopping rule of its own"
    if batch.device.type != "cpu" and batch.fused is None:
        return "the model runs without the fused kernels of single tokens, which read them"
    if dtype.is_floating_point and batch.device.type == "cuda":
        capability = torch.cuda.get_device_capability(batch.device)
        if capability < (8, 9):
            return (
                f"{dtype} requires compute capability 8.9, and this GPU has {'.'.join(map(str, capability))}"
            )
    return None


@cache
def _report_once(reason: str) -> None:
    _LOG.warning("searches use the weights in full precision, not in 8 bits: %s", reason)


class QuantizedSearch:
    """Calls with weights in 8 bits, of slots whose searches are far from their fixed points.

    On a GPU kernels read the codes; on a CPU the weights are rounded to the values of their codes, as a
    reference that is not faster.
    """

    def __init__(self, batch: SlotBatch, dtype: torch.dtype) -> None:
        self.batch, self.begin_fine = batch, BEGIN_FINE[dtype]
        self.coarse_S = torch.zeros_like(batch.busy_S)
        """Whether the search of each slot is far from its fixed point."""
        self.calls = 0
        """The number of calls with weights in 8 bits."""
        self.fused: FusedMap | None = None
        self.weights: WeightCache | None = None
        if batch.fused is not None:
            max_seq_len = batch.ends.max_seq_len
            self.fused = FusedMap(
                batch.model, batch.states, batch.weights, max_seq_len=max_seq_len, quantized=dtype
            )
        else:
            self.weights = _rounded(batch.weights, dtype)
        self._never_S = torch.zeros_like(batch.busy_S)  # calls with weights in 8 bits commit nothing
        self._flags: AsyncHostCopy | None = None
        self._known: tuple[int, list[bool]] = (-1, [])
        self._fine: dict[int, int] = {}  # slots, and the first calls of searches that are in full precision

    def wants(self, texts: Sequence[Text | None], *, size: int) -> bool:
        """Whether the next call of the map, on ``size`` slots, is one with weights in 8 bits.

        It is if all texts have ``LEAST`` iterations and are far from their fixed points, by the last flags
        known to the host; a text whose search began later is. Otherwise the searches of all texts remain in
        full precision, so that no later call in 8 bits is the one that commits. Kernels serve ``FEW`` rows.
        """
        (known, flags), limits = self._known, self.batch.search.limits_on_host
        active = [(slot, text.begun) for slot, text in enumerate(texts) if text is not None]
        wanted = all(
            self._fine.get(slot) != begun and (begun > known or flags[slot]) and limits[slot][1] >= LEAST
            for slot, begun in active
        )
        if wanted and (self.fused is None or size <= FEW):
            return True
        if wanted:
            _report_once(f"kernels read them in calls of at most {FEW} texts")
        self._fine |= dict(active)
        return False

    def read(self, *, calls: int, wait: bool) -> None:
        """Copy the flags after call number ``calls``; read these if ``wait``, otherwise those before them."""
        before, self._flags = self._flags, AsyncHostCopy(self.coarse_S)
        if wait:
            self._known = (calls, self._flags.read())
        elif before is not None:
            self._known = (calls - 1, before.read())

    def begin(self, rows_R: Tensor, on_R: Tensor) -> None:
        """Begin new searches in the slots where ``on_R`` (R,) is True."""
        self.coarse_S[rows_R] |= on_R

    def step(self, size: int) -> None:
        """Call the map once on the slots set by ``SlotBatch.point``, none of which commits."""
        self.calls += 1
        rows_R = self.batch.places("step", size).rows_R
        self.batch.do("coarse", size, lambda: self._step(rows_R))

    @torch.no_grad()
    def _step(self, rows_R: Tensor) -> None:
        batch, search = self.batch, self.batch.search
        if self.fused is not None and FusedMap.searches(search):
            self._fused_step(self.fused, rows_R)
            return
        lengths_R, z_RD = batch.lengths_S[rows_R], search.z[rows_R]
        active_R = batch.busy_S[rows_R] & ~search.done[rows_R]
        if self.fused is not None:
            f = self.fused.bind(rows_R, batch.ends, lengths_R)
        else:
            f = slot_map(batch, rows_R, lengths_R, weights=self.weights)
        fz_RD = f(z_RD)
        assert search.rule is not None
        assert search.solver is not None
        assert search.limits is not None
        tolerance_R, most_R = (limit_S[rows_R] for limit_S in search.limits)
        scale = search.scale[rows_R, None]
        empty = torch.full_like(scale, torch.inf)
        iterations = search.iterations[rows_R]
        status = Status(empty, empty, empty, iterations[:, None], active_R[:, None], scale)
        residual_R = search.rule.residuals(status, z_RD, fz_RD)[0][:, 0]
        state = pytree.tree_map(lambda leaf: leaf[rows_R], search.state)
        further, state = search.solver.update(z_RD, fz_RD, state, f)
        finite_R = residual_R.isfinite() & further.sum(-1).isfinite()
        moves_R = active_R & finite_R
        iterations = iterations + active_R
        far_R = finite_R & (residual_R > self.begin_fine) & (residual_R > tolerance_R)
        far_R &= 2 * iterations < most_R
        further = torch.where(moves_R[:, None], further, z_RD)
        search.z[rows_R] = further
        search.best[rows_R] = torch.where(moves_R[:, None], further, search.best[rows_R])
        search.iterations[rows_R] = iterations
        self.coarse_S[rows_R] = torch.where(active_R, self.coarse_S[rows_R] & far_R, self.coarse_S[rows_R])
        # The solver's memory is of another map than the one that follows.
        anew, initial = ~self.coarse_S[rows_R] & active_R, search.solver.init(further)
        leaves = map(pytree.tree_leaves, (search.state, state, initial))
        for whole, new, start in zip(*leaves, strict=True):
            where = anew.view(-1, *[1] * (new.ndim - 1))
            whole[rows_R] = torch.where(where, start, new)

    def _fused_step(self, fused: FusedMap, rows_R: Tensor) -> None:
        """Take a step of plain Picard iteration in kernels."""
        from implicit_blocks.ops.kernels.decoding_search import take_coarse, take_up

        batch, search, ends = self.batch, self.batch.search, self.batch.ends
        solver, rule, limits = search.solver, search.rule, search.limits
        assert isinstance(solver, Picard)
        assert rule is not None
        assert limits is not None
        z_RD, lengths_R, _ = take_up(search.z, batch.lengths_S, batch.busy_S, search.done, rows_R)
        step = FusedStep(rows_R, ends.u_SU, lengths_R, self._never_S[: len(rows_R)])
        take_coarse(
            fused(z_RD, step, ends),
            rows_R,
            z_SD=search.z,
            best_SD=search.best,
            busy_S=batch.busy_S,
            done_S=search.done,
            coarse_S=self.coarse_S,
            scale_S=search.scale,
            iterations_S=search.iterations,
            damping=solver.damping,
            begin_fine=self.begin_fine,
            limits_S=limits,
            relative=rule.relative,
        )


def _rounded(weights: WeightCache, dtype: torch.dtype) -> WeightCache:
    """Return the same weights, of linear layers rounded to a type of 8 bits."""
    copy = weights.copied()
    with torch.no_grad():
        for holder, value in copy.items():
            if isinstance(holder, Linear):
                weight, _ = value
                weight.copy_(eight_bits(weight, dtype).wide(weight.dtype))
    return copy
