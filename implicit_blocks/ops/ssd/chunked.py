"""The chunked SSD scan with a hand-written backward pass: the plain default.

Same mathematics as :mod:`implicit_blocks.ops.ssd.chunked_autograd`, which is the one to read first. What is
kept for the backward pass is the inputs and one state a chunk; everything of size Q × Q is computed again.
"""

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.chunked_autograd import ssd_chunked_autograd
from implicit_blocks.ops.ssd.step import ssd_step
from implicit_blocks.ops.ssd.tiles import Gradients, Inputs, Tile


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
    Second derivatives, forward mode and ``torch.func`` go through :func:`ssd_chunked_autograd`.
    """
    if x_BLHP.shape[1] == 1:
        return ssd_step(
            x_BLHP,
            dt_BLH,
            A_H,
            B_BLGN,
            C_BLGN,
            initial_state_BHPN=initial_state_BHPN,
            documents_BL=documents_BL,
            initial_document_B=initial_document_B,
            return_final_state=return_final_state,
        )
    if _is_transformed():
        return ssd_chunked_autograd(
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
    inputs = Inputs(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, documents_BL, initial_document_B)
    needs_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*inputs[:5], initial_state_BHPN)
    )
    if not needs_gradient:
        y, h, _ = _scan(inputs, initial_state_BHPN, chunk_size, return_final_state, keep_states=False)
        return y, h
    y, h = _ChunkedScan.apply(*inputs, initial_state_BHPN, chunk_size, return_final_state)
    return y, h


def _is_transformed() -> bool:
    """Whether a function transform or forward-mode differentiation is under way.

    torch has no public question for it; ``autograd.Function.apply`` asks the same.
    """
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _scan(
    inputs: Inputs, initial: Tensor | None, chunk_size: int, return_final_state: bool, *, keep_states: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, the final state, and, if wanted, the states before each chunk but the first, (K-1, B, H, P, N)."""
    x = inputs.x_BLHP
    chunks = inputs.chunks(chunk_size)
    batch, _, heads, width = x.shape
    state_shape = (batch, heads, width, inputs.B_BLGN.shape[3])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(state_shape, dtype=inputs.dtype, device=x.device) if return_final_state else None
    states = None
    if keep_states:
        states = torch.empty(len(chunks) - 1, *state_shape, dtype=inputs.dtype, device=x.device)
    for rows in inputs.row_slices(chunk_size):
        h = None if initial is None else initial[rows].to(inputs.dtype).contiguous()
        for k, chunk in enumerate(chunks):
            tile = Tile(inputs, rows, chunk)
            tile.outputs(h, y)
            last = k == len(chunks) - 1
            if not last or return_final_state:
                h = tile.next_state(h)
            if not last and states is not None:
                states[k, rows] = h
        if final is not None and h is not None:
            final[rows] = h
    return y, final, states


class _ChunkedScan(torch.autograd.Function):
    """The scan as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *given, initial, chunk_size, return_final_state = arguments
        inputs = Inputs(*given)
        y, final, states = _scan(inputs, initial, chunk_size, return_final_state, keep_states=True)
        ctx.save_for_backward(*inputs, initial, states)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *output_gradients: Any) -> tuple[Tensor | None, ...]:
        dy, dfinal = output_gradients
        *given, initial, states = ctx.saved_tensors
        inputs = Inputs(*given)
        if torch.is_grad_enabled():
            return *_differentiable_gradients(inputs, initial, ctx.chunk_size, dy, dfinal), None, None
        with torch.autocast(inputs.x_BLHP.device.type, enabled=False):
            return *_gradients(inputs, initial, states, ctx.chunk_size, dy, dfinal), None, None


def _gradients(
    inputs: Inputs,
    initial: Tensor | None,
    states: Tensor,
    chunk_size: int,
    dy: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Walk the tiles backwards; return the gradients of the inputs and of the initial state."""
    dtype = inputs.dtype
    if dy is None:
        dy = torch.zeros_like(inputs.x_BLHP)
    out = Gradients(
        *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.x_BLHP, inputs.dt_BLH)),
        torch.zeros(inputs.A_H.shape, dtype=dtype, device=inputs.A_H.device),
        *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.B_BLGN, inputs.C_BLGN)),
    )
    dinitial = None if initial is None else torch.empty(initial.shape, dtype=initial.dtype, device=dy.device)
    chunks = inputs.chunks(chunk_size)
    for rows in inputs.row_slices(chunk_size):
        dh = None if dfinal is None else dfinal[rows].to(dtype).contiguous()
        for k in reversed(range(len(chunks))):
            h = None
            if k > 0:
                h = states[k - 1, rows]
            elif initial is not None:
                h = initial[rows].to(dtype).contiguous()
            dh = Tile(inputs, rows, chunks[k]).gradients(h, dy, dh, out, want_state=h is not None)
        if dinitial is not None and dh is not None:
            dinitial[rows] = dh
    return out.x_BLHP, out.dt_BLH, out.A_H.to(inputs.A_H.dtype), out.B_BLGN, out.C_BLGN, None, None, dinitial


def _differentiable_gradients(
    inputs: Inputs, initial: Tensor | None, chunk_size: int, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the same with operators that can be differentiated once more (``create_graph=True``)."""
    y, final = ssd_chunked_autograd(
        *inputs[:5],
        initial_state_BHPN=initial,
        chunk_size=chunk_size,
        documents_BL=inputs.documents_BL,
        initial_document_B=inputs.initial_document_B,
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
