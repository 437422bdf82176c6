"""Layers of single tokens in a few kernels each, which ``FusedMap`` combines.

Shape legend: S slots, R rows of a step, each in a slot, D model width, U injection width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from implicit_blocks.layers import Linear, RMSNorm, SwiGLU
from implicit_blocks.mixers.attention.mixer import Attention
from implicit_blocks.mixers.attention.state import AttentionSlots
from implicit_blocks.mixers.mamba2.mixer import Mamba2
from implicit_blocks.mixers.mamba2.state import Mamba2Slots
from implicit_blocks.models.stack import Block
from implicit_blocks.ops.quantization import eight_bits
from implicit_blocks.scalings.scaling import BranchFactor

if TYPE_CHECKING:
    from implicit_blocks.ops.kernels.decoding import Branch, Mamba2Inputs
    from implicit_blocks.ops.kernels.decoding_attention import HeadNorms

FEW = 2  # up to this many rows a product row by row is faster than matrix units


@dataclass(frozen=True)
class FusedStep:
    """The inputs of a call of the map besides ``z``."""

    rows_R: Tensor
    u_SU: Tensor | None
    lengths_R: Tensor
    committing_R: Tensor


@dataclass(frozen=True)
class Matrix:
    """A linear map with cached weights; in 8 bits, for a few rows, they have one scale per output."""

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, without scales."""
        return nn.functional.linear(x, self.weight, self.bias)

    def scaled(self, scaling: nn.Module | None) -> Matrix:
        """Return the map whose outputs have the factors of a residual scaling."""
        if not isinstance(scaling, BranchFactor):
            return self
        factor = scaling.factor.detach()
        bias = None if self.bias is None else (factor * self.bias).to(self.bias.dtype)
        if self.scales is not None:
            return Matrix(self.weight, bias, factor * self.scales)
        return Matrix((factor[:, None] * self.weight).to(self.weight.dtype), bias)


class FusedLayer:
    """A residual block on the stream and the branch that is not added yet."""

    def __init__(
        self,
        block: Block,
        mixer: FusedMamba2 | FusedAttention,
        gate_up: Tensor | None,
        *,
        quantized: torch.dtype | None = None,
    ) -> None:
        assert block.mixer_norm is not None  # the layer has pre-norms
        self.norm, self.mixer = block.mixer_norm, mixer
        mixer.out_proj = mixer.out_proj.scaled(block.mixer_scaling)
        self.mlp, self.mlp_norm = None, block.mlp_norm
        if block.mlp is not None:
            self.mlp = FusedSwiGLU(block.mlp, gate_up, quantized=quantized)
            self.mlp.out = self.mlp.out.scaled(block.mlp_scaling)

    def __call__(self, z: Tensor, branch: Branch | None, step: FusedStep) -> tuple[Tensor, Branch | None]:
        """Return stream and branch after the block."""
        z, branch = self.mixer(z, branch, self.norm, step)
        if self.mlp is not None and self.mlp_norm is not None:
            return self.mlp(z, branch, self.mlp_norm)
        return z, branch


class FusedMamba2:
    """Mamba2 with its norm, on the stream and the branch that is not added yet."""

    def __init__(self, mixer: Mamba2, states: Mamba2Slots, *, quantized: torch.dtype | None = None) -> None:
        self.module, self.states = mixer, states
        self.in_proj, self.out_proj = (_cached(part, quantized) for part in (mixer.in_proj, mixer.out_proj))
        self.conv_weight = mixer.conv.weight.detach().t().contiguous()

    def inputs(self) -> Mamba2Inputs:
        """Return the parameters and buffers of the convolution and the step size."""
        from implicit_blocks.ops.kernels.decoding import Mamba2Inputs

        mixer, states = self.module, self.states
        return Mamba2Inputs(
            states.next_S, states.taps_SWC, self.conv_weight, mixer.conv.bias, mixer.dt_bias, mixer.d_inner
        )

    def __call__(
        self, z: Tensor, branch: Branch | None, norm: RMSNorm, step: FusedStep
    ) -> tuple[Tensor, Branch | None]:
        """Return stream and branch after norm and mixer."""
        from implicit_blocks.ops.kernels.decoding import Branch, add_norm, linear_rows
        from implicit_blocks.ops.kernels.decoding_mamba2 import prepare_mamba2, scan_step

        few, mixer, into = len(z) <= FEW, self.module, self.in_proj
        inputs = self.inputs()
        if few:
            assert branch is None
            prepared = linear_rows(
                z,
                into.weight,
                into.bias,
                scales_M=into.scales,
                norm_K=norm.weight,
                eps=norm.eps,
                u_SM=step.u_SU,
                rows_R=step.rows_R,
                mamba2=inputs,
                late=True,
            )
        else:
            z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=into.weight.dtype)
            prepared = prepare_mamba2(into(normed), step.u_SU, step.rows_R, inputs)
        out, gated = self.out_proj, mixer.norm
        dtype = torch.float32 if out.scales is not None else out.weight.dtype
        # The norm's divisor can be applied after the product where that cannot overflow.
        later = not few and gated.groups == 1 and out.bias is None and dtype != torch.float16
        mixed, squares = scan_step(
            prepared,
            step.rows_R,
            step.committing_R,
            self.states.h_SHPN,
            A_log_H=mixer.A_log,
            D_H=mixer.D,
            groups=mixer.spec.n_groups,
            norm_I=gated.weight if later else None,
            dtype=dtype if later else torch.float32,
        )
        if later:
            return z, Branch(out(mixed), squares, mixer.d_inner, gated.eps)
        if few and gated.groups == 1:
            return linear_rows(
                mixed, out.weight, out.bias, scales_M=out.scales, norm_K=gated.weight, eps=gated.eps, z_RM=z
            ), None
        _, normed = add_norm(mixed, None, gated.weight, eps=gated.eps, groups=gated.groups, dtype=dtype)
        if few:
            return linear_rows(normed, out.weight, out.bias, scales_M=out.scales, z_RM=z), None
        return z, Branch(out(normed))


