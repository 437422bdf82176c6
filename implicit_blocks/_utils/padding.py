"""Padding moved out of the way: the real tokens of each row at its front, in their own order.

What counts the tokens between two others (a convolution's taps, a shift by one token, a limited window) must
not count padding. A mixer that has the real tokens first works on tokens without gaps, and moves its result
back.

Shape legend: B batch, L tokens of a window, S tokens before it, F features.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_Permuted = TypeVar("_Permuted", Tensor, Tensor | None)


class PaddingPermutation(NamedTuple):
    """Where the tokens of a window with padding go, and where they come from.

    ``order_BL`` and ``inverse_BL`` (B, L) int64 move tokens to the front and back; ``valid_BL`` (B, L) bool
    says of the permuted tokens which are real, ``count_B`` (B,) how many are. ``last_BL`` (B, L) int64 is
    each permuted token's own index, for padding that of the row's last real token, or -1.
    """

    order_BL: Tensor
    inverse_BL: Tensor
    valid_BL: Tensor
    count_B: Tensor
    last_BL: Tensor

    @classmethod
    def of(cls, valid_BL: Tensor) -> PaddingPermutation:
        """Return the order for tokens that are real where ``valid_BL`` (B, L) bool says so."""
        order = (~valid_BL).to(torch.int8).argsort(dim=1, stable=True)
        count = valid_BL.sum(1)
        index = torch.arange(valid_BL.shape[1], device=valid_BL.device)
        last = torch.minimum(index, count[:, None] - 1)
        return cls(order, order.argsort(1), index < count[:, None], count, last)

    def documents(self, documents_BL: Tensor, before_B: Tensor | None) -> Tensor:
        """Return the documents of the permuted tokens, (B, L) int64.

        Padding is of the last real token's document, so that it cuts nothing: of that of ``before_B`` (B,),
        the last token before the window, where the window has no real token at all.
        """
        permuted = documents_BL.gather(1, self.order_BL).gather(1, self.last_BL.clamp(min=0))
        return permuted if before_B is None else torch.where(self.last_BL < 0, before_B[:, None], permuted)


def permute(x_BLF: _Permuted, order_BL: Tensor | None) -> _Permuted:
    """Return the tokens in this order, (B, L, F); None where there are none, and as they are without one."""
    if x_BLF is None or order_BL is None:
        return x_BLF
    return x_BLF.gather(1, order_BL[:, :, None].expand(-1, -1, x_BLF.shape[2]))


def of_last_real(values_BT: Tensor, valid_BT: Tensor | None, count: int) -> Tensor:
    """Return what is said of each row's last ``count`` real tokens, the latest last, (B, count or T if less).

    Rows with fewer real tokens have what is said of padding in front.
    """
    if valid_BT is not None:
        values_BT = values_BT.gather(1, valid_BT.to(torch.int8).argsort(dim=1, stable=True))
    return values_BT[:, max(0, values_BT.shape[1] - count) :]
