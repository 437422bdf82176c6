"""Mamba2's state-space scan (SSD): the choice of a backend, and the plain chunked implementation.

T. Dao and A. Gu, "Transformers are SSMs", ICML 2024. The plain implementation computes what
:mod:`implicit_blocks.ops.ssd.chunked_autograd` does, which is easier to read, with a hand-written backward
pass. It keeps the inputs and a few states for backward and recomputes everything of size Q × Q.

Shapes: B batch, L length, H heads, P head width, G groups of heads that share B and C (H is a multiple of G),
N state width, Q tokens per chunk.
"""

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.backends import AUTO, Backend, Operation, is_transformed, without_autocast
from implicit_blocks.ops.ssd import fla, mamba_ssm
from implicit_blocks.ops.ssd.chunked_autograd import ssd_chunked_autograd
from implicit_blocks.ops.ssd.recurrence import ssd_recurrence
from implicit_blocks.ops.ssd.tiles import Inputs, Window, accumulation_dtype, scan_tiles, tile_gradients


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
        chunk_size: number of tokens per dense product; it affects speed and memory, and values only by
            rounding.
        documents_BL: the number of each token's document, non-decreasing along a row; the state is reset
            where it changes. None: each row is one document.
        initial_document_B: the document of the initial state; None: the first token's.
        return_final_state: whether to return the state after the last token.
        backend: ``auto`` uses mamba-ssm's kernels or fla's where they are installed and support the inputs (a
            GPU, 16-bit floats), else ``torch``; a name of ``SSD.names`` uses that backend or raises.

    Returns:
        ``y_BLHP`` in the dtype of x, and on request the final state, else None. The state is in float32, or
        in float64 if any input is; decays and states are accumulated in that dtype.

    Raises:
        ValueError: for an unknown backend or one that does not support these inputs, or shapes that do not
            fit together.
        ImportError: for a requested backend whose package is missing.

    """
    _check_shapes(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, chunk_size, documents_BL)
    scan = SSD.choose(backend, x_BLHP, initial_state_BHPN, documents_BL).run
    with without_autocast(x_BLHP.device.type):  # the backends choose their dtypes themselves
        found: tuple[Tensor, Tensor | None] = scan(
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
            f"{heads} heads cannot be divided into {B.shape[2]} groups; choose a divisor of {heads}"
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


# ------------------------------------------------------------------------------------ plain implementation


def ssd_chunked(
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
) -> tuple[Tensor, Tensor | None]:
    """Scan tile by tile (Mamba2, section 6), a single token by one step of the recurrence.

    Arguments and results are those of :func:`implicit_blocks.ops.ssd.ssd`. Time and memory are linear in L.
    Second derivatives, forward mode, ``torch.func`` and ``torch.compile`` go through
    :func:`ssd_chunked_autograd`.
    """
    tensors = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN)
    options: dict[str, Any] = {
        "initial_state_BHPN": initial_state_BHPN,
        "documents_BL": documents_BL,
        "initial_document_B": initial_document_B,
        "return_final_state": return_final_state,
    }
    if x_BLHP.shape[1] == 1:
        return ssd_step(*tensors, **options)
    if is_transformed():
        return ssd_chunked_autograd(*tensors, chunk_size=chunk_size, **options)
    needs_gradient = any(t is not None and t.requires_grad for t in (*tensors, initial_state_BHPN))
    keep_states = needs_gradient and torch.is_grad_enabled()
    given = (*tensors, documents_BL, initial_document_B, initial_state_BHPN)
    y, h = _ChunkedScan.apply(*given, chunk_size, return_final_state, keep_states)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return y, h


def ssd_step(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None = None,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scan a window of length 1 by one step of the recurrence, in a handful of operators.

    Arguments and results are those of :func:`implicit_blocks.ops.ssd.ssd`, L = 1.
    """
    batch, _, heads, width = x_BLHP.shape
    groups, d_state = B_BLGN.shape[2:]
    dtype = accumulation_dtype(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN)
    # Groups beside the batch, the heads of a group and their width folded: (B·G, R·P, ·).
    dt_BH1 = dt_BLH.to(dtype).view(batch, heads, 1)
    x_dt = (x_BLHP.to(dtype).reshape(batch, heads, width) * dt_BH1).view(batch * groups, -1, 1)
    B_b1N = B_BLGN.to(dtype).reshape(batch * groups, 1, d_state)
    C_bN1 = C_BLGN.to(dtype).reshape(batch * groups, d_state, 1)
    if initial_state_BHPN is None:
        before = x_dt.new_zeros(batch, heads, width, d_state)
    else:
        before = initial_state_BHPN.to(dtype)
    if documents_BL is not None and initial_document_B is not None:
        same_B = documents_BL[:, 0] == initial_document_B
        before = torch.where(same_B[:, None, None, None], before, 0.0)
    decay_BH11 = torch.exp(dt_BH1 * A_H.to(dtype)[:, None])[..., None]
    h_bFN = (before * decay_BH11).reshape(x_dt.shape[0], -1, d_state) + x_dt * B_b1N
    y_BLHP = torch.bmm(h_bFN, C_bN1).view(x_BLHP.shape).to(x_BLHP.dtype)
    return y_BLHP, h_bFN.view(batch, heads, width, d_state) if return_final_state else None


class _ChunkedScan(torch.autograd.Function):
    """The scan as one autograd node."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *given, initial, chunk_size, return_final_state, keep_states = arguments
        inputs = Inputs(*given)
        window = Window(inputs, chunk_size)
        y, final, kept = scan_tiles(
            window, initial, return_final_state=return_final_state, keep_states=keep_states
        )
        ctx.save_for_backward(*inputs, initial, kept)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *output_gradients: Any) -> tuple[Tensor | None, ...]:
        dy, dfinal = output_gradients
        *given, initial, kept = ctx.saved_tensors
        inputs = Inputs(*given)
        if torch.is_grad_enabled():
            return *_differentiable_gradients(inputs, initial, ctx.chunk_size, dy, dfinal), None, None, None
        with without_autocast(inputs.x.device.type):
            window = Window(inputs, ctx.chunk_size)
            return *tile_gradients(window, initial, kept, dy, dfinal), None, None, None


def _differentiable_gradients(
    inputs: Inputs, initial: Tensor | None, chunk_size: int, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the same gradients with differentiable operators, for ``create_graph=True``."""
    y, final = ssd_chunked_autograd(
        *inputs[:5],
        initial_state_BHPN=initial,
        chunk_size=chunk_size,
        documents_BL=inputs.documents,
        initial_document_B=inputs.initial_document,
        return_final_state=True,
    )
    outputs = [(o, g) for o, g in ((y, dy), (final, dfinal)) if o is not None and g is not None]
    wanted = [t for t in (*inputs[:5], initial) if t is not None and t.requires_grad]
    gradients = iter(
        torch.autograd.grad(
            [o for o, _ in outputs], wanted, [g for _, g in outputs], create_graph=True, allow_unused=True
        )
    )
    given = [next(gradients) if t is not None and t.requires_grad else None for t in (*inputs[:5], initial)]
    return *given[:5], None, None, given[5]


# ------------------------------------------------------------------------------------ backends


SSD = Operation(
    "ssd",
    mamba_ssm.BACKEND,
    fla.BACKEND,
    Backend("torch", ssd_chunked),
    # References for the tests: readable and slow.
    Backend("chunked_autograd", ssd_chunked_autograd),
    Backend("recurrence", ssd_recurrence),
)
