"""For mixers with a short causal convolution: the documents under its taps; its weights are in ``layers``.

A shift by one token is a convolution of two taps.

Shape legend: B batch, L tokens of the window, W convolution taps, C convolved channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks._utils.padding import PaddingPermutation, permute
from implicit_blocks.layers import DepthwiseConv
from implicit_blocks.windows import Window

__all__ = ["DepthwiseConv", "DocumentsAround", "PaddingPermutation", "permute"]


class DocumentsAround(NamedTuple):
    """The documents of a window's tokens and of the tokens before it; None for a single document.

    ``tail_documents_BW`` (B, W − 1) are the documents of the last real tokens before the window, the latest
    last; where there are fewer, that of the window's first token. ``initial_document_B`` (B,) is the last of
    them, None for a window that begins its sequence.
    """

    documents_BL: Tensor | None = None
    tail_documents_BW: Tensor | None = None
    initial_document_B: Tensor | None = None

    @classmethod
    def of(cls, window: Window, *, taps: int, real: PaddingPermutation | None) -> DocumentsAround:
        """Return the documents around a window, whose real tokens ``real`` moves to the front, if given."""
        documents, tail, before = (
            window.documents_BL,
            window.documents_before(taps - 1),
            window.documents_before(1),
        )
        if documents is None or tail is None or before is None:
            return cls()
        initial = None if window.start == 0 else before[:, 0]
        if real is not None:
            documents = real.documents(documents, initial)
        missing = documents[:, :1].expand(-1, taps - 1 - tail.shape[1])
        return cls(documents, torch.cat((missing, tail), dim=1), initial)
