"""The scan by mamba-ssm's Triton kernels, for CUDA and ROCm devices."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import available, require
from implicit_blocks.ops.transforms import without_autocast

MODULE = "mamba_ssm.ops.triton.ssd_combined"
CHUNK = 256  # what the kernels are tuned for; the chunk is a matter of speed, not of values
SHORTEST = 32  # below, a handful of plain operators beat the kernels' six launches


def suits(x_BLHP: Tensor, initial_state_BHPN: Tensor | None, documents_BL: Tensor | None) -> bool:
    """Whether the kernels serve these inputs, and better than plain PyTorch does.

    In float32 their products are TF32, with errors near 3e-4, so float32 stays with the plain scan unless
    TF32 products were allowed. Documents are served at the start of a sequence only.
    """
    if not x_BLHP.is_cuda or x_BLHP.dtype == torch.float64 or x_BLHP.shape[1] < SHORTEST:
        return False
    if x_BLHP.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return False
    if documents_BL is not None and initial_state_BHPN is not None:
        return False
    return available(MODULE)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled already; torch leaves it untyped
def ssd_mamba_ssm(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None,
    chunk_size: int,
    documents_BL: Tensor | None,
    initial_document_B: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scan; ``ssd`` documents arguments and results. The chunk is the kernels' own.

    Raises:
        ImportError: where mamba-ssm is missing.
        ValueError: for inputs on the CPU, or documents together with an initial state.

    """
    kernels = require(MODULE, package="mamba-ssm")
    if not x_BLHP.is_cuda:
        raise ValueError("SSD backend 'mamba_ssm' needs a GPU; leave the backend out or choose 'chunked'")
    if documents_BL is not None and initial_state_BHPN is not None:
        raise ValueError(
            "SSD backend 'mamba_ssm' cuts documents only at the start of a sequence; choose 'chunked' for "
            "documents after an initial state"
        )
    with without_autocast(x_BLHP.device.type):
        result = kernels.mamba_chunk_scan_combined(
            x_BLHP,
            dt_BLH,
            A_H,
            B_BLGN,
            C_BLGN,
            CHUNK,
            initial_states=initial_state_BHPN,
            seq_idx=None if documents_BL is None else documents_BL.to(torch.int32).contiguous(),
            return_final_states=return_final_state,
        )
    if not return_final_state:
        return result, None
    y, state = result
    return y, state.float()
