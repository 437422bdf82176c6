"""Mamba2's state-space scan (SSD), with a choice of backends behind one function.

"Transformers are SSMs" (Dao and Gu, 2024). Shapes: B batch, L length, H heads, P head width, G groups of
heads that share B and C (H is a multiple of G), N state width.
"""

from functools import wraps
from typing import Any

from torch import Tensor

from implicit_blocks.ops.backends import AUTO, Backend, Operation
from implicit_blocks.ops.ssd import fla, mamba_ssm
from implicit_blocks.ops.ssd.chunked import ssd_chunked
from implicit_blocks.ops.ssd.chunked_autograd import ssd_chunked_autograd
from implicit_blocks.ops.ssd.recurrence import ssd_recurrence
from implicit_blocks.ops.transforms import without_autocast

__all__ = ["SSD", "ssd"]


def _own_precision(scan: Any) -> Any:
    """Switch autocast off within a plain backend, which chooses its types itself."""

    @wraps(scan)
    def run(x_BLHP: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        with without_autocast(x_BLHP.device.type):
            found: tuple[Tensor, Tensor | None] = scan(x_BLHP, *tensors, **options)
            return found

    return run


SSD = Operation(
    "ssd",
    mamba_ssm.BACKEND,
    fla.BACKEND,
    Backend("torch", _own_precision(ssd_chunked)),
    # What the others are tested against: readable, and slow.
    Backend("chunked_autograd", _own_precision(ssd_chunked_autograd)),
    Backend("recurrence", _own_precision(ssd_recurrence)),
)


def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None = None,
    chunk_size: int = 64,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
    return_final_state: bool = False,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """Scan ``h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_tᵀ``, ``y_t = h_t C_t`` over a window of tokens.

    The ``D`` skip connection, the convolution and softplus are the caller's. A token with ``dt == 0`` leaves
    the state untouched (padding). The state given is never written to.

    Args:
        x_BLHP: inputs, any float type; any strides. L is at least 1.
        dt_BLH: step sizes, at least 0 (softplus already applied).
        A_H: decay rates, negative.
        B_BLGN: input maps, shared by the H/G heads of a group.
        C_BLGN: output maps, likewise.
        initial_state_BHPN: the state after the tokens before the window; None is zero.
        chunk_size: tokens handled by dense products at once; a matter of speed and memory, not of values
            beyond rounding.
        documents_BL: a number for each token's document, non-decreasing along a row; the state is cut where
            it changes. None: each row is one document.
        initial_document_B: the document that the initial state belongs to; None: the first token's.
        return_final_state: whether to return the state after the last token.
        backend: ``auto`` takes mamba-ssm's kernels or fla's where they are installed and suit the inputs (a
            GPU, 16-bit floats), else ``torch``; a name of ``SSD.names`` takes that one or raises.

    Returns:
        ``y_BLHP`` in the type of x, and the final state (in float32, or in float64 if any input is), or
        None where it was not asked for. Decays and states are accumulated in that type whatever the inputs'.

    Raises:
        ValueError: for an unknown backend or one that can't run these inputs, or shapes that don't fit
            together.
        ImportError: for a backend asked for by name whose package is missing.

    """
    _check_shapes(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, chunk_size, documents_BL)
    found: tuple[Tensor, Tensor | None] = SSD.choose(backend, x_BLHP, initial_state_BHPN, documents_BL).run(
        x_BLHP,
        dt_BLH,
        A_H,
        B_BLGN,
        C_BLGN,
        initial_state_BHPN=initial_state_BHPN,
        chunk_size=chunk_size,
        documents_BL=documents_BL,
        initial_document_B=initial_document_B,
        return_final_state=return_final_state,
    )
    return found


def _check_shapes(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    chunk_size: int,
    documents: Tensor | None,
) -> None:
    if x.ndim != 4 or x.shape[1] < 1:
        raise ValueError(f"x must be (B, L, H, P) with L at least 1, but has shape {tuple(x.shape)}")
    batch, length, heads, width = x.shape
    if B.ndim != 4 or B.shape[:2] != (batch, length) or B.shape != C.shape:
        raise ValueError(
            f"B and C must both be (B, L, G, N) with (B, L) = {(batch, length)}, "
            f"but have shapes {tuple(B.shape)} and {tuple(C.shape)}"
        )
    if heads % B.shape[2]:
        raise ValueError(
            f"{heads} heads cannot be shared out to {B.shape[2]} groups; choose a divisor of {heads}"
        )
    if dt.shape != (batch, length, heads) or A.shape != (heads,):
        raise ValueError(
            f"dt must have shape {(batch, length, heads)} and A {(heads,)}, to go with x of shape "
            f"{tuple(x.shape)}, but they have {tuple(dt.shape)} and {tuple(A.shape)}"
        )
    if state is not None and state.shape != (batch, heads, width, B.shape[3]):
        raise ValueError(
            f"the initial state must have shape (B, H, P, N) = {(batch, heads, width, B.shape[3])}, "
            f"but has {tuple(state.shape)}"
        )
    if documents is not None and documents.shape != (batch, length):
        raise ValueError(f"documents must have shape {(batch, length)}, but have {tuple(documents.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, but is {chunk_size}")
