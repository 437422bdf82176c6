"""All of Mamba2 between its projections as one operator: convolution, scan, gated norm, and their gradients.

For windows that begin their sequences, without padding or documents, in 16-bit precision on a GPU. The plain
operators of ``mixers/mamba2/mixer.py`` are the reference.

Shapes: B batch, L tokens, U projection width = 2I + 2GN + H, I inner width = H · P, H heads, P head width, G
groups, N state width, C convolved channels = I + 2GN, W taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import note, without_autocast
from implicit_blocks.ops.ssd import mamba_ssm

if TYPE_CHECKING:
    from implicit_blocks.ops.kernels.mamba2_parts import Added

__all__ = ["Mamba2Sizes", "Mamba2Weights", "divide", "eligible", "mamba2_mix", "suits"]


class Mamba2Sizes(NamedTuple):
    """The division of the projection, and the norm."""

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


class Mamba2Weights(NamedTuple):
    """The weights between the projections."""

    conv_CW: Tensor
    """Taps, oldest first."""
    conv_bias_C: Tensor | None
    dt_bias_H: Tensor
    """Added to the step sizes before softplus."""
    A_log_H: Tensor
    """The logarithm of minus A."""
    D_H: Tensor
    """The skip connection."""
    norm_I: Tensor
    """Those of the gated norm."""


TAPS = 4  # the kernels support a convolution of four taps, as in all published models
SHORTEST = 4  # tokens; below, a few plain operators are faster
ONE_CHUNK = 256  # maximum number of tokens; with more, states between chunks are cheaper than all pairs
WALKED_STATE = 64 * 128  # entries of a head's state that a program keeps in registers


def eligible(length: int, taps: int, sizes: Mamba2Sizes) -> bool:
    """Whether a window of a GPU that begins its sequence, without padding or documents, suits the operator.

    The criteria are known before the projection: the window's ``length``, the ``taps`` of the convolution and
    the ``sizes`` of the scan. ``suits`` then checks the projection itself.
    """
    if taps != TAPS or length < SHORTEST:
        return False
    if not available("triton"):
        return False
    if _one_chunk(length, sizes):
        return True
    return length >= mamba_ssm.SHORTEST and available(mamba_ssm.MODULE)


def suits(projected_BLU: Tensor) -> bool:
    """Whether the operator supports the projection of such a window: 16-bit, and not too many rows."""
    # The grid of the convolution has the same limit of rows.
    return projected_BLU.dtype in (torch.bfloat16, torch.float16) and not mamba_ssm.too_many(projected_BLU)


def mamba2_mix(
    projected_BLU: Tensor,
    u: Tensor | None,
    *,
    rows_BL: Tensor | None,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
    return_state: bool,
    out_weight_DI: Tensor | None = None,
    out_bias_D: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the input of the output projection, (B, L, I), and on request the state after the window.

    With the output projection's weight the output is that of the projection, (B, L, D). Its input is then
    recomputed in backward instead of saved: a sixth of a layer's activations. The state is in float32.

    Args:
        projected_BLU: the output of the input projection, in bfloat16 or float16.
        u: the injection, added to it, (B, L, U), or (V, U) with ``rows_BL``; None: nothing.
        rows_BL: int64, the row of ``u`` of each token; None: ``u`` has one row per token.
        weights: those between the projections.
        sizes: the division of the projection.
        return_state: also compute the state; else it is None.
        out_weight_DI: the weight of the output projection, or None.
        out_bias_D: the bias of the output projection, or None.

    The state carries no gradient: the operator does not support the windows that follow.

    """
    note("mamba2 between its projections", "our Triton kernels")
    u = as_added(u, projected_BLU, rows_BL)
    out, state, _ = _mix(
        projected_BLU.contiguous(),
        u,
        None if rows_BL is None else rows_BL.contiguous(),
        *weights,
        None if out_weight_DI is None else out_weight_DI.to(projected_BLU.dtype),
        None if out_bias_D is None else out_bias_D.to(projected_BLU.dtype),
        list(sizes[:5]),
        sizes.norm_eps,
        return_state,
        torch.is_grad_enabled(),
    )
    return out, state if return_state else None


