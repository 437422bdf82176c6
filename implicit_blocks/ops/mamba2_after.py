"""Mamba2 between its projections in a window after committed tokens: convolution, scan and gated norm.

As ``mamba2_mix``, but the convolution continues from the last inputs before the window and the scan from the
state after them. Without gradients: prompts are solved in chunks this way. The plain operators of
``mixers/mamba2/mixer.py`` are the reference.

Shapes: B batch, L tokens, U projection width = 2I + 2GN + H, I inner width = H · P, H heads, P head width, G
groups, N state width, C convolved channels = I + 2GN, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import note, without_autocast
from implicit_blocks.ops.mamba2_mix import TAPS, Mamba2Sizes, Mamba2Weights, as_added, divide, sizes_of
from implicit_blocks.ops.ssd import mamba_ssm

__all__ = ["eligible", "mamba2_after"]


def eligible(length: int, taps: int) -> bool:
    """Whether a window of a GPU after committed tokens, without padding or documents, suits the operator."""
    if taps != TAPS or length < mamba_ssm.SHORTEST:
        return False
    return available("triton") and available(mamba_ssm.MODULE)


def mamba2_after(
    projected_BLU: Tensor,
    u: Tensor | None,
    *,
    rows_BL: Tensor | None,
    tail_BWC: Tensor,
    state_BHPN: Tensor,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
) -> tuple[Tensor, Tensor]:
    """Return the input of the output projection, (B, L, I), and the state after the window in float32.

    Args:
        projected_BLU: the output of the input projection, in bfloat16 or float16.
        u: the injection, added to it, (B, L, U), or (V, U) with ``rows_BL``; None: nothing.
        rows_BL: int64, the row of ``u`` of each token; None: ``u`` has one row per token.
        tail_BWC: the W − 1 inputs of the convolution before the window.
        state_BHPN: the state before the window.
        weights: of the convolution, the scan and the gated norm.
        sizes: the division of the projection.

    """
    note("mamba2 between its projections", "our Triton kernels")
    found: tuple[Tensor, Tensor] = _after(
        projected_BLU.contiguous(),
        as_added(u, projected_BLU, rows_BL),
        None if rows_BL is None else rows_BL.contiguous(),
        tail_BWC.contiguous(),
        state_BHPN.contiguous(),
        *weights,
        list(sizes[:5]),
        sizes.norm_eps,
    )
    return found


@torch.library.custom_op("implicit_blocks::mamba2_after", mutates_args=())
def _after(
    projected: Tensor,
    u: Tensor | None,
    rows: Tensor | None,
    tail: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    sizes: list[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    from implicit_blocks.ops.kernels import mamba2_conv, mamba2_parts, mamba2_walk

    shape = sizes_of(sizes, eps)
    with without_autocast("cuda"):
        added = mamba2_parts.Added(u, rows)
        conv = mamba2_conv.conv_forward(
            projected, added, conv_weight, conv_bias, first=shape.inner, tail_BWC=tail
        )
        steps = mamba2_walk.step_sizes(projected, added, dt_bias, A_log, sizes=shape, by_block=True)
        x, B, C = divide(conv, shape)
        A, dt = -torch.exp(A_log.float()), steps.dt_BHL.transpose(1, 2)
        y, _, _, _, _, after = mamba_ssm.kernels()._mamba_chunk_scan_combined_fwd(
            x, dt, A, B, C, mamba_ssm.CHUNK, D=D.float(), initial_states=state
        )
        out = mamba2_parts.gated_norm_forward(
            y.view(*projected.shape[:2], shape.inner),
            projected,
            added,
            norm_weight,
            eps=eps,
            groups=shape.norm_groups,
        )
        return out, after.float().contiguous()


@_after.register_fake
def _(projected: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    _, _, state, *_, sizes, _ = others
    assert isinstance(state, Tensor)
    assert isinstance(sizes, list)
    out = projected.new_empty(*projected.shape[:2], sizes[0] * sizes[1])
    return out, torch.empty_like(state, dtype=torch.float32, memory_format=torch.contiguous_format)
