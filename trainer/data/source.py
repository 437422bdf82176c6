"""Interface between the training loop and the data: sequences at numbered positions, and evaluation sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_blocks._utils.describe import shape_and_type
from implicit_blocks.registry.contracts import require

if TYPE_CHECKING:
    from trainer.specs.run import EvaluationSpec

IGNORED = -100
"""Label of a position that is not scored."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of B sequences of L tokens.

    Args:
        inputs: token IDs, int64 (B, L).
        labels: int64 (B, L), aligned: ``labels[:, j]`` is the target at token j; −100 is not scored.
        documents: document index, int64 (B, L), non-decreasing along a row: tokens do not see other
            documents. None: each row is one document.

    """

    inputs: Tensor
    labels: Tensor
    documents: Tensor | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """Number of input tokens, B·L."""
        return self.inputs.numel()

    def rows(self, first: int, stop: int) -> Batch:
        """Return the sequences [first, stop) as views: a micro-batch, or a rank's share."""
        return self.each(lambda tensor: tensor[first:stop])

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; from pinned memory the copy is asynchronous."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, which allows asynchronous copies to a GPU."""
        return self.each(lambda tensor: tensor.pin_memory())

    def context(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's ``forward`` besides inputs and labels."""
        return {} if self.documents is None else {"documents": self.documents}

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor (B, L) changed in the same way."""
        documents = None if self.documents is None else change(self.documents)
        return replace(self, inputs=change(self.inputs), labels=change(self.labels), documents=documents)


class DataSource(ABC):
    """An ordered set of sequences, indexed by *position*: a count of samples since the start of the run.

    The sequence at a position depends only on the source and its seed, never on the division of the run into
    batches, ranks, threads or restarts. So a checkpoint stores one number, and a run can resume with another
    batch size or number of ranks.
    """

    concurrent: bool = False
    """Whether `batch` may be called from several threads concurrently."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of token IDs; all IDs are below it. None: unknown."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens per sequence."""

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """Sequences per epoch; later positions are in the next epoch, in another order. None: endless."""

    @abstractmethod
    def batch(self, position: int, count: int) -> Batch:
        """Return the sequences at positions [position, position + count).

        Returns:
            A batch on the CPU, owned by the caller.

        """

    def epochs(self, position: int) -> Mapping[str, float]:
        """Return the number of epochs completed before `position`, by part name.

        A source with a single part names it ``""``. Endless sources have none.
        """
        return {} if self.samples is None else {"": position / self.samples}

    def identity(self) -> Mapping[str, Any]:
        """Return the identity of the data as JSON values.

        A run does not resume on data of a different identity unless its spec has changed. Sources that are
        fully determined by spec and seed return nothing.
        """
        return {}

    @abstractmethod
    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return the evaluation sets by name, in reporting order.

        Call it before training starts, so that an invalid evaluation is rejected early.

        Raises:
            ValueError: the data cannot provide the sets that `evaluation` specifies.

        """


class EndlessSource(DataSource):
    """Base of the sources without epochs.

    Args:
        length: tokens per sequence.

    """

    def __init__(self, *, length: int) -> None:
        self._length = length

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self._length

    @property
    def samples(self) -> None:
        """None: there are no epochs."""
        return None


def take(source: DataSource, position: int, count: int) -> Batch:
    """Return ``source.batch(position, count)`` after checking its shapes and types.

    Raises:
        ContractError: the result is not a batch of `count` sequences; names the source and its plugin.

    """
    batch = source.batch(position, count)
    fitting = isinstance(batch, Batch) and batch.inputs.shape == batch.labels.shape == (count, source.length)
    if not fitting or batch.inputs.dtype != torch.int64 or batch.labels.dtype != torch.int64:
        require(
            False,
            source,
            "batch",
            f"batch({position}, {count}) returned {_shown(batch)}; return a trainer.data.source.Batch whose "
            f"inputs and labels are int64 of shape ({count}, {source.length}), sequences by tokens",
        )
    return batch


def _shown(batch: Any) -> str:
    if not isinstance(batch, Batch):
        return f"a {type(batch).__name__}"
    inputs, labels = shape_and_type(batch.inputs), shape_and_type(batch.labels)
    return f"a Batch with inputs {inputs} and labels {labels}"


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """The first `sequences` positions of a source, with a name.

    `settings` contains the settings that vary between sets (``{"identity_probability": 0.5, "length": 64}``),
    for logs and plots.
    """

    name: str
    source: DataSource
    sequences: int
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.source.length

    def batches(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Iterate over this rank's share of the set in batches of `batch_size`; the last may be smaller.

        Over all ranks each sequence occurs exactly once, so that counts can be summed over ranks. The shares,
        and thus the numbers of batches, may differ between ranks.
        """
        first, count = rank_share(self.sequences, rank=rank, world_size=world_size)
        for start in range(first, first + count, batch_size):
            yield take(self.source, start, min(batch_size, first + count - start))


def sets_by_length(
    lengths: Sequence[int], sequences: int, open_source: Callable[[int], DataSource]
) -> dict[str, EvaluationSet]:
    """Return one evaluation set per length, named like ``L2048``.

    Args:
        lengths: tokens per sequence.
        sequences: size of each set; a source with fewer samples is used completely.
        open_source: returns the source of sequences of a length.

    """
    sets = {}
    for length in lengths:
        source = open_source(length)
        count = sequences if source.samples is None else min(sequences, source.samples)
        name = f"L{length}"
        sets[name] = EvaluationSet(name=name, source=source, sequences=count, settings={"length": length})
    return sets


def rank_share(count: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the start and size of a rank's contiguous share of `count` items; shares differ by at most one.

    Raises:
        ValueError: the rank is out of range.

    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    first = count * rank // world_size
    return first, count * (rank + 1) // world_size - first


def check_range(position: int, count: int) -> None:
    """Reject negative positions and empty batches.

    Raises:
        ValueError: `position` is below 0 or `count` is below 1.

    """
    if position < 0 or count < 1:
        raise ValueError(
            f"position must be at least 0 and count at least 1; got position {position}, count {count}"
        )
