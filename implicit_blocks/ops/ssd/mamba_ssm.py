"""The scan by mamba-ssm's Triton kernels, for CUDA and ROCm devices.

Forward and backward are operators of their own, so that a compiler takes them as they are and fuses what
stands around them, and so that no autograd machinery but torch's stands between.
"""

from __future__ import annotations

from typing import Any

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
    if not available(MODULE):  # looked up in a dictionary, which a compiler sees through
        require(MODULE, package="mamba-ssm")
    if not x_BLHP.is_cuda:
        raise ValueError("SSD backend 'mamba_ssm' needs a GPU; leave the backend out or choose 'chunked'")
    if documents_BL is not None and initial_state_BHPN is not None:
        raise ValueError(
            "SSD backend 'mamba_ssm' cuts documents only at the start of a sequence; choose 'chunked' for "
            "documents after an initial state"
        )
    documents = None if documents_BL is None else documents_BL.to(torch.int32).contiguous()
    y, state = _scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, documents)
    return y, state.float() if return_final_state else None


@torch.library.custom_op("implicit_blocks::mamba_ssm_scan", mutates_args=())
def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    kernels = require(MODULE, package="mamba-ssm")
    with without_autocast(x.device.type):
        y, _, _, _, _, state = kernels._mamba_chunk_scan_combined_fwd(
            x, dt, A, B, C, CHUNK, initial_states=initial_state, seq_idx=documents
        )
    return y, state


@_scan.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(batch, heads, width, B.shape[3], dtype=torch.float32)


@torch.library.custom_op("implicit_blocks::mamba_ssm_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    dstate: Tensor | None,
    y: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = require(MODULE, package="mamba-ssm")
    with without_autocast(x.device.type):
        dx, ddt, dA, dB, dC, _, _, _, dinitial = kernels._mamba_chunk_scan_combined_bwd(
            dy,
            x,
            dt,
            A,
            B,
            C,
            y,
            CHUNK,
            initial_states=initial_state,
            dfinal_states=dstate,
            seq_idx=documents,
        )
    none = x.new_empty(0) if initial_state is None else dinitial
    return dx.contiguous(), ddt.contiguous(), dA, dB.contiguous(), dC.contiguous(), none


@_scan_backward.register_fake
def _(
    dy: Tensor,
    dstate: Tensor | None,
    y: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(t: Tensor) -> Tensor:
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    none = x.new_empty(0) if initial_state is None else like(initial_state)
    return like(x), like(dt), like(A), like(B), like(C), none


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], *inputs)


def _differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    y, x, dt, A, B, C, initial_state, documents = ctx.saved_tensors
    if dy is None and dstate is None:
        return (None,) * 7
    dy = torch.zeros_like(y) if dy is None else dy.contiguous()
    dx, ddt, dA, dB, dC, dinitial = _scan_backward(dy, dstate, y, x, dt, A, B, C, initial_state, documents)
    return dx, ddt, dA, dB, dC, (None if initial_state is None else dinitial), None


_scan.register_autograd(_differentiate, setup_context=_keep)
