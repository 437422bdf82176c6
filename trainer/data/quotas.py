"""Weights as whole numbers of samples in a block."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 1 << 16
"""Samples in which the weights are met exactly, to a sample each."""


def quotas(weights: Sequence[float]) -> list[int]:
    """How many of `BLOCK` samples each source gives: in proportion to the weights, by largest remainders.

    Raises:
        ValueError: a weight that is not above 0, or so small that a block would hold none of it.

    """
    total = sum(weights)
    for weight in weights:
        if not weight > 0 or not total < float("inf"):
            raise ValueError(f"a source has weight {weight}; weights are above 0 and finite")
        if weight / total * BLOCK < 1:
            raise ValueError(
                f"weight {weight:g} of {total:g} in all is less than one sample in {BLOCK}; raise it, or "
                "leave the source out"
            )
    exact = [weight / total * BLOCK for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (whole[index] - exact[index], index))
    for index in by_remainder[: BLOCK - sum(whole)]:
        whole[index] += 1
    return whole


def scale(parts: Sequence[int]) -> int:
    """Count the samples of a block, of all sources together."""
    return sum(parts)
