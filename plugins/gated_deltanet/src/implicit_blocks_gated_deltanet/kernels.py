"""The gated delta rule with the Triton kernels of fla-org/flash-linear-attention.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MOST_IN_GRID, fla_backward_is_wrong, load
from implicit_blocks_gated_deltanet.delta_rule import gated_delta_rule

_LOG = logging.getLogger(__name__)

MODULE = "fla.ops.gated_delta_rule"
PACKAGE = "fla-core>=0.6"
WIDEST_KEYS = 256
"""The kernels keep a head's keys in one block."""


def gated_delta_rule_fla(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    g_BLH: Tensor,
    beta_BLH: Tensor,
    *,
    initial_state_BHKV: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scan as ``gated_delta_rule`` does, on a GPU.

    An explicitly named backend does not fall back. Where the backward pass of the kernels is wrong (Hopper
    GPUs with Triton before 3.7.1), gradients are computed by the plain scan, with one warning.

    Raises:
        ImportError: flash-linear-attention is missing or cannot be imported.
        ValueError: the kernels do not support the inputs; the message names the remedy.

    """
    module = load(MODULE)
    if isinstance(module, str):
        raise ImportError(f"{module}; pip install '{PACKAGE}' for backend 'fla', or choose backend 'plain'")
    if not v_BLHV.is_cuda or v_BLHV.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"backend 'fla' requires 16-bit floats on a GPU, got {v_BLHV.dtype} on {v_BLHV.device.type}; use "
            "precision bfloat16, or choose backend 'plain'"
        )
    if k_BLHK.shape[3] > WIDEST_KEYS:
        raise ValueError(
            f"backend 'fla' supports a head_dim up to {WIDEST_KEYS}, got {k_BLHK.shape[3]}; use more heads, "
            "or backend 'plain'"
        )
    if documents_BL is not None:
        raise ValueError(
            "backend 'fla' supports one document per row; choose backend 'plain' for packed rows"
        )
    if v_BLHV.shape[0] * v_BLHV.shape[2] > MOST_IN_GRID:
        raise ValueError(
            f"backend 'fla' indexes at most {MOST_IN_GRID} heads of all rows, got {v_BLHV.shape[0]} rows of "
            f"{v_BLHV.shape[2]} heads; use fewer rows, or backend 'plain'"
        )
    tensors = (
        q_BLHK.to(v_BLHV.dtype).contiguous(),
        k_BLHK.to(v_BLHV.dtype).contiguous(),
        v_BLHV.contiguous(),
        g_BLH.float().contiguous(),
        beta_BLH.float().contiguous(),
        None if initial_state_BHKV is None else initial_state_BHKV.float().contiguous(),
    )
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if differentiated and fla_backward_is_wrong():
        _warn_once()
        o, state = _PlainBackward.apply(module, *tensors)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return o, state
    return _scan(module, *tensors)


def _scan(
    module: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    o, after = module.chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
    )
    return o, after


class _PlainBackward(torch.autograd.Function):
    """The values of the kernels with the gradients of the plain scan, which is recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, module: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        return _scan(module, *tensors)  # type: ignore[arg-type]  # only the last may be None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        q, k, v, g, beta, state = leaves
        with torch.enable_grad():
            o, after = gated_delta_rule(q, k, v, g, beta, initial_state_BHKV=state)  # type: ignore[arg-type]  # only the state may be None
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad((o, after), wanted, gradients))
        return (None, *(None if leaf is None else next(found) for leaf in leaves))


@functools.cache
def _warn_once() -> None:
    _LOG.warning(
        "backend 'fla': its backward pass is wrong on Hopper GPUs with Triton before 3.7.1, so gradients are "
        "computed by the plain scan; the search uses the kernels"
    )
