"""The gated delta rule by flash-linear-attention's Triton kernels (fla-org/flash-linear-attention).

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import load

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

    Asked for by name, so nothing falls back.

    Raises:
        ImportError: flash-linear-attention is not there, or can't be imported.
        ValueError: the inputs are none that the kernels take; names what to change.

    """
    module = load(MODULE)
    if isinstance(module, str):
        raise ImportError(f"{module}; pip install '{PACKAGE}' for backend 'fla', or choose backend 'plain'")
    if not v_BLHV.is_cuda or v_BLHV.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"backend 'fla' takes 16-bit floats on a GPU, not {v_BLHV.dtype} on {v_BLHV.device.type}; run "
            "with precision bfloat16, or choose backend 'plain'"
        )
    if k_BLHK.shape[3] > WIDEST_KEYS:
        raise ValueError(
            f"backend 'fla' takes a head_dim up to {WIDEST_KEYS}, not {k_BLHK.shape[3]}; use more heads, or "
            "backend 'plain'"
        )
    if documents_BL is not None:
        raise ValueError("backend 'fla' takes one document a row; choose backend 'plain' for packed rows")
    o, state = module.chunk_gated_delta_rule(
        q=q_BLHK.to(v_BLHV.dtype).contiguous(),
        k=k_BLHK.to(v_BLHV.dtype).contiguous(),
        v=v_BLHV.contiguous(),
        g=g_BLH.float().contiguous(),
        beta=beta_BLH.float().contiguous(),
        scale=1.0,
        initial_state=None if initial_state_BHKV is None else initial_state_BHKV.float().contiguous(),
        output_final_state=True,
    )
    return o, state
