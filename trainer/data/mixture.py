"""A weighted mixture of sources, in an order that is computed from the position alone.

Samples are dealt in blocks of 65,536 in which every source has its exact share. A keyed permutation assigns
the samples of a block to sources, and the n-th sample taken from a source is its own n-th. So any position
can be computed without its predecessors, and a resumed run reads exactly the remaining samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from implicit_blocks import registry
from trainer.data.apportionment import BLOCK, apportion
from trainer.data.permutation import permute
from trainer.data.source import Batch, DataSource, EndlessSource, EvaluationSet, check_range

if TYPE_CHECKING:
    from trainer.specs.data import MixtureSpec
    from trainer.specs.run import EvaluationSpec

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Part:
    """A source of a mixture."""

    name: str
    source: DataSource
    weight: float


class Mixture(EndlessSource):
    """Samples of several sources, each of which continues with its own next epoch.

    Args:
        parts: the sources, all of the same length.
        seed: seed of the order, 0 to 2^64 - 1. Each source has its own seed.

    Raises:
        ValueError: a weight is not positive, or lengths differ.

    """

    def __init__(self, parts: Sequence[Part], *, seed: int) -> None:
        lengths = sorted({part.source.length for part in parts})
        if len(lengths) != 1:
            raise ValueError(f"the sources of a mixture must have the same length, got {lengths}")
        super().__init__(length=lengths[0])
        self.parts = tuple(parts)
        self.concurrent = all(part.source.concurrent for part in parts)
        self._seed = seed
        self._quotas = np.array(apportion([part.weight for part in parts]), dtype=np.int64)
        self._block = lru_cache(maxsize=4)(self._deal)

    @property
    def vocab_size(self) -> int | None:
        """Largest vocabulary of the sources, or None if any is unknown."""
        sizes = [part.source.vocab_size for part in self.parts]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    def origin(self, position: int) -> tuple[int, int]:
        """Return which source provides the sample at a position, and the sample's position in that source."""
        sources, positions = self._block(position // BLOCK)
        source = int(sources[position % BLOCK])
        own = position // BLOCK * int(self._quotas[source]) + int(positions[position % BLOCK])
        return source, own

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`."""
        check_range(position, count)
        origins = [self.origin(position + row) for row in range(count)]
        inputs = torch.empty((count, self._length), dtype=torch.int64)
        labels = torch.empty_like(inputs)
        documents: Tensor | None = None
        for source, first, rows in _runs(origins):
            part = self.parts[source].source.batch(first, len(rows))
            inputs[rows], labels[rows] = part.inputs, part.labels
            if part.documents is not None:
                documents = torch.zeros_like(inputs) if documents is None else documents
                documents[rows] = part.documents
        return Batch(inputs=inputs, labels=labels, documents=documents)

    def epochs(self, position: int) -> Mapping[str, float]:
        """Return the number of epochs of each source; endless sources are omitted."""
        block, within = divmod(position, BLOCK)
        counts = block * self._quotas
        if within:
            counts = counts + np.bincount(self._block(block)[0][:within], minlength=len(self.parts))
        return {
            part.name: int(count) / part.source.samples
            for part, count in zip(self.parts, counts, strict=True)
            if part.source.samples is not None
        }

    def identity(self) -> Mapping[str, Any]:
        """See `DataSource.identity`: the identities of the sources, by name."""
        return {part.name: dict(part.source.identity()) for part in self.parts}

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return the sets of all sources, prefixed by the source's name: ``web_L2048``."""
        sets = {}
        for part in self.parts:
            for name, found in part.source.evaluation_sets(evaluation).items():
                sets[f"{part.name}_{name}"] = replace(found, name=f"{part.name}_{name}")
        return sets

    def _deal(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the source of each sample of a block, and its index among that source's samples there."""
        slots = permute(np.arange(BLOCK, dtype=np.int64), BLOCK, seed=self._seed, epoch=block)
        sources = np.searchsorted(np.cumsum(self._quotas), slots, side="right")
        positions = np.empty(BLOCK, dtype=np.int64)
        for source, quota in enumerate(self._quotas):
            positions[sources == source] = np.arange(quota)
        return sources, positions


def _runs(origins: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Group rows by source: its index, its first position (the others follow consecutively), its rows."""
    rows: dict[int, list[int]] = {}
    for row, (source, _) in enumerate(origins):
        rows.setdefault(source, []).append(row)
    return [(source, origins[found[0]][1], found) for source, found in rows.items()]


def build(spec: MixtureSpec, *, seed: int = 0, vocab_size: int | None = None) -> Mixture:
    """Build a mixture and its sources from a `data` section.

    Args:
        spec: the section.
        seed: seed of the order; each source gets a different seed derived from it.
        vocab_size: vocabulary size of the model.

    Raises:
        ValueError: as the sources; the sources have different tokenizers.

    """
    parts = []
    for index, (name, source) in enumerate(zip(spec.names, spec.sources, strict=True)):
        own_seed = (seed + (index + 1) * _GOLDEN) % 2**64
        try:
            built = registry.build(source.data, seed=own_seed, vocab_size=vocab_size)
        except ValueError as error:
            raise ValueError(f"source {name!r} of the mixture: {error}") from error
        parts.append(Part(name, built, source.weight))
    _check_tokenizers(parts)
    return Mixture(parts, seed=seed)


def _check_tokenizers(parts: Sequence[Part]) -> None:
    known = [(part.name, identity) for part in parts if (identity := part.source.identity().get("tokenizer"))]
    for name, identity in known[1:]:
        if identity != known[0][1]:
            raise ValueError(
                f"the sources {known[0][0]!r} and {name!r} of the mixture have different tokenizers (SHA-256 "
                f"{known[0][1][:16]}… and {identity[:16]}…); use the same tokenizer"
            )
