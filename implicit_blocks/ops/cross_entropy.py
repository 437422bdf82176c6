"""Cross-entropy of a linear head, in chunks of tokens, so that the logits never exist as a whole.

Shape legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

__all__ = ["linear_cross_entropy"]

CHUNK_ENTRIES = 1 << 27  # logits of a chunk: 512 MiB in float32
PADDING = 64  # odd vocabularies misalign bfloat16 rows and lose the matrix units' fast kernels


def linear_cross_entropy(
    z_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, ignored: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of ``z Wᵀ`` against the labels, and the most likely tokens, (T,) int64.

    Gradients are computed with the loss, chunk by chunk, and only scaled in backward: the memory is one
    chunk's logits, and the head is multiplied three times, never again. The products run in the head's type,
    or autocast's; softmax and loss in float32 or better. Second derivatives are not offered.

    Args:
        z_TD: what the head reads.
        weight_VD: the head.
        labels_T: int64; ``ignored`` is not scored.
        ignored: the label that isn't scored.

    """
    device = z_TD.device.type
    if torch.is_autocast_enabled(device) and z_TD.dtype != torch.float64:
        compute = torch.get_autocast_dtype(device)
    else:
        compute = weight_VD.dtype
    loss, predictions = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        z_TD, weight_VD, labels_T, ignored, compute
    )
    return loss, predictions


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss with its gradients ready."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, labels: Tensor, ignored: int, compute: torch.dtype
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
            rows = max(1, CHUNK_ENTRIES // head.shape[0])
            for first in range(0, z.shape[0], rows):
                part = slice(first, first + rows)
                z_part, label = z[part].to(compute), labels[part]
                scored = label != ignored
                index = label.where(scored, 0)[:, None]
                logits = (z_part @ head.mT).to(wide)
                values = logits[:, :vocabulary]
                predictions[part] = values.argmax(1)
                normalizer = values.logsumexp(1, keepdim=True)
                loss += ((normalizer - values.gather(1, index)).squeeze(1) * scored).sum()
                if not (want_z or want_weight):
                    continue
                values.sub_(normalizer).exp_()
                values.scatter_add_(1, index, values.new_full(index.shape, -1.0))
                values.mul_(scored[:, None])
                logits[:, vocabulary:] = 0.0
                gradient = logits.to(compute)
                if grad_z is not None:
                    grad_z[part] = gradient @ head
                if grad_weight is not None:
                    grad_weight += gradient.mT @ z_part
            if grad_weight is not None:
                grad_weight = grad_weight[:vocabulary].to(weight.dtype)
            ctx.save_for_backward(grad_z, grad_weight)
            ctx.mark_non_differentiable(predictions)
            return loss, predictions

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_z, grad_weight = ctx.saved_tensors
        return (
            None if grad_z is None else grad_z * g.to(grad_z.dtype),
            None if grad_weight is None else grad_weight * g.to(grad_weight.dtype),
            None,
            None,
            None,
        )
