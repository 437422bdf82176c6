"""Cross-entropy of a linear head in chunks of tokens, without storing all logits.

Shape legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # conventional name

from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import first_derivatives_only

__all__ = ["linear_cross_entropy"]

CHUNK_ENTRIES = 1 << 27  # logits per chunk: 512 MiB in float32; twice as many logits in bfloat16
ROWS = 256  # chunks are multiples of this, so that matrix products fill their tiles
IGNORED = -100  # label of tokens without loss
PADDING = 64  # odd vocabularies misalign bfloat16 rows, which excludes the fast matrix kernels


def linear_cross_entropy(z_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of ``z Wᵀ`` with the labels, and the most likely tokens, (T,) int64.

    Gradients are computed together with the loss, chunk by chunk, and only scaled in backward: memory holds
    the logits of one chunk, and there are three products with the head, without recomputation. The products
    use the head's type, or autocast's; softmax and loss use float32 or better. Backward raises an error if
    second derivatives are requested (``create_graph=True``).

    Args:
        z_TD: input of the head.
        weight_VD: weight of the head.
        labels_T: int64; tokens labeled −100 have no loss. Other labels outside the vocabulary raise an
            error on a CPU, and make the loss NaN on a GPU, to avoid a synchronization.

    """
    device = z_TD.device.type
    if torch.is_autocast_enabled(device) and z_TD.dtype != torch.float64:
        compute = torch.get_autocast_dtype(device)
    else:
        compute = weight_VD.dtype
    loss, predictions = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        z_TD, weight_VD, labels_T, compute
    )
    return loss, predictions


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss with precomputed gradients."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, labels: Tensor, compute: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(z.device.type, enabled=False):
            vocabulary = weight.shape[0]
            padding = -vocabulary % PADDING if z.is_cuda else 0
            head = F.pad(weight.to(compute), (0, 0, 0, padding))
            wide = torch.promote_types(compute, torch.float32)
            want_z, want_weight = ctx.needs_input_grad[:2]
            grad_z = torch.empty_like(z) if want_z else None
            grad_weight = torch.zeros(head.shape, dtype=wide, device=z.device) if want_weight else None
            loss = torch.zeros((), dtype=wide, device=z.device)
            predictions = torch.empty_like(labels)
            fused = z.is_cuda and available("triton") and compute != torch.float64
            for part in _chunks(z.shape[0], head.shape[0] // (2 if fused else 1)):
                z_part, label = z[part].to(compute), labels[part]
                logits = z_part @ head.mT
                differentiate = want_z or want_weight
                score = _score_fused if fused else _score
                part_loss, gradient, predictions[part] = score(logits, label, vocabulary, differentiate)
                loss += part_loss
                if grad_z is not None:
                    grad_z[part] = gradient @ head
                if grad_weight is not None:
                    _accumulate_(grad_weight, gradient.mT, z_part)
            if grad_weight is not None:
                grad_weight = grad_weight[:vocabulary].to(weight.dtype)
            ctx.save_for_backward(grad_z, grad_weight)
            ctx.mark_non_differentiable(predictions)
            return loss, predictions

    @staticmethod
    @first_derivatives_only(
        "the fused cross entropy",
        "compute torch.nn.functional.cross_entropy of the logits instead",
    )
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_z, grad_weight = ctx.saved_tensors
        return (
            None if grad_z is None else grad_z * g.to(grad_z.dtype),
            None if grad_weight is None else grad_weight * g.to(grad_weight.dtype),
            None,
            None,
        )


def _chunks(tokens: int, width: int) -> list[slice]:
    """Divide the tokens into equal chunks whose logits stay below the limit."""
    most = max(1, CHUNK_ENTRIES // width)
    parts = max(1, -(-tokens // most))
    rows = max(1, -(-tokens // parts))
    whole = -(-rows // ROWS) * ROWS
    if whole <= most:
        rows = whole
    return [slice(first, first + rows) for first in range(0, tokens, rows)]


def _score(
    logits: Tensor, label: Tensor, vocabulary: int, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss of a chunk, its gradient in the logits, and the most likely tokens."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scored = label != IGNORED
    index = label.where(scored, 0)[:, None]
    values = wide[:, :vocabulary]
    predictions = values.argmax(1)
    normalizer = values.logsumexp(1, keepdim=True)
    # Masked, not multiplied: ignored entries may have overflowed.
    loss = (normalizer - values.gather(1, index)).squeeze(1).where(scored, 0.0).sum()
    if not differentiate:
        return loss, logits, predictions
    values.sub_(normalizer).exp_()
    values.scatter_add_(1, index, values.new_full(index.shape, -1.0))
    values.masked_fill_(~scored[:, None], 0.0)
    wide[:, vocabulary:] = 0.0
    return loss, wide.to(logits.dtype), predictions


def _score_fused(
    logits: Tensor, label: Tensor, vocabulary: int, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same with one kernel, which overwrites the logits with the gradient."""
    from implicit_blocks.ops.kernels.cross_entropy import softmax_cross_entropy_

    loss = torch.empty(label.shape, dtype=torch.float32, device=label.device)
    predictions = torch.empty_like(label)
    softmax_cross_entropy_(
        logits,
        label,
        vocabulary=vocabulary,
        ignored=IGNORED,
        loss_T=loss,
        predictions_T=predictions,
        differentiate=differentiate,
    )
    return loss.sum(), logits, predictions


def _accumulate_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to a total of a wider type, in one pass if the device supports it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
