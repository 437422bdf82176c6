"""Counter-based drawing, in rare edge cases."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainer.data import random_tokens
from trainer.data.random_tokens import Categorical


def test_leftover_values_are_redrawn_from_the_remainders(monkeypatch: pytest.MonkeyPatch) -> None:
    thirds = Categorical([Fraction(1, 3)] * 3)  # 21,845 of 65,536 values each, and one left over
    bits = np.array([0, 21844, 21845, 43690, 65534, 65535, 65535, 65535], dtype="<u2")
    third = 2**64 // 3
    again = np.array([third - 1, third, 2 * third], dtype=np.uint64)

    def words(key: Any, *, stream: int, index: int, count: int) -> Any:
        assert (key, index) == ((7, 0), 3)
        return bits.view("<u8") if stream == 0 else again[:count]

    monkeypatch.setattr(random_tokens, "random_words", words)
    assert thirds.draw((7, 0), index=3, count=8).tolist() == [0, 0, 1, 2, 2, 0, 1, 2]
