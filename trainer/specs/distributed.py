"""The `training.distributed` section: how a run is distributed over its processes."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from implicit_blocks.specs import Spec, field_error

Kind = Literal["none", "ddp", "fsdp", "hsdp"]

STATE_BYTES = 16
"""Bytes of training state per parameter: weight, gradient and two moments, all float32."""
DDP_SHARE = 0.2
"""Fraction of a GPU's memory above which `auto` shards the training state."""


class ResolvedLayout(NamedTuple):
    """A distribution resolved for a number of ranks; ``shards`` ranks share one copy of the state.

    ``tensor`` ranks divide heads and hidden channels, ``context`` ranks divide sequences.
    """

    kind: Kind
    shards: int
    tensor: int = 1
    context: int = 1

    @property
    def name(self) -> str:
        """The layout in words."""
        divided = [f"{name} {size}" for name, size in (("tensor", self.tensor), ("context", self.context))]
        parts = [part for part in divided if not part.endswith(" 1")]
        return ", ".join(parts if self.kind == "none" and parts else [self.kind, *parts])


class DistributedSpec(Spec):
    """The `training.distributed` section; it has no effect on a single process.

    ``ddp`` replicates the training state on every rank, ``fsdp`` shards it over all ranks, and ``hsdp``
    shards it within groups of ranks and replicates it across groups. The loss does not depend on the layout.
    """

    kind: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """Layout. `auto` selects ddp if weights, gradients and optimizer state take at most a fifth of a GPU's
    memory (and on the CPU), otherwise fsdp on one machine and hsdp on several. `none` rejects several
    processes."""
    shard_size: PositiveInt | None = None
    """hsdp: number of ranks that share one copy of the state; null: the ranks of one machine."""
    unit: Literal["model", "layer"] = "model"
    """Unit of gathering: the whole model once per step, however often the layers are iterated, or each layer
    whenever it is called, for models whose weights do not fit on one rank."""
    stopping: Literal["agreed", "fixed_budget"] = "agreed"
    """For `unit: layer`: ranks iterate until all have converged, or always for the maximum number of
    iterations. In other layouts each rank stops independently."""
    tensor: PositiveInt = 1
    """Number of ranks that divide the heads and hidden channels of every layer; each computes a part."""
    context: PositiveInt = 1
    """Number of ranks that divide every training sequence, for sequences that do not fit on one rank."""
    timeout_minutes: PositiveFloat = 30.0
    """Maximum time that a rank waits for the others."""

    @model_validator(mode="after")
    def _whole_model_if_divided(self) -> Self:
        if self.unit == "layer":
            for name in ("tensor", "context"):
                if (size := getattr(self, name)) > 1:
                    message = f"unit 'layer' gathers weights in every call, which {name} does not support; "
                    raise field_error(message + "set unit to 'model'", name, value=size)
        return self

    def batch_shares(self, ranks: int) -> int:
        """Return the number of shares into which ranks divide a batch: ``ranks / (tensor · context)``.

        One process has whole models and sequences.

        Raises:
            ValueError: the ranks cannot be divided.

        """
        if ranks == 1:
            return 1
        if ranks % (self.tensor * self.context):
            raise ValueError(
                f"training.distributed.tensor {self.tensor} times context {self.context} does not divide the "
                f"{ranks} processes; start a multiple of {self.tensor * self.context} processes, or choose "
                "other numbers"
            )
        return ranks // (self.tensor * self.context)

    def resolve(
        self, *, parameters: int, ranks: int, ranks_per_machine: int, memory: float | None
    ) -> ResolvedLayout:
        """Resolve the layout for a number of processes.

        Args:
            parameters: number of model parameters.
            ranks: number of processes.
            ranks_per_machine: number of processes per machine.
            memory: memory of a GPU in bytes; None on the CPU.

        Raises:
            ValueError: several processes with kind none, or a shard_size that does not divide their number.

        """
        if ranks == 1:
            return ResolvedLayout("none", 1)
        divided = {"tensor": self.tensor, "context": self.context}
        replicas = self.batch_shares(ranks) * self.context
        parameters, per_machine = parameters // self.tensor, max(1, ranks_per_machine // self.tensor)
        if replicas == 1:
            return ResolvedLayout("none", 1, **divided)
        if self.kind == "none":
            raise ValueError(
                f"training.distributed.kind is none, but there are {ranks} processes; choose auto, ddp, "
                "fsdp or hsdp, or start one process"
            )
        kind: Kind
        if self.kind != "auto":
            kind = self.kind
        elif memory is None or STATE_BYTES * parameters <= DDP_SHARE * memory:
            kind = "ddp"
        else:
            kind = "fsdp" if ranks <= ranks_per_machine else "hsdp"
        if kind != "hsdp":
            return ResolvedLayout(kind, replicas if kind == "fsdp" else 1, **divided)
        shards = self.shard_size if self.shard_size is not None else per_machine
        if replicas % shards:
            of_heads = "" if self.tensor == 1 else f" divided by tensor {self.tensor}"
            raise ValueError(
                f"training.distributed.shard_size {shards} does not divide the {ranks} processes{of_heads}; "
                "choose a divisor"
            )
        return ResolvedLayout(kind, shards, **divided)
