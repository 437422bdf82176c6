"""The map of windows of a few tokens in fused kernels, as many per layer as for single tokens.

Shape legend: S slots, R rows of a call, each in a slot; L tokens of a window, T = R · L tokens of a call, D
model width, U injection width, E width of what the injection reads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks.decoding.slots.fused_layers import (
    FusedAttention,
    FusedLayer,
    FusedMamba2,
    FusedSwiGLU,
    Matrix,
)
from implicit_blocks.decoding.slots.fused_map import FusedStack
from implicit_blocks.layers import RMSNorm

if TYPE_CHECKING:
    from implicit_blocks.ops.kernels.decoding_window import Operand

_LOG = logging.getLogger(__name__)

LONGEST = 16
"""The maximum number of tokens of a window."""

MANY = 64
"""The maximum number of tokens of a call: beyond it the layers' own matrix products are as fast."""


@dataclass(frozen=True)
class WindowStep:
    """The inputs of a call of the map on windows besides ``z``; each row commits its first tokens."""

    length: int
    rows_R: Tensor
    lengths_R: Tensor
    commits_R: Tensor
    u_TU: Tensor | None


def fused_windows(fused: FusedStack | None, *, tokens: int) -> FusedWindows | None:
    """Return the layers of windows of ``tokens`` tokens; None, and a line in the log, if it is not supported.

    Without the kernels of single tokens their reason is already in the log.
    """
    if fused is None:
        return None
    dtype = fused.layers[0].mixer.in_proj.weight.dtype
    why = windows_obstacle(fused, tokens=tokens, dtype=dtype)
    if why is not None:
        _LOG.info("calls on tokens in flight compute layer by layer, without fused kernels: %s", why)
        return None
    return FusedWindows(fused, dtype)


def windows_obstacle(fused: FusedStack, *, tokens: int, dtype: torch.dtype) -> str | None:
    """Return the reason why fused kernels do not support windows, or None."""
    if tokens > LONGEST:
        return f"windows have {tokens} tokens, more than {LONGEST}"
    if dtype == torch.float16:
        return "products of float16 could overflow before their norm"
    for layer in fused.layers:
        if isinstance(layer.mixer, FusedAttention):
            states = layer.mixer.states
            if states.key_scales is not None:
                return "keys are stored in 8 bits"
            if states.keys.shape[-1] < 16:
                return f"heads have {states.keys.shape[-1]} features, fewer than 16"
        elif (least := min(layer.mixer.states.h_SHPN.shape[2:])) < 16:
            return f"heads have {least} features or states, fewer than 16"
    return None


