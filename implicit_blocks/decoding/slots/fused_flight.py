"""Calls on tokens in flight in a few kernels around prelude, map and coda, for Picard iteration.

Shape legend: R rows of a call, each in a slot; W tokens in flight, T = R · W tokens of a call, row by row; D
model width, U injection width, E width of what the injection reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from implicit_blocks.decoding.slots.fused_layers import Matrix
from implicit_blocks.decoding.slots.fused_map import FusedMap
from implicit_blocks.decoding.slots.fused_windows import FusedWindows, WindowStep, fused_windows
from implicit_blocks.injections.projection import Projection
from implicit_blocks.layers import Linear, RMSNorm
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.parts import OutputMap, scaled
from implicit_blocks.solvers import Picard

if TYPE_CHECKING:
    from implicit_blocks.decoding.slots.wavefront import Results, Wavefront
    from implicit_blocks.ops.kernels.decoding_wavefront import Windows


def fused_flight(wavefront: Wavefront, fused: FusedWindows | None) -> FusedFlight | None:
    """Return the calls in kernels, or None where plain operators surround the map."""
    batch = wavefront.batch
    model = batch.model
    if fused is None or not isinstance(model, ImplicitLM) or not FusedMap.searches(batch.search):
        return None
    ends = (batch.ends.fused_prelude, batch.ends.fused_coda)
    prelude, coda = (fused_windows(stack, tokens=wavefront.tokens) for stack in ends)
    layer_by_layer = (model.prelude, prelude), (model.coda, coda)
    if any(stack is not None and kernels is None for stack, kernels in layer_by_layer):
        return None
    if model.spec.core_width != model.spec.d_model:
        return None
    return FusedFlight(wavefront, fused, prelude=prelude, coda=coda)


class FusedFlight:
    """The calls of a ``Wavefront`` whose search is a plain Picard iteration."""

    def __init__(
        self,
        wavefront: Wavefront,
        fused: FusedWindows,
        *,
        prelude: FusedWindows | None,
        coda: FusedWindows | None,
    ) -> None:
        self.wavefront, self.fused, self.prelude, self.coda = wavefront, fused, prelude, coda
        self.norm: RMSNorm | None = None
        """The norm of embedded tokens, where one product of its value is all that is injected."""
        self.matrix: Matrix | None = None
        """That product."""
        model, weights = wavefront.batch.model, wavefront.batch.weights
        injection = model.injection
        begins = model.prelude is not None or model.prelude_norm is not None or model.start is not None
        if begins or type(injection) is not Projection or not isinstance(injection.proj, Linear):
            return
        with weights.activate():
            weight, bias = injection.proj.current()
        if weight.dtype == fused.dtype and type(model.embedding) is nn.Embedding:
            self.norm, self.matrix = injection.norm, Matrix(weight.detach().contiguous(), bias)

    def call(self, rows_R: Tensor, results: Results) -> None:
        """Call the map on all windows; see ``Wavefront.call``."""
        from implicit_blocks.ops.kernels.decoding_wavefront import (
            Entry,
            begin_tokens,
            choose_tokens,
            take_values,
        )
        from implicit_blocks.ops.kernels.decoding_window import Operand, linear_window

        batch, windows, fused = self.wavefront.batch, self._windows(), self.fused
        model, solver, stopping = batch.model, batch.search.solver, batch.search.stopping
        assert isinstance(solver, Picard)
        assert stopping is not None
        tokens, first = self.wavefront.tokens, fused.fused.layers[0].norm
        norm = self.norm or first
        entry = Entry(
            model.embedding.weight,
            model.spec.embedding_scale,
            norm.weight,
            norm.eps,
            first.weight,
            first.eps,
            fused.dtype,
        )
        last = c_TD = u_TU = None
        if self.matrix is not None:
            begun = begin_tokens(windows, rows_R, entry)
            last, weight, bias = fused.fused.norm, self.matrix.weight, self.matrix.bias
            u_TU, _ = linear_window(Operand(begun.x_TD), weight, bias, length=tokens, dtype=fused.dtype)
            step = WindowStep(tokens, rows_R, begun.lengths_R, begun.commits_R, u_TU)
            fz_TD = fused.stream(begun.z_TD, Operand(begun.first_TD), step)
        else:
            start_TD, u_TU, e_TE, c_TD = self._inputs(rows_R)
            begun = begin_tokens(windows, rows_R, entry, start_TD)
            step = WindowStep(tokens, rows_R, begun.lengths_R, begun.commits_R, u_TU)
            fz_TD = fused(begun.z_TD, step, e_TE)
        hidden = take_values(
            windows,
            rows_R,
            fz_TD,
            norm_D=None if last is None else last.weight,
            eps=0.0 if last is None else last.eps,
            value_TD=results.value,
            following_TD=results.following,
            damping=solver.damping,
            relative=stopping.norm == "relative",
            dtype=batch.head.dtype if batch.ends.plain else fz_TD.dtype,
        )
        if not batch.ends.plain:
            output = OutputMap.of(model, c_TD)
            h_TD = output.enter(hidden)
            if self.coda is not None:
                h_TD = self.coda(h_TD, replace(step, u_TU=None), None)
            hidden = output.leave(h_TD).to(batch.head.dtype)
        logits = results.logits.flatten(0, 1)
        head = batch.head[: logits.shape[-1]]
        linear_window(Operand(hidden), head, length=tokens, rounded=True, out_TM=logits)
        if model.spec.logit_scale != 1 or model.spec.logit_softcap is not None:
            results.logits.copy_(model.scale_logits(results.logits))
        choose_tokens(logits, results.chosen)

    def decide(self, rows_R: Tensor, results: Results) -> None:
        """Decide on all tokens; see ``Wavefront.decide``."""
        from implicit_blocks.ops.kernels.decoding_wavefront import decide_tokens

        limits = self.wavefront.batch.search.limits
        assert limits is not None
        decide_tokens(
            self._windows(),
            rows_R,
            value_RWD=results.value,
            following_RWD=results.following,
            chosen_RW=results.chosen,
            report_5RW=results.report,
            counts_3=self.wavefront.counts_3,
            limits_S=limits,
        )

    def _windows(self) -> Windows:
        from implicit_blocks.ops.kernels.decoding_wavefront import Windows

        wavefront = self.wavefront
        fields = {name: value for name, value in wavefront.flight._asdict().items() if name != "solver"}
        return Windows(
            **fields,
            count_S=wavefront.count_S,
            lengths_S=wavefront.batch.lengths_S,
            limit_S=wavefront.limit_S,
        )

    def _inputs(self, rows_R: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Return the points' start, what is injected, (T, U) and (T, E), and the prelude's output.

        The prelude commits its first tokens.
        """
        batch, flight, tokens = self.wavefront.batch, self.wavefront.flight, self.wavefront.tokens
        model, lengths_R = batch.model, batch.lengths_S[rows_R]
        assert isinstance(model, ImplicitLM)
        x_RWD = scaled(model.embedding(flight.tokens[rows_R]), model.spec.embedding_scale)
        c_RWD = x_RWD
        if self.prelude is not None:
            stream = x_RWD.to(model.stream_dtype)
            step = WindowStep(tokens, rows_R, lengths_R, flight.done[rows_R].sum(1), None)
            c_RWD = self.prelude(stream.flatten(0, 1), step, None).view_as(stream)
        if model.prelude_norm is not None:
            c_RWD = model.prelude_norm(c_RWD)
        start = None
        if model.start is not None:
            positions_RW = lengths_R[:, None] + torch.arange(tokens, device=batch.device)
            start = model.initial_point(x_RWD, c_RWD, positions_RW)
        u, e = model.inject(c_RWD, batch.weights)
        start_TD, u_TU, e_TE = (
            None if each is None else each.flatten(0, 1).contiguous() for each in (start, u, e)
        )
        return start_TD, u_TU, e_TE, c_RWD.flatten(0, 1)
