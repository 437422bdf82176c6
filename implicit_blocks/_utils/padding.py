"""Permutations that move the real tokens of each row to its front and padding to its end.

Operations that count the tokens between two others (a convolution's taps, a shift by one token, a limited
window) must not count padding. A mixer can permute the real tokens to the front, work on tokens without gaps,
and permute its result back.

Shape legend: B batch, L tokens of a window, S tokens before it, F features.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_Permuted = TypeVar("_Permuted", Tensor, Tensor | None)


class PaddingPermutation(NamedTuple):
    """The permutation of the tokens of a window with padding, and its inverse.

    ``order_BL`` and ``inverse_BL`` (B, L) int64 move tokens to the front and back; ``valid_BL`` (B, L) bool
    marks the real ones among the permuted tokens, and ``count_B`` (B,) is their number. ``last_BL`` (B, L)
    int64 is each permuted token's own index; for padding that of the row's last real token, or -1.
    """

    order_BL: Tensor
    inverse_BL: Tensor
    valid_BL: Tensor
    count_B: Tensor
    last_BL: Tensor

    @classmethod
    def of(cls, valid_BL: Tensor) -> PaddingPermutation:
        """Return the permutation for tokens that are real where ``valid_BL`` (B, L) bool is True."""
        order = (~valid_BL).to(torch.int8).argsort(dim=1, stable=True)
        count = valid_BL.sum(1)
        index = torch.arange(valid_BL.shape[1], device=valid_BL.device)
        last = torch.minimum(index, count[:, None] - 1)
        return cls(order, order.argsort(1), index < count[:, None], count, last)

    def documents(self, documents_BL: Tensor, before_B: Tensor | None) -> Tensor:
        """Return the documents of the permuted tokens, (B, L) int64.

        Padding gets the document of the last real token, so that it starts no new one. In rows without a real
        token it gets that of ``before_B`` (B,), the last token before the window.
        """
        permuted = documents_BL.gather(1, self.order_BL).gather(1, self.last_BL.clamp(min=0))
        return permuted if before_B is None else torch.where(self.last_BL < 0, before_B[:, None], permuted)


def permute(x_BLF: _Permuted, order_BL: Tensor | None) -> _Permuted:
    """Return the tokens in this order, (B, L, F); either argument may be None, which changes nothing."""
    if x_BLF is None or order_BL is None:
        return x_BLF
    return x_BLF.gather(1, order_BL[:, :, None].expand(-1, -1, x_BLF.shape[2]))


def of_last_real(values_BT: Tensor, valid_BT: Tensor | None, count: int) -> Tensor:
    """Return the values of each row's last ``count`` real tokens, the latest last, (B, count or T if less).

    Rows with fewer real tokens begin with the values of padding.
    """
    if valid_BT is not None:
        values_BT = values_BT.gather(1, valid_BT.to(torch.int8).argsort(dim=1, stable=True))
    return values_BT[:, max(0, values_BT.shape[1] - count) :]
