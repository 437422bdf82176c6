"""How a run is laid out over its processes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from implicit_blocks.specs import Spec

Kind = Literal["none", "ddp", "fsdp", "hsdp"]

STATE_BYTES = 16
"""Of a parameter, in training: the weight, its gradient and two moments, all float32."""
DDP_SHARE = 0.2
"""Of a GPU's memory: where the state takes more, `auto` shards it."""


class Spread(NamedTuple):
    """A layout worked out for a number of ranks; ``shards`` is how many share one copy of the state."""

    kind: Kind
    shards: int


class DistributedSpec(Spec):
    """The `training.distributed` section. A process that runs alone has everything and needs none of it.

    ``ddp`` keeps the whole state on every rank, ``fsdp`` a share of it, ``hsdp`` a share among the ranks of a
    group and the same in every group. Losses do not depend on it.
    """

    kind: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """The layout. Auto: ddp where weights, gradients and optimizer state take up to a fifth of a GPU's memory
    (and on the CPU), else fsdp within one machine and hsdp over several. None refuses several processes."""
    shard_size: PositiveInt | None = None
    """hsdp: ranks that share one copy of the state; null: those of one machine."""
    unit: Literal["model", "layer"] = "model"
    """What is gathered together: the whole model once a step, however often the layers are iterated, or each
    layer whenever it is called, for models whose weights do not fit on one rank."""
    stopping: Literal["agreed", "fixed_budget"] = "agreed"
    """Unit layer: ranks iterate until all of them are done, or always for as many iterations as are allowed.
    In other layouts each rank stops on its own."""
    timeout_minutes: PositiveFloat = 30.0
    """How long a rank waits for the others before it gives up."""

    def spread(self, *, parameters: int, ranks: int, ranks_a_machine: int, memory: float | None) -> Spread:
        """Work out the layout.

        Args:
            parameters: of the model.
            ranks: processes of the run.
            ranks_a_machine: processes of one machine.
            memory: bytes of a GPU; None on the CPU.

        Raises:
            ValueError: several processes for kind none; groups that don't come out even.

        """
        if ranks == 1:
            return Spread("none", 1)
        if self.kind == "none":
            raise ValueError(
                f"training.distributed.kind is none, but there are {ranks} processes; choose auto, ddp, fsdp "
                "or "
                "hsdp, or start one process"
            )
        kind: Kind
        if self.kind != "auto":
            kind = self.kind
        elif memory is None or STATE_BYTES * parameters <= DDP_SHARE * memory:
            kind = "ddp"
        else:
            kind = "fsdp" if ranks <= ranks_a_machine else "hsdp"
        if kind != "hsdp":
            return Spread(kind, ranks if kind == "fsdp" else 1)
        shards = self.shard_size if self.shard_size is not None else ranks_a_machine
        if ranks % shards:
            raise ValueError(
                f"training.distributed.shard_size {shards} does not divide the {ranks} processes; choose a "
                "divisor"
            )
        return Spread(kind, shards)
