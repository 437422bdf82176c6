"""All of Mamba2 between its projections as one operator: convolution, scan, gated norm, and their gradients.

For windows that begin their sequences, without padding or documents, in 16-bit precision on a GPU. The plain
operators of ``mixers/mamba2.py`` are the oracle.

Shapes: B batch, L tokens, U projection width = 2I + 2GN + H, I inner width = H · P, H heads, P head width, G
groups, N state width, C convolved channels = I + 2GN, W taps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import available, require
from implicit_blocks.ops.ssd import mamba_ssm
from implicit_blocks.ops.transforms import without_autocast

__all__ = ["Mamba2Sizes", "eligible", "mamba2_mix", "suits"]


class Mamba2Sizes(NamedTuple):
    """How the projection is divided, and the norm."""

    n_heads: int
    head_dim: int
    n_groups: int
    d_state: int
    norm_groups: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """I."""
        return self.n_heads * self.head_dim


TAPS = 4  # of the convolution that the kernels are written for; all published models have four


def eligible(z_BLD: Tensor, plain: bool, taps: int) -> bool:
    """Whether a window may be one for the operator; ``plain``: begins its sequence, no padding, no documents.

    Asked before the projection, whose type decides.
    """
    if not (plain and z_BLD.is_cuda) or taps != TAPS or z_BLD.shape[1] < mamba_ssm.SHORTEST:
        return False
    return available("triton") and available(mamba_ssm.MODULE)


def suits(projected_BLU: Tensor) -> bool:
    """Whether the operator serves the projection of such a window."""
    return projected_BLU.dtype in (torch.bfloat16, torch.float16)


def mamba2_mix(
    projected_BLU: Tensor,
    u_BLU: Tensor | None,
    *,
    conv_weight_CW: Tensor,
    conv_bias_C: Tensor | None,
    dt_bias_H: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    norm_weight_I: Tensor,
    sizes: Mamba2Sizes,
) -> tuple[Tensor, Tensor]:
    """Return what the output projection reads, (B, L, I), and the state after the window, float32.

    Args:
        projected_BLU: what the input projection gives, in bfloat16 or float16.
        u_BLU: the injection, added to it; None: nothing.
        conv_weight_CW: taps, oldest first.
        conv_bias_C: of the convolution, or None.
        dt_bias_H: added to the step sizes before softplus.
        A_log_H: ``A = −exp(A_log)``.
        D_H: the skip connection.
        norm_weight_I: of the gated norm.
        sizes: how the projection is divided.

    The state carries no gradient to what is computed from it: windows that follow are not served here.

    """
    if u_BLU is not None:
        u_BLU = u_BLU.to(projected_BLU.dtype).expand_as(projected_BLU).contiguous()
    out, state, *_ = _mix(
        projected_BLU.contiguous(),
        u_BLU,
        conv_weight_CW,
        conv_bias_C,
        dt_bias_H,
        A_log_H,
        D_H,
        norm_weight_I,
        list(sizes[:5]),
        sizes.norm_eps,
    )
    return out, state


@torch.library.custom_op("implicit_blocks::mamba2_mix", mutates_args=())
def _mix(
    projected: Tensor,
    u: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    sizes: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from implicit_blocks.ops.kernels.mamba2_parts import gated_norm_forward

    shape = _sizes(sizes, eps)
    with without_autocast("cuda"):
        x, B, C, dt = _scan_inputs(projected, u, conv_weight, conv_bias, dt_bias, shape)
        scan = require(mamba_ssm.MODULE, package="mamba-ssm")
        y, _, _, _, _, state = scan._mamba_chunk_scan_combined_fwd(
            x, dt, -torch.exp(A_log.float()), B, C, mamba_ssm.CHUNK, D=D.float()
        )
        y = y.view(*projected.shape[:2], shape.inner)
        out = gated_norm_forward(y, projected, u, norm_weight, eps=eps, groups=shape.norm_groups)
    return out, state.float().contiguous(), y, dt


@_mix.register_fake
def _(
    projected: Tensor,
    u: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    sizes: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = _sizes(sizes, eps)
    batch, length, _ = projected.shape
    out = projected.new_empty(batch, length, shape.inner)
    state = projected.new_empty(batch, shape.n_heads, shape.head_dim, shape.d_state, dtype=torch.float32)
    dt = projected.new_empty(batch, length, shape.n_heads, dtype=torch.float32)
    return out, state, torch.empty_like(out), dt


@torch.library.custom_op("implicit_blocks::mamba2_mix_backward", mutates_args=())
def _mix_backward(
    dout: Tensor,
    projected: Tensor,
    u: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    y: Tensor,
    dt: Tensor,
    sizes: list[int],
    eps: float,
) -> list[Tensor]:
    from implicit_blocks.ops.kernels.mamba2_parts import conv_backward, gated_norm_backward

    shape = _sizes(sizes, eps)
    inner, maps = shape.inner, shape.n_groups * shape.d_state
    with without_autocast("cuda"):
        dprojected = torch.empty_like(projected)
        dy, dnorm = gated_norm_backward(
            dout, y, projected, u, norm_weight, dprojected, eps=eps, groups=shape.norm_groups
        )
        # Computed again rather than kept: a convolved window is a sixth of a layer's activations.
        x, B, C, _ = _scan_inputs(projected, u, conv_weight, conv_bias, None, shape)
        dconv = projected.new_empty(*projected.shape[:2], inner + 2 * maps)
        dx, dB, dC = _divide(dconv, shape)
        A = -torch.exp(A_log.float())
        scan = require(mamba_ssm.MODULE, package="mamba-ssm")
        _, ddt, dA, _, _, dD, _, _, _ = scan._mamba_chunk_scan_combined_bwd(
            dy.view(x.shape),
            x,
            dt,
            A,
            B,
            C,
            y.view(x.shape),
            mamba_ssm.CHUNK,
            D=D.float(),
            dx=dx,
            dB=dB,
            dC=dC,
        )
        dweight, dbias = conv_backward(dconv, projected, u, conv_weight, conv_bias, dprojected, first=inner)
        ddt = ddt.float() * -torch.expm1(-dt)  # softplus' = sigmoid = 1 − exp(−softplus)
        dprojected[..., -shape.n_heads :] = ddt
        given = (conv_weight, conv_bias, dt_bias, A_log, D, norm_weight)
        found = (dweight, dbias, ddt.sum((0, 1)), dA * A, dD, dnorm)
        return [
            dprojected,
            *(f.to(g.dtype) if g is not None else f for g, f in zip(given, found, strict=True)),
        ]


@_mix_backward.register_fake
def _(
    dout: Tensor,
    projected: Tensor,
    u: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    y: Tensor,
    dt: Tensor,
    sizes: list[int],
    eps: float,
) -> list[Tensor]:
    def like(t: Tensor) -> Tensor:
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    bias = like(conv_bias) if conv_bias is not None else conv_weight.new_empty(conv_weight.shape[0])
    return [like(projected), like(conv_weight), bias, like(dt_bias), like(A_log), like(D), like(norm_weight)]


def _sizes(sizes: list[int], eps: float) -> Mamba2Sizes:
    n_heads, head_dim, n_groups, d_state, norm_groups = sizes
    return Mamba2Sizes(n_heads, head_dim, n_groups, d_state, norm_groups, eps)


def _scan_inputs(
    projected: Tensor,
    u: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor | None,
    shape: Mamba2Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, B, C and dt (or an empty tensor where no bias is given)."""
    from implicit_blocks.ops.kernels.mamba2_parts import conv_forward

    x, B, C = _divide(conv_forward(projected, u, conv_weight, conv_bias, first=shape.inner), shape)
    if dt_bias is None:
        return x, B, C, projected.new_empty(0)
    dt = projected[..., -shape.n_heads :].float()
    if u is not None:
        dt = dt + u[..., -shape.n_heads :]
    return x, B, C, torch.nn.functional.softplus(dt + dt_bias.float())


def _divide(conv: Tensor, shape: Mamba2Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the convolved channels, (B, L, C), into x (B, L, H, P), B and C (B, L, G, N)."""
    maps = shape.n_groups * shape.d_state
    x, B, C = conv.split((shape.inner, maps, maps), dim=-1)
    x = x.unflatten(-1, (shape.n_heads, shape.head_dim))
    return x, B.unflatten(-1, (shape.n_groups, -1)), C.unflatten(-1, (shape.n_groups, -1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.sizes, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2], output[3])


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    projected, u, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, y, dt = ctx.saved_tensors
    if dout is None:
        return (None,) * 10
    dprojected, dweight, dbias, ddt_bias, dA_log, dD, dnorm = _mix_backward(
        dout.contiguous(),
        projected,
        u,
        conv_weight,
        conv_bias,
        dt_bias,
        A_log,
        D,
        norm_weight,
        y,
        dt,
        ctx.sizes,
        ctx.eps,
    )
    du = None if u is None else dprojected
    return (
        dprojected,
        du,
        dweight,
        None if conv_bias is None else dbias,
        ddt_bias,
        dA_log,
        dD,
        dnorm,
        None,
        None,
    )


_mix.register_autograd(_differentiate, setup_context=_keep)
