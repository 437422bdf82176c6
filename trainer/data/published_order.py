"""Word problems drawn in the order of the published generator, for bitwise agreement.

Each sample draws from one torch generator on the CPU: ``rand(L)``, ``randint(|G|, (L,))``, ``randint(|M|,
(L,))``; a token keeps its group element where the first is *above* p and is the identity elsewhere. Without
a monoid the published code multiplies by the trivial one and still draws L zeros, as does this module. The
published labels are composed token by token; here all samples are composed together, with the same result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def draw(
    count: int,
    length: int,
    *,
    group_order: int,
    monoid_order: int,
    p: float,
    generator: torch.Generator | None,
) -> npt.NDArray[np.int64]:
    """Draw token IDs ``|M|·g + m`` of `count` samples, (count, length); advances `generator`."""
    random_BL = torch.empty(count, length)
    group_BL = torch.empty(count, length, dtype=torch.int64)
    monoid_BL = torch.empty_like(group_BL)
    # In place on preallocated views: half of the time of `rand` and `randint` is overhead.
    for random_L, group_L, monoid_L in zip(random_BL, group_BL, monoid_BL, strict=True):
        random_L.uniform_(generator=generator)
        group_L.random_(0, group_order, generator=generator)
        monoid_L.random_(0, monoid_order, generator=generator)
    tokens: Tensor = group_BL.mul_(random_BL > p).mul_(monoid_order).add_(monoid_BL)
    return np.asarray(tokens.numpy(), dtype=np.int64)


class PublishedSequence:
    """The published order with numbered positions: position i is the i-th sample drawn from one generator.

    torch's CPU generator cannot jump: moving forward draws and discards the samples in between (about 2 µs
    per sample of length 256, about 20 s for the published 8.4 million), and moving back restarts from the
    seed.
    """

    def __init__(self, length: int, *, group_order: int, monoid_order: int, p: float, seed: int) -> None:
        self._length, self._group_order, self._monoid_order, self._p = length, group_order, monoid_order, p
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._position = 0

    def tokens(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """Return the token IDs of samples [position, position + count), (count, length)."""
        if position < self._position:
            self._generator.manual_seed(self._seed)
            self._position = 0
        self._skip(position - self._position)
        self._position = position + count
        return draw(
            count,
            self._length,
            group_order=self._group_order,
            monoid_order=self._monoid_order,
            p=self._p,
            generator=self._generator,
        )

    def _skip(self, samples: int) -> None:
        # A uniform number and a small integer each consume one 32-bit output of the generator.
        outputs = 3 * self._length * samples
        while outputs:
            discarded = min(outputs, 1 << 20)
            torch.randint(2, (discarded,), generator=self._generator, dtype=torch.int32)
            outputs -= discarded
