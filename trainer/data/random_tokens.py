"""Counter-based random tokens: the numbers drawn depend only on a key and an index.

The bits are those of Philox-4x64 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011),
taken raw from numpy: numpy guarantees the raw stream of a bit generator across versions, but not the methods
built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_CELLS = 1 << 16


def random_words(key: tuple[int, int], *, stream: int, index: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` 64-bit words of a Philox stream.

    Args:
        key: two 64-bit numbers: a seed and a domain.
        stream: index of the stream; streams of the same key and index are disjoint.
        index: index of the block, 0 or greater.
        count: number of words.

    """
    counter = np.array([0, stream, index, 0], dtype=np.uint64)
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=counter)
    words: npt.NDArray[np.uint64] = generator.random_raw(count)
    return words


class Categorical:
    """Draws indices from a categorical distribution, with 16 random bits for almost all of them.

    The 65,536 values of a 16-bit number are divided among the indices: index k owns ``floor(65536·P_k)`` of
    them, and one look-up finds the owner. The remaining values (fewer than there are indices) trigger a
    second draw, by a 64-bit number, from the distribution of the remainders. This avoids a rejection loop and
    realizes each probability to within 2^-64 (the rounding of the second draw's thresholds).

    Args:
        probabilities: exact probabilities that sum to 1.

    """

    def __init__(self, probabilities: Sequence[Fraction]) -> None:
        assert sum(probabilities) == 1
        cells = [int(p * _CELLS) for p in probabilities]
        remainders = [p * _CELLS - n for p, n in zip(probabilities, cells, strict=True)]
        self._left_over = int(sum(remainders))
        self._decided = _CELLS - self._left_over
        small = np.min_scalar_type(len(cells) - 1)
        self._owner = np.zeros(_CELLS, dtype=small)
        self._owner[: self._decided] = np.repeat(np.arange(len(cells)), cells)
        total = Fraction(0)
        self._candidates = np.array([k for k, r in enumerate(remainders) if r], dtype=small)
        thresholds = []
        for k in self._candidates[:-1]:
            total += remainders[int(k)]
            thresholds.append(int(total / self._left_over * 2**64))
        self._thresholds = np.array(thresholds, dtype=np.uint64)

    def draw(self, key: tuple[int, int], *, index: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        """Draw `count` independent indices, in the smallest unsigned type that fits them.

        They are a prefix of the indices for a larger `count`.
        """
        words = random_words(key, stream=0, index=index, count=-(-count // 4))
        bits = words.astype("<u8", copy=False).view("<u2")[:count]
        drawn = self._owner.take(bits)
        if self._left_over:
            again = np.flatnonzero(bits >= self._decided)
            second = random_words(key, stream=1, index=index, count=len(again))
            drawn[again] = self._candidates[np.searchsorted(self._thresholds, second, side="right")]
        return drawn