class FusedAttention:
    """Attention with its norm, on the stream and the branch that is not added yet."""

    def __init__(
        self,
        mixer: Attention,
        states: AttentionSlots,
        tables: tuple[Tensor, Tensor],
        *,
        quantized: torch.dtype | None = None,
    ) -> None:
        self.module, self.heads, self.states, self.tables = mixer, mixer.n_heads, states, tables
        self.in_proj, self.out_proj = (_cached(part, quantized) for part in (mixer.in_proj, mixer.out_proj))

    @cached_property
    def arrivals_X(self) -> Tensor:
        """Counters of programs that have ended; created by the first call, which is never captured."""
        from implicit_blocks.ops.kernels.decoding_attention import arrivals

        return arrivals(self.states.keys.device)

    @cached_property
    def norms(self) -> HeadNorms | None:
        """The norms of queries and keys."""
        from implicit_blocks.ops.kernels.decoding_attention import HeadNorms

        mixer = self.module
        if mixer.qk_norm == "none":
            return None
        q, k = (mixer.q_norm.weight, mixer.k_norm.weight) if mixer.qk_norm == "weighted" else (None, None)
        return HeadNorms(q, k, mixer.qk_norm_eps)

    def __call__(
        self, z: Tensor, branch: Branch | None, norm: RMSNorm, step: FusedStep
    ) -> tuple[Tensor, Branch | None]:
        """Return stream and branch after norm and mixer."""
        from implicit_blocks.ops.kernels.decoding import Branch, add_norm, linear_rows
        from implicit_blocks.ops.kernels.decoding_attention import attention_step

        few = len(z) <= FEW
        into, out = self.in_proj, self.out_proj
        u = step.u_SU
        if few:
            assert branch is None
            projected = linear_rows(
                z,
                into.weight,
                into.bias,
                scales_M=into.scales,
                norm_K=norm.weight,
                eps=norm.eps,
                u_SM=u,
                rows_R=step.rows_R,
                late=True,
            )
            u = None
        else:
            z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=into.weight.dtype)
            projected = into(normed)
        y = attention_step(
            projected,
            u,
            step.rows_R,
            step.lengths_R,
            self.states.keys,
            self.states.values,
            *self.tables,
            n_heads=self.heads,
            dtype=torch.float32 if few else out.weight.dtype,
            key_scales_SKT=self.states.key_scales,
            value_scales_SKT=self.states.value_scales,
            norms=self.norms,
            arrivals_X=self.arrivals_X,
        )
        if few:
            return linear_rows(y, out.weight, out.bias, scales_M=out.scales, z_RM=z), None
        return z, Branch(out(y))


class FusedSwiGLU:
    """SwiGLU with its norm, on the stream and the branch that is not added yet."""

    def __init__(self, mlp: nn.Module, gate_up: Tensor | None, *, quantized: torch.dtype | None) -> None:
        assert isinstance(mlp, SwiGLU)
        parts = (mlp.gate_proj, mlp.up_proj, mlp.out_proj)
        self.gate, self.up, self.out = (_cached(part, quantized) for part in parts)
        self.both: Matrix | None = None  # one product for many rows
        if quantized is not None:
            return
        if gate_up is None:  # the layers prepare their weights themselves
            gate_up = torch.cat((self.gate.weight, self.up.weight))
        biases = [part.bias for part in (self.gate, self.up) if part.bias is not None]
        self.both = Matrix(gate_up, torch.cat(biases) if biases else None)

    def __call__(self, z: Tensor, branch: Branch | None, norm: RMSNorm) -> tuple[Tensor, Branch | None]:
        """Return stream and branch after norm and MLP."""
        from implicit_blocks.ops.kernels.decoding import Branch, add_norm, linear_rows, silu_product

        out = self.out
        if len(z) <= FEW:
            hidden = linear_rows(
                z,
                self.up.weight,
                self.up.bias,
                gate_MK=self.gate.weight,
                gate_bias_M=self.gate.bias,
                scales_M=self.up.scales,
                gate_scales_M=self.gate.scales,
                norm_K=norm.weight,
                eps=norm.eps,
            )
            return linear_rows(hidden, out.weight, out.bias, scales_M=out.scales, z_RM=z), None
        z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=self.up.weight.dtype)
        assert self.both is not None
        return z, Branch(out(silu_product(self.both(normed))))


def _cached(layer: nn.Module, quantized: torch.dtype | None) -> Matrix:
    assert isinstance(layer, Linear)
    weight, bias = layer.prepared() if layer.cached is None else layer.cached
    if quantized is not None:
        codes, scales = eight_bits(weight.detach(), quantized)
        return Matrix(codes.contiguous(), bias, scales)
    return Matrix(weight.detach().contiguous(), bias)
