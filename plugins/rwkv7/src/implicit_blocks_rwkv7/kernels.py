"""The generalized delta rule by flash-linear-attention's Triton kernels (fla-org/flash-linear-attention).

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import load

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

    No ``log_w`` is below ``least_log_w``: that bound is what lets the kernels take a chunk's decays out of
    its products. Asked for by name, so nothing falls back.

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
    if documents_BL is not None:
        raise ValueError("backend 'fla' takes one document a row; choose backend 'plain' for packed rows")
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
