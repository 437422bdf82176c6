"""The generalized delta rule with the chunked Triton kernels of fla-org/flash-linear-attention.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MOST_IN_GRID, require
from implicit_blocks.ops.backends import Backend
from implicit_blocks_rwkv7.delta_rule import FASTEST_DECAY

MODULE, PACKAGE = "fla.ops.generalized_delta_rule", "fla-core"


def _refuses(*inputs: Tensor | None) -> str:
    """Return why the kernels do not support the inputs, or ""."""
    v, documents = inputs[3], inputs[-1]
    assert v is not None
    if not v.is_cuda or v.dtype not in (torch.bfloat16, torch.float16):
        return f"it requires 16-bit floats on a GPU, got {v.dtype} on {v.device.type}"
    if documents is not None:
        return "it supports one document per row"
    if v.shape[0] * v.shape[2] > MOST_IN_GRID:
        rows = f"{v.shape[0]} rows of {v.shape[2]} heads"
        return f"it indexes at most {MOST_IN_GRID} heads of all rows, got {rows}"
    return ""


def _scan(*tensors: Tensor, initial_state_BHKV: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor]:
    """Scan as ``generalized_delta_rule`` does; the bound of the decays lets the kernels factor them out."""
    r, log_w, k, v, a, b = tensors
    r, k, a, b = (t.to(v.dtype).contiguous() for t in (r, k, a, b))
    o, state = require(MODULE, package=PACKAGE).chunk_dplr_delta_rule(
        q=r,
        k=k,
        v=v.contiguous(),
        a=a,
        b=b,
        gk=log_w.float().contiguous(),
        scale=1.0,
        initial_state=None if initial_state_BHKV is None else initial_state_BHKV.float().contiguous(),
        output_final_state=True,
        lower_bound=-FASTEST_DECAY,
    )
    return o, state


BACKEND = Backend("fla", _scan, _refuses, lambda *inputs: False, MODULE, PACKAGE)
"""Never chosen automatically."""
