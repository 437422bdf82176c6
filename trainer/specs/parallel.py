"""How a run is laid out over its processes."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from implicit_blocks.specs import Spec


class ParallelSpec(Spec):
    """The `training.parallel` section. A process that runs alone has everything and needs none of it.

    ``ddp`` keeps the whole state on every rank, ``fsdp`` a share of it, ``hsdp`` a share among the ranks of a
    group and the same in every group. Losses do not depend on it.
    """

    kind: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """The layout. Auto: ddp where weights, gradients and optimizer state take up to a fifth of a GPU's memory
    (and on the CPU), else fsdp within one machine and hsdp over several. None refuses several processes."""
    shard_size: PositiveInt | None = None
    """hsdp: ranks that share one copy of the state; null: those of one machine."""
    unit: Literal["loop", "layer"] = "loop"
    """What is gathered together: the whole model once a step, however often the layers are iterated, or each
    layer whenever it is called, for models whose weights do not fit on one rank."""
    stopping: Literal["agreed", "fixed_budget"] = "agreed"
    """Unit layer: ranks iterate until all of them are done, or always for as many iterations as are allowed.
    In other layouts each rank stops on its own."""
    timeout_minutes: PositiveFloat = 30.0
    """How long a rank waits for the others before it gives up."""
