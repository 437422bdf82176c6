"""The generalized delta rule with the Triton kernels of fla-org/flash-linear-attention.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MOST_IN_GRID, load

MODULE = "fla.ops.generalized_delta_rule"
PACKAGE = "fla-core>=0.6"


def generalized_delta_rule_fla(
    r_BLHK: Tensor,
    log_w_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    a_BLHK: Tensor,
    b_BLHK: Tensor,
    *,
    initial_state_BHKV: Tensor | None,
    documents_BL: Tensor | None,
    least_log_w: float,
) -> tuple[Tensor, Tensor]:
    """Scan as ``generalized_delta_rule`` does, on a GPU.

    No ``log_w`` may be below ``least_log_w``: the bound lets the kernels factor a chunk's decays out of its
    products. An explicitly named backend does not fall back.

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
    if documents_BL is not None:
        raise ValueError(
            "backend 'fla' supports one document per row; choose backend 'plain' for packed rows"
        )
    if v_BLHV.shape[0] * v_BLHV.shape[2] > MOST_IN_GRID:
        raise ValueError(
            f"backend 'fla' indexes at most {MOST_IN_GRID} heads of all rows, got {v_BLHV.shape[0]} rows of "
            f"{v_BLHV.shape[2]} heads; use fewer rows, or backend 'plain'"
        )
    r, k, v, a, b = (t.to(v_BLHV.dtype).contiguous() for t in (r_BLHK, k_BLHK, v_BLHV, a_BLHK, b_BLHK))
    o, state = module.chunk_dplr_delta_rule(
        q=r,
        k=k,
        v=v,
        a=a,
        b=b,
        gk=log_w_BLHK.float().contiguous(),
        scale=1.0,
        initial_state=None if initial_state_BHKV is None else initial_state_BHKV.float().contiguous(),
        output_final_state=True,
        lower_bound=least_log_w,
    )
    return o, state
