"""The state after committed tokens.

Shape legend: B batch, S kept tokens, K key and value heads, P head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SlidingWindowState(NamedTuple):
    """Keys (rotated) and values of the last real tokens, (B, K, S, P), the latest of each row at the end.

    S is the number of committed tokens, including padding, up to w − 1. Rows with fewer real tokens leave
    entries at the front unused; the masks of the next window exclude them.
    """

    keys: Tensor
    values: Tensor
