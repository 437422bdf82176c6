"""Softmax cross-entropy of rows of logits: loss, most likely token, and the gradient in place.

Plain operators make about ten passes over a chunk's logits in float32; this kernel reads them twice and
writes them once, in their own type: 10 ms less per step at 16,384 tokens and 50,288 words (H100).

Shapes: T tokens, V vocabulary, W its padded width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import exp


def softmax_cross_entropy_(
    logits_TW: Tensor,
    labels_T: Tensor,
    *,
    vocabulary: int,
    ignored: int,
    loss_T: Tensor,
    predictions_T: Tensor,
    differentiate: bool,
) -> None:
    """Write each token's loss and most likely word; with ``differentiate`` replace logits by the gradient.

    Args:
        logits_TW: contiguous; entries from V on are padding, and 0 in the gradient.
        labels_T: int64; ``ignored`` has neither loss nor gradient, other labels outside the vocabulary have
            the loss NaN.
        vocabulary: V.
        ignored: label of tokens without loss.
        loss_T: float32, output.
        predictions_T: int64, output.
        differentiate: whether to compute the gradient.

    """
    tokens, width = logits_TW.shape
    with torch.cuda.device(logits_TW.device):
        _rows[(tokens,)](
            logits_TW,
            labels_T,
            loss_T,
            predictions_T,
            vocabulary,
            width,
            ignored,
            GRADIENT=differentiate,
            BLOCK=min(8192, triton.next_power_of_2(width)),
            num_warps=16,
        )


@triton.jit
def _rows(
    logits_ptr, label_ptr, loss_ptr, prediction_ptr, V, W, ignored, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * W
    label = tl.load(label_ptr + token)
    scored = label != ignored
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int64)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
        top, where = tl.max(value, axis=0, return_indices=True)
        best = tl.where(top > largest, first + where, best)
        new = tl.maximum(largest, top)
        total = total * tl.exp(largest - new) + tl.sum(exp(value - new))
        largest = new
    normalizer = largest + tl.log(total)
    known = (label >= 0) & (label < V)
    target = tl.load(logits_ptr + tl.where(known, label, 0)).to(tl.float32)
    target = tl.where(known, target, float("nan"))
    tl.store(loss_ptr + token, tl.where(scored, normalizer - target, 0.0))
    tl.store(prediction_ptr + token, best)
    if GRADIENT:
        # every warp must read the target's logit before it is overwritten
        tl.debug_barrier()
        for first in range(0, W, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(logits_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
            gradient = exp(value - normalizer) - tl.where(column == label, 1.0, 0.0)
            gradient = tl.where(scored & (column < V), gradient, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < W)
