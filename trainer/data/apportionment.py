"""Apportionment of a block of samples among weighted sources, by largest remainders."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 1 << 16
"""Samples per block; within a block the weights are met exactly, to one sample each."""


def apportion(weights: Sequence[float]) -> list[int]:
    """Return the number of samples of each source in a block of `BLOCK`, in proportion to the weights.

    Raises:
        ValueError: a weight is not positive and finite, or too small for one sample per block.

    """
    total = sum(weights)
    for weight in weights:
        if not weight > 0 or not total < float("inf"):
            raise ValueError(f"weight must be positive and finite, got {weight}")
        if weight / total * BLOCK < 1:
            raise ValueError(
                f"weight {weight:g} of a total of {total:g} is less than one sample in {BLOCK}; increase it, "
                "or remove the source"
            )
    exact = [weight / total * BLOCK for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (whole[index] - exact[index], index))
    for index in by_remainder[: BLOCK - sum(whole)]:
        whole[index] += 1
    return whole
