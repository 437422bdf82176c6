"""What the training loop knows of data: sequences at numbered positions, and sets to evaluate on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_blocks.contract_checks import shape_and_type
from implicit_blocks.registry.contracts import require

if TYPE_CHECKING:
    from trainer.specs.run import EvaluationSpec

IGNORED = -100
"""The label of a position that is not scored."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences for the model: B of them, L tokens each.

    Args:
        inputs: token ids, int64 (B, L).
        labels: int64 (B, L), aligned: ``labels[:, j]`` is the answer at token j; −100 is not scored.
        documents: int64 (B, L), non-decreasing along a row: no token sees those of another document. None: a
            row is one document.

    """

    inputs: Tensor
    labels: Tensor
    documents: Tensor | None = None

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """Input tokens, B·L."""
        return self.inputs.numel()

    def rows(self, first: int, stop: int) -> Batch:
        """Give the sequences [first, stop), as views: a micro-batch, or a rank's share."""
        return self._each(lambda tensor: tensor[first:stop])

    def to(self, device: torch.device) -> Batch:
        """Give the batch on a device; from pinned memory the copy overlaps with what runs there."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Give the batch in page-locked memory, from which a GPU copies without waiting."""
        return self._each(lambda tensor: tensor.pin_memory())

    def context(self) -> dict[str, Tensor]:
        """Give what the model is told beside inputs and labels, as keyword arguments of its ``forward``."""
        return {} if self.documents is None else {"documents": self.documents}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        documents = None if self.documents is None else change(self.documents)
        return Batch(inputs=change(self.inputs), labels=change(self.labels), documents=documents)


class DataSource(ABC):
    """An order of sequences, each at a *position*: a count of global samples since the start of the run.

    What stands at a position depends on the source and its seed alone, never on how the run is cut into
    batches, ranks, threads or restarts. So a checkpoint stores one number, and a run goes on with another
    batch size or another number of ranks where it stopped.
    """

    concurrent: bool = False
    """Whether several threads may ask for batches at once."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Number of token ids, all below it; None where the data don't say."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """Sequences in an epoch; positions go on into the next one, in another order. None: endless."""

    @abstractmethod
    def batch(self, position: int, count: int) -> Batch:
        """Give the sequences at positions [position, position + count).

        Returns:
            On the CPU, owned by the caller.

        """

    def epochs(self, position: int) -> Mapping[str, float]:
        """How often the data have been gone through before `position`, by the names of their parts.

        A source of one part calls it ``""``. Endless data have none.
        """
        return {} if self.samples is None else {"": position / self.samples}

    def identity(self) -> Mapping[str, Any]:
        """Say what the data are, as JSON values: a run is not resumed on others unless its spec says so.

        Sources that the spec and the seed describe completely have nothing to say.
        """
        return {}

    @abstractmethod
    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Give the sets to evaluate on, by name, in the order to report them.

        Call it before training starts: it refuses what could not be evaluated later.

        Raises:
            ValueError: the data can't give what `evaluation` asks for.

        """


def take(source: DataSource, position: int, count: int) -> Batch:
    """Return ``source.batch(position, count)``, looked at: shapes and types, as they are known at once.

    Raises:
        ContractError: it is no batch of so many sequences, by the name of the source and its plugin.

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
    """The first `sequences` positions of a source, under a name.

    `settings` says what the set varies (``{"identity_probability": 0.5, "length": 64}``): for records and
    plots.
    """

    name: str
    source: DataSource
    sequences: int
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.source.length

    def batches(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Go through this rank's share of the set, in batches of `batch_size`; the last may be smaller.

        Over all ranks every sequence comes exactly once, so that counts summed over ranks are the set's.
        A rank's share, and so its number of batches, may differ from another's.
        """
        first, count = rank_share(self.sequences, rank=rank, world_size=world_size)
        for start in range(first, first + count, batch_size):
            yield take(self.source, start, min(batch_size, first + count - start))


def rank_share(count: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """First index and size of a rank's contiguous share of `count` items; the shares differ by one at most.

    Raises:
        ValueError: no such rank.

    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not one of {world_size} ranks; ranks count from 0 to world_size - 1"
        )
    first = count * rank // world_size
    return first, count * (rank + 1) // world_size - first


def check_range(position: int, count: int) -> None:
    """Refuse negative positions and empty batches.

    Raises:
        ValueError: `position` below 0 or `count` below 1.

    """
    if position < 0 or count < 1:
        raise ValueError(
            f"a batch begins at a position from 0 up and holds at least 1 sequence; got position {position}, "
            f"count {count}"
        )