class FusedWindows:
    """``f(z)`` of a window in each slot; the states of committed tokens are replaced in place.

    Args:
        fused: the layers, with weights in full precision.
        dtype: of the inputs of products, that of the weights.

    """

    def __init__(self, fused: FusedStack, dtype: torch.dtype) -> None:
        self.fused, self.dtype = fused, dtype

    def __call__(self, z_TD: Tensor, step: WindowStep, e_TE: Tensor | None) -> Tensor:
        """Return ``f(z)`` of all tokens, row by row."""
        injection = self.fused.injection
        if injection is None:
            return self._core(z_TD, step)
        with self.fused.weights.activate():
            entered = injection.enter(z_TD, e_TE)
            return injection.leave(self._core(entered, step), z_TD, entered, e_TE)

    def _core(self, z_TD: Tensor, step: WindowStep) -> Tensor:
        from implicit_blocks.ops.kernels.decoding import add_norm
        from implicit_blocks.ops.kernels.decoding_window import Operand

        first, norm = self.fused.layers[0].norm, self.fused.norm
        z_TD = z_TD.contiguous()
        _, normed = add_norm(z_TD, None, first.weight, eps=first.eps, dtype=self.dtype)
        z_TD = self.stream(z_TD, Operand(normed), step)
        if norm is None:
            return z_TD
        return add_norm(z_TD, None, norm.weight, eps=norm.eps, dtype=z_TD.dtype)[1]

    def stream(self, z_TD: Tensor, x: Operand | None, step: WindowStep) -> Tensor:
        """Return the residual stream after all layers; ``x`` is z after the norm of the first one."""
        layers = self.fused.layers
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            assert x is not None
            z_TD, x = self._layer(layer, z_TD, x, None if following is None else following.norm, step)
        return z_TD

    def _layer(
        self, layer: FusedLayer, z: Tensor, x: Operand, after: RMSNorm | None, step: WindowStep
    ) -> tuple[Tensor, Operand | None]:
        """Return the stream after a layer, and the operand of the next one."""
        mixer = layer.mixer
        mixed = (
            self._mamba2(mixer, x, step) if isinstance(mixer, FusedMamba2) else self._attend(mixer, x, step)
        )
        if layer.mlp is None or layer.mlp_norm is None:
            return _added(mixer.out_proj, mixed, z, after, step)
        z, inner = _added(mixer.out_proj, mixed, z, layer.mlp_norm, step)
        assert inner is not None
        return _added(layer.mlp.out, self._hidden(layer.mlp, inner, step), z, after, step)

    def _attend(self, mixer: FusedAttention, x: Operand, step: WindowStep) -> Operand:
        from implicit_blocks.ops.kernels.decoding_window import Operand, linear_window
        from implicit_blocks.ops.kernels.decoding_window_attention import attention_window

        into = mixer.in_proj
        projected, _ = linear_window(x, into.weight, into.bias, length=step.length, u_TM=step.u_TU, late=True)
        y = attention_window(
            projected,
            step.rows_R,
            step.lengths_R,
            mixer.states.keys,
            mixer.states.values,
            *mixer.tables,
            length=step.length,
            n_heads=mixer.heads,
            dtype=self.dtype,
            norms=mixer.norms,
            arrivals_X=mixer.arrivals_X,
        )
        return Operand(y)

    def _mamba2(self, fused: FusedMamba2, x: Operand, step: WindowStep) -> Operand:
        from implicit_blocks.ops.kernels.decoding import add_norm
        from implicit_blocks.ops.kernels.decoding_window import Operand, WindowConv, linear_window
        from implicit_blocks.ops.kernels.decoding_window_scan import scan_window

        mixer, into, inputs = fused.module, fused.in_proj, fused.inputs()
        tokens, channels = len(x.value_TK), inputs.taps_SWC.shape[2]
        conv = WindowConv(inputs, step.rows_R, inputs.taps_SWC.new_empty(tokens, channels))
        prepared, _ = linear_window(
            x, into.weight, into.bias, length=step.length, u_TM=step.u_TU, conv=conv, late=True
        )
        gated = mixer.norm
        whole = gated.groups == 1
        y = scan_window(
            prepared,
            step.rows_R,
            step.commits_R,
            fused.states.h_SHPN,
            conv,
            length=step.length,
            A_log_H=mixer.A_log,
            D_H=mixer.D,
            groups=mixer.spec.n_groups,
            norm_I=gated.weight if whole else None,
            norm_eps=gated.eps,
            dtype=self.dtype if whole else torch.float32,
        )
        if whole:
            return y
        _, normed = add_norm(
            y.value_TK, None, gated.weight, eps=gated.eps, groups=gated.groups, dtype=self.dtype
        )
        return Operand(normed)

    def _hidden(self, mlp: FusedSwiGLU, x: Operand, step: WindowStep) -> Operand:
        from implicit_blocks.ops.kernels.decoding_window import Operand, linear_window

        hidden, _ = linear_window(
            x,
            mlp.up.weight,
            mlp.up.bias,
            length=step.length,
            gate_MK=mlp.gate.weight,
            gate_bias_M=mlp.gate.bias,
            dtype=self.dtype,
        )
        return Operand(hidden)


def _added(
    out: Matrix, x: Operand, z: Tensor, after: RMSNorm | None, step: WindowStep
) -> tuple[Tensor, Operand | None]:
    """Return the stream with the product added, and the operand of the next product, after its norm."""
    from implicit_blocks.ops.kernels.decoding_window import linear_window

    return linear_window(
        x,
        out.weight,
        out.bias,
        length=step.length,
        z_TM=z,
        next_norm_M=None if after is None else after.weight,
        next_eps=0.0 if after is None else after.eps,
    )
