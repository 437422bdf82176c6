"""The objective and the penalty of a model's spec as the loss of the transformers classes.

Shape legend: B batch, L tokens of this call, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.parts import mean_cross_entropy


def objective_loss(
    lm: LanguageModel, head: nn.Module, encoded: Encoded, labels_BL: Tensor, *, items: Tensor | int | None
) -> Tensor | None:
    """Return the objective and the penalty of the gradient in training; None where neither changes the loss.

    Args:
        lm: the library's model.
        head: the head of the transformers class, which owns it; it returns logits without their scale.
        encoded: the output of ``lm.encode`` for all tokens of the call, with the iterates.
        labels_BL: (B, L), not shifted, as everywhere in transformers; −100 is ignored.
        items: the number of labeled tokens in all micro-batches of a step, over which the loss is averaged
            (``num_items_in_batch``); None: those of this call.

    """
    penalty = None if encoded.solution is None else encoded.solution.penalty
    if not isinstance(lm, ImplicitLM) or not lm.training or (lm.objective is None and penalty is None):
        return None
    shifted_BL = F.pad(labels_BL.long()[:, 1:], (0, 1), value=-100)
    model = cast(ImplicitLM, WithHead(lm, head))
    logits = model.predict(encoded.hidden_BLD)
    loss = mean_cross_entropy(logits, shifted_BL)
    if lm.objective is not None:
        output = LMOutput(logits, loss=loss, solution=encoded.solution)
        loss = lm.objective.loss(model, encoded, output, shifted_BL)
    if penalty is not None:
        loss = loss + penalty.mean()
    if items is None:
        return loss
    return loss * (shifted_BL != -100).sum() / torch.as_tensor(items, device=loss.device)


class WithHead:
    """The library's model as objectives and exit criteria read it, with the head of the transformers class.

    The library's model of a transformers class has no head of its own, even where the head is not tied.
    """

    def __init__(self, lm: ImplicitLM, head: nn.Module) -> None:
        self._lm, self._head = lm, head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the head, (V, D)."""
        return cast(Tensor, self._head.weight)

    def predict(self, hidden: Tensor) -> Tensor:
        """Return the logits, (…, V), of the output of ``encode``, (…, D)."""
        return self._lm.scale_logits(at_least_float32(self._head(hidden)))
