"""The chunked SSD scan with a hand-written backward pass: the plain default.

Same mathematics as :mod:`implicit_blocks.ops.ssd.chunked_autograd`, which is the one to read first. What is
kept for the backward pass is the inputs and a few states; everything of size Q × Q is computed again.
"""

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.chunked_autograd import ssd_chunked_autograd
from implicit_blocks.ops.ssd.step import ssd_step
from implicit_blocks.ops.ssd.tiles import BackwardRows, Rows
from implicit_blocks.ops.ssd.window import DecayGradients, Inputs, Window
from implicit_blocks.ops.transforms import is_transformed, without_autocast

# Chunks to a kept state. Keeping every state costs twice the memory of x at 130M widths. The backward pass
# computes those between again, in the cache: a quarter of the memory for 3 % more time.
KEEP_EVERY = 4


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
    inputs = Inputs(*tensors, documents_BL, initial_document_B)
    needs_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*inputs[:5], initial_state_BHPN)
    )
    if not needs_gradient:
        window = Window(inputs, chunk_size)
        y, h, _ = _scan(window, initial_state_BHPN, return_final_state=return_final_state, keep_states=False)
        return y, h
    arguments = (*inputs, initial_state_BHPN, chunk_size, return_final_state)
    y, h = _ChunkedScan.apply(*arguments)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return y, h


def _scan(
    window: Window, initial: Tensor | None, *, return_final_state: bool, keep_states: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, the final state, and, if wanted, the state before every KEEP_EVERY-th chunk but the first."""
    x, dtype = window.inputs.x, window.dtype
    y = torch.empty(window.x_BKQHP.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(window.state_shape, dtype=dtype, device=x.device) if return_final_state else None
    kept = None
    if keep_states:
        kept = torch.empty(
            (window.chunks - 1) // KEEP_EVERY, *window.state_shape, dtype=dtype, device=x.device
        )
    for rows in window.row_slices():
        tiles = Rows(window, rows)
        h = _rows_of(initial, rows, dtype)
        buffer = None
        for k, y_BQHP in enumerate(y[rows].unbind(1)):
            tiles.outputs(k, h, y_BQHP)
            following = k + 1
            if following == window.chunks:
                if final is not None:
                    tiles.next_state(k, h, final[rows])
                break
            if kept is not None and following % KEEP_EVERY == 0:
                after = kept[following // KEEP_EVERY - 1, rows]
            else:  # in place where possible, but neither into the caller's state nor into a kept one
                after = buffer = tiles.new_state() if buffer is None else buffer
            tiles.next_state(k, h, after)
            h = after
    return y.flatten(1, 2)[:, : window.length], final, kept


def _rows_of(state: Tensor | None, rows: slice, dtype: torch.dtype) -> Tensor | None:
    return None if state is None else state[rows].to(dtype).contiguous()


class _ChunkedScan(torch.autograd.Function):
    """The scan as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        *given, initial, chunk_size, return_final_state = arguments
        inputs = Inputs(*given)
        window = Window(inputs, chunk_size)
        y, final, kept = _scan(window, initial, return_final_state=return_final_state, keep_states=True)
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
            return *_differentiable_gradients(inputs, initial, ctx.chunk_size, dy, dfinal), None, None
        with without_autocast(inputs.x.device.type):
            window = Window(inputs, ctx.chunk_size)
            return *_gradients(window, initial, kept, dy, dfinal), None, None


def _gradients(
    window: Window, initial: Tensor | None, kept: Tensor, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Walk the tiles backwards; return the gradients of the inputs and of the initial state."""
    inputs, dtype = window.inputs, window.dtype
    dy_BKQHP = window.cut(torch.zeros_like(inputs.x) if dy is None else dy)
    dx_BKQHP = torch.empty(dy_BKQHP.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    dB_KbQN, dC_KbQN = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (window.B_KbQN, window.C_KbQN)
    )
    dgram_KbQQ = torch.empty_like(window.gram_KbQQ)
    decay = DecayGradients.zeros(window)
    dinitial = None if initial is None else torch.empty(initial.shape, dtype=dtype, device=initial.device)
    for rows in window.row_slices():
        tiles = BackwardRows(window, rows, None if dfinal is None else dfinal[rows])
        groups = tiles.groups_rows
        dy_by_chunk, dx_by_chunk = dy_BKQHP[rows].unbind(1), dx_BKQHP[rows].unbind(1)
        recomputed = [tiles.new_state() for _ in range(min(KEEP_EVERY, window.chunks) - 1)]
        for start in reversed(range(0, window.chunks, KEEP_EVERY)):
            h = kept[start // KEEP_EVERY - 1, rows] if start > 0 else _rows_of(initial, rows, dtype)
            before = [h]
            for k in range(start, min(start + KEEP_EVERY, window.chunks) - 1):
                tiles.next_state(k, before[-1], recomputed[k - start])
                before.append(recomputed[k - start])
            for k in reversed(range(start, start + len(before))):
                tiles.gradients(
                    k,
                    before[k - start],
                    dy_by_chunk[k],
                    dx_by_chunk[k],
                    dB_KbQN[k, groups],
                    dC_KbQN[k, groups],
                    dgram_KbQQ[k, groups, None],
                    decay,
                )
        if dinitial is not None:
            dinitial[rows] = tiles.dh_BHPN
    ddt, dA = window.finish_gradients(decay, dgram_KbQQ)
    dB_KbQN += dgram_KbQQ.mT @ window.C_KbQN
    dC_KbQN += dgram_KbQQ @ window.B_KbQN
    return (
        dx_BKQHP.flatten(1, 2)[:, : window.length],
        ddt.to(inputs.dt.dtype),
        dA.to(inputs.A.dtype),
        window.from_chunks(dB_KbQN).to(inputs.B.dtype),
        window.from_chunks(dC_KbQN).to(inputs.C.dtype),
        None,
        None,
        None if initial is None or dinitial is None else dinitial.to(initial.dtype),
    )


def _differentiable_gradients(
    inputs: Inputs, initial: Tensor | None, chunk_size: int, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the same with operators that can be differentiated once more (``create_graph=True``)."""
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
