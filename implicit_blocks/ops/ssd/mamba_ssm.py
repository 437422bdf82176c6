"""The scan by mamba-ssm's Triton kernels, for CUDA and ROCm devices.

Forward and backward are custom operators, so that a compiler treats them as opaque and fuses the operators
around them, and so that only torch's own autograd is involved.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MOST_IN_GRID, package_refuses, require
from implicit_blocks.ops.backends import Backend, is_differentiated_forward, without_autocast
from implicit_blocks.ops.ssd import tuned

MODULE = "mamba_ssm.ops.triton.ssd_combined"
STEP_MODULE = "mamba_ssm.ops.triton.selective_state_update"
CHUNK = 256  # the kernels are tuned for this chunk, which affects speed but not values
SHORTEST = 32  # below, a few plain operators are faster than the kernels' six launches

_told: set[str] = set()


def kernels() -> ModuleType:
    """Return the module of the scan's kernels, with the measured tile sizes applied."""
    module = require(MODULE, package="mamba-ssm")
    if MODULE not in _told:
        _told.add(MODULE)
        tuned.configure_loaded(MODULE.rpartition(".")[0])
    return module


def _refuses(x_BLHP: Tensor, initial_state_BHPN: Tensor | None, documents_BL: Tensor | None) -> str:
    if reason := package_refuses(x_BLHP, None):
        return reason
    if documents_BL is not None and initial_state_BHPN is not None and x_BLHP.shape[1] > 1:
        return "it separates documents only at the start of a sequence"
    if too_many(x_BLHP):
        return f"its kernels index at most {MOST_IN_GRID} chunks of {CHUNK} tokens, and offsets in 32 bits"
    if is_differentiated_forward():
        return "its kernels have no forward-mode derivatives"
    return ""


def too_many(x: Tensor) -> bool:
    """Whether a batch, (B, L, …), exceeds the kernels' index range of chunks or offsets."""
    return x.shape[0] * -(-x.shape[1] // CHUNK) > MOST_IN_GRID or x.shape[0] * x.stride(0) >= 2**31


def pays(x_BLHP: Tensor, initial_state_BHPN: Tensor | None, documents_BL: Tensor | None) -> bool:
    """Whether ``auto`` should select Triton's scans.

    Their float32 products are TF32, with errors near 3e-4, so only if TF32 products are allowed. Short
    windows take a few plain operators; a single token without gradients is one kernel, in float32.
    """
    if x_BLHP.shape[1] == 1:
        return not (torch.is_grad_enabled() and x_BLHP.requires_grad)
    if x_BLHP.shape[1] < SHORTEST:
        return False
    return x_BLHP.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32


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

    A single token without gradients takes one step of the recurrence, in float32 for any input dtype.
    """
    tensors = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN)
    if x_BLHP.shape[1] == 1:
        state = initial_state_BHPN
        if documents_BL is not None:
            state = _of_the_same_document(state, documents_BL, initial_document_B)
        if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
            y, state = _step(*tensors[:5], state)
            return y, state if return_final_state else None
        y, state = _scan(*tensors[:5], state, None)
        return y, state.float() if return_final_state else None
    documents = None if documents_BL is None else documents_BL.to(torch.int32).contiguous()
    y, state = _scan(*tensors, documents)
    return y, state.float() if return_final_state else None


BACKEND = Backend("mamba-ssm", ssd_mamba_ssm, _refuses, pays, MODULE, "mamba-ssm")


def _of_the_same_document(
    state_BHPN: Tensor | None, documents_BL: Tensor, initial_document_B: Tensor | None
) -> Tensor | None:
    if state_BHPN is None or initial_document_B is None:
        return state_BHPN
    same_B = documents_BL[:, 0] == initial_document_B
    return torch.where(same_B[:, None, None, None], state_BHPN, 0.0)


@torch.library.custom_op("implicit_blocks::mamba_ssm_step", mutates_args=())
def _step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    step = require(STEP_MODULE, package="mamba-ssm")
    batch, _, heads, width = x.shape
    shape = (batch, heads, width, B.shape[3])
    # The kernel writes to the state in place.
    if initial_state is None:
        state = x.new_zeros(shape, dtype=torch.float32)
    else:
        state = initial_state.to(torch.float32, copy=True)
    none = A.new_zeros(heads, dtype=torch.float32)[:, None].expand(heads, width)  # bias and D are required
    y = step.selective_state_update(
        state,
        x[:, 0],
        dt[:, 0, :, None].expand(batch, heads, width),
        A.float()[:, None, None].expand(shape[1:]),
        B[:, 0],
        C[:, 0],
        D=none,
        dt_bias=none,
    )
    return y.unsqueeze(1), state


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
    with without_autocast(x.device.type):
        y, _, _, _, _, state = kernels()._mamba_chunk_scan_combined_fwd(
            x, dt, A, B, C, CHUNK, initial_states=initial_state, seq_idx=documents
        )
    return y, state


@_step.register_fake
@_scan.register_fake
def _(x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like(x), _state_like(x, tensors[2])


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
    with without_autocast(x.device.type):
        dx, ddt, dA, dB, dC, _, _, _, dinitial = kernels()._mamba_chunk_scan_combined_bwd(
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
def _(dy: Tensor, dstate: Tensor | None, y: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
    *inputs, initial_state, _ = given
    none = y.new_empty(0) if initial_state is None else _like(initial_state)
    return (*(_like(t) for t in inputs if t is not None), none)


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _state_like(x: Tensor, B: Tensor | None) -> Tensor:
    assert B is not None
    batch, _, heads, width = x.shape
    return x.new_empty(batch, heads, width, B.shape[3], dtype=torch.float32)


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