@torch.library.custom_op("implicit_blocks::mamba2_mix", mutates_args=())
def _mix(
    projected: Tensor,
    u: Tensor | None,
    rows: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    out_weight: Tensor | None,
    out_bias: Tensor | None,
    sizes: list[int],
    eps: float,
    return_state: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, the state on request, and the scan's output if backward needs it; else empty."""
    from implicit_blocks.ops.kernels import mamba2_parts

    shape = sizes_of(sizes, eps)
    # The results of an operator must be distinct tensors.
    none, no_y = projected.new_empty(0), projected.new_empty(0)
    with without_autocast("cuda"):
        added = mamba2_parts.Added(u, rows)
        y, state = scanned(projected, added, conv_weight, conv_bias, dt_bias, A_log, D, shape, return_state)
        out = mamba2_parts.gated_norm_forward(
            y, projected, added, norm_weight, eps=eps, groups=shape.norm_groups
        )
        if out_weight is not None:
            out = torch.nn.functional.linear(out, out_weight, out_bias)
        return out, none if state is None or not return_state else state, y if keep else no_y


def scanned(
    projected: Tensor,
    added: Added,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    shape: Mamba2Sizes,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the scan's output, (B, L, I), and the state if requested; outside autocast."""
    from implicit_blocks.ops.kernels import mamba2_conv, mamba2_walk

    conv = mamba2_conv.conv_forward(projected, added, conv_weight, conv_bias, first=shape.inner)
    by_block = not _one_chunk(projected.shape[1], shape)
    steps = mamba2_walk.step_sizes(projected, added, dt_bias, A_log, sizes=shape, by_block=by_block)
    if by_block and not _walks(projected, shape):
        x, B, C = divide(conv, shape)
        A, dt = -torch.exp(A_log.float()), steps.dt_BHL.transpose(1, 2)
        y, _, _, _, _, state = mamba_ssm.kernels()._mamba_chunk_scan_combined_fwd(
            x, dt, A, B, C, mamba_ssm.CHUNK, D=D.float()
        )
        return y.view(*projected.shape[:2], shape.inner), state.float().contiguous()
    return mamba2_walk.forward(conv, steps, D, sizes=shape, return_state=return_state, by_block=by_block)


@_mix.register_fake
def _(projected: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, out_weight, _, sizes, eps, return_state, keep = others
    shape = sizes_of(sizes, eps)
    batch, length, _ = projected.shape
    state_shape = (batch, shape.n_heads, shape.head_dim, shape.d_state)
    state = projected.new_empty(state_shape, dtype=torch.float32) if return_state else projected.new_empty(0)
    out = projected.new_empty(batch, length, shape.inner if out_weight is None else out_weight.shape[0])
    y = projected.new_empty(batch, length, shape.inner) if keep else projected.new_empty(0)
    return out, state, y


@torch.library.custom_op("implicit_blocks::mamba2_mix_backward", mutates_args=())
def _mix_backward(
    dout: Tensor,
    projected: Tensor,
    u: Tensor | None,
    rows: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    out_weight: Tensor | None,
    out_bias: Tensor | None,
    y: Tensor,
    sizes: list[int],
    eps: float,
) -> list[Tensor]:
    """Return the gradients of the projection, six parameters, and the output projection if given."""
    from implicit_blocks.ops.kernels import mamba2_conv, mamba2_parts

    shape = sizes_of(sizes, eps)
    with without_autocast("cuda"):
        added = mamba2_parts.Added(u, rows)
        dprojected = torch.empty_like(projected)
        dnormed = dout if out_weight is None else dout @ out_weight
        dy, dnorm = mamba2_parts.gated_norm_backward(
            dnormed,
            y,
            projected,
            added,
            norm_weight,
            dprojected,
            eps=eps,
            groups=shape.norm_groups,
            again=out_weight is not None,
        )
        of_projection = []
        if out_weight is not None:  # the buffer now has the norm's values
            of_projection.append(dout.flatten(0, 1).mT @ dnormed.flatten(0, 1))
        if out_bias is not None:
            of_projection.append(dout.flatten(0, 1).sum(0))
        del dnormed
        # Recomputed rather than saved: a convolved window is a sixth of a layer's activations.
        conv = mamba2_conv.conv_forward(projected, added, conv_weight, conv_bias, first=shape.inner)
        scan_backward = _one_chunk_backward if _one_chunk(projected.shape[1], shape) else _scan_backward
        dconv, ddt, dt_bias_sum, dA_log, dD = scan_backward(
            dy, y, conv, projected, added, dt_bias, A_log, D, shape
        )
        dprojected[..., -shape.n_heads :] = ddt
        dweight, dbias = mamba2_conv.conv_backward(
            dconv, projected, added, conv_weight, conv_bias, dprojected, first=shape.inner
        )
        given = (conv_weight, conv_bias, dt_bias, A_log, D, norm_weight)
        found = (dweight, dbias, dt_bias_sum, dA_log, dD, dnorm)
        return [
            dprojected,
            *(f.to(g.dtype) if g is not None else f for g, f in zip(given, found, strict=True)),
            *of_projection,
        ]


@_mix_backward.register_fake
def _(dout: Tensor, projected: Tensor, u: Tensor | None, rows: Tensor | None, *others: Any) -> list[Tensor]:
    conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, out_weight, out_bias, *_ = others

    def like(t: Tensor) -> Tensor:
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    bias = like(conv_bias) if conv_bias is not None else conv_weight.new_empty(conv_weight.shape[0])
    small = [like(conv_weight), bias, like(dt_bias), like(A_log), like(D), like(norm_weight)]
    return [like(projected), *small, *(like(t) for t in (out_weight, out_bias) if t is not None)]


def _one_chunk_backward(
    dy: Tensor,
    y: Tensor,
    conv: Tensor,
    projected: Tensor,
    added: Added,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    shape: Mamba2Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the convolution's output, the steps before softplus, dt_bias, A_log and D."""
    from implicit_blocks.ops.kernels import mamba2_one_chunk, mamba2_walk

    steps = mamba2_walk.step_sizes(projected, added, dt_bias, A_log, sizes=shape, by_block=False)
    dconv, ddt, dA_log, dD = mamba2_one_chunk.backward(dy, conv, steps, A_log, D, sizes=shape)
    ddt = ddt * -torch.expm1(-steps.dt_BHL)  # softplus' = sigmoid = 1 − exp(−softplus)
    return dconv, ddt.transpose(1, 2), ddt.sum((0, 2)), dA_log, dD


def _scan_backward(
    dy: Tensor,
    y: Tensor,
    conv: Tensor,
    projected: Tensor,
    added: Added,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    shape: Mamba2Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``_one_chunk_backward``, for sequences of any length."""
    from implicit_blocks.ops.kernels import mamba2_walk

    x, B, C = divide(conv, shape)
    dconv = torch.empty_like(conv)
    dx, dB, dC = divide(dconv, shape)
    steps = mamba2_walk.step_sizes(projected, added, dt_bias, A_log, sizes=shape, by_block=True)
    A, dt = -torch.exp(A_log.float()), steps.dt_BHL.transpose(1, 2)
    scan = mamba_ssm.kernels()
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
    ddt = ddt.float() * -torch.expm1(-dt)
    return dconv, ddt, ddt.sum((0, 1)), dA * A, dD


def as_added(u: Tensor | None, projected_BLU: Tensor, rows_BL: Tensor | None) -> Tensor | None:
    """Return the injection as the kernels read it: in the projection's dtype, and contiguous."""
    if u is None:
        return None
    u = u.to(projected_BLU.dtype)
    return (u if rows_BL is not None else u.expand_as(projected_BLU)).contiguous()


def sizes_of(sizes: list[int], eps: float) -> Mamba2Sizes:
    """Return the sizes of the list and the epsilon that an operator receives."""
    n_heads, head_dim, n_groups, d_state, norm_groups = sizes
    return Mamba2Sizes(n_heads, head_dim, n_groups, d_state, norm_groups, eps)


def _one_chunk(length: int, shape: Mamba2Sizes) -> bool:
    """Whether the kernels for short sequences apply: norms by group, widths that fit a matrix unit."""
    return length <= ONE_CHUNK and shape.norm_groups == shape.n_groups and _tiles(shape)


def _walks(projected: Tensor, shape: Mamba2Sizes) -> bool:
    """Whether the sequential scan kernel runs a long sequence: the state fits registers, with enough heads.

    Each head of a sequence is one program; with fewer programs than multiprocessors, parallel chunks are
    faster. Offsets within a sequence are in 32 bits.
    """
    if not _tiles(shape) or shape.head_dim * shape.d_state > WALKED_STATE:
        return False
    if projected.shape[1] * (shape.inner + 2 * shape.n_groups * shape.d_state) >= 2**31:
        return False
    multiprocessors = torch.cuda.get_device_properties(projected.device).multi_processor_count
    return projected.shape[0] * shape.n_heads >= multiprocessors


def _tiles(shape: Mamba2Sizes) -> bool:
    return all(16 <= size <= 128 and size & (size - 1) == 0 for size in (shape.head_dim, shape.d_state))


def divide(conv: Tensor, shape: Mamba2Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the convolved channels, (B, L, C), into x (B, L, H, P), B and C (B, L, G, N)."""
    maps = shape.n_groups * shape.d_state
    x, B, C = conv.split((shape.inner, maps, maps), dim=-1)
    x = x.unflatten(-1, (shape.n_heads, shape.head_dim))
    return x, B.unflatten(-1, (shape.n_groups, -1)), C.unflatten(-1, (shape.n_groups, -1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.sizes, ctx.eps, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 15
    projected, u, rows, conv_weight, conv_bias, *others = ctx.saved_tensors
    dprojected, dweight, dbias, *dothers = _mix_backward(
        dout.contiguous(), projected, u, rows, conv_weight, conv_bias, *others, ctx.sizes, ctx.eps
    )
    dothers += [None] * (6 - len(dothers))  # no output projection, or one without a bias
    return (
        dprojected,
        None if u is None else dprojected if rows is None else _by_row(dprojected, rows, u),
        None,
        dweight,
        None if conv_bias is None else dbias,
        *dothers,
        *(None,) * 4,
    )


def _by_row(dprojected: Tensor, rows: Tensor, u: Tensor) -> Tensor:
    """Return the gradients summed over the tokens of each row of the table."""
    # A product with ones and zeros: sums in float32, in a fixed order, at the speed of the matrix units.
    takes = rows.flatten()[:, None] == torch.arange(u.shape[0], device=rows.device)
    return takes.to(dprojected.dtype).mT @ dprojected.flatten(0, 1)


_mix.register_autograd(_differentiate, setup_context=_keep)
