"""The processes of a run: who this one is, and how they tell one another.

A process that runs alone has the same object, whose every call is then a plain function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from implicit_blocks._utils.devices import choose_device
from trainer.errors import DeviceError, PeerError

T = TypeVar("T")

TIMEOUT_MINUTES = 30.0

_kept: list[Any] = []
# Groups are kept until the process ends. Their destructor waits for their threads, and one of those may still
# be about to let go of a tensor, for which it needs the interpreter's lock, which the destructor's caller
# holds: seen with gloo in torch 2.13, where DistributedDataParallel had the last reference to the group.


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run.

    Methods that talk to the others must be called by every rank, in the same order. They talk of small things
    on the host (gloo), so that no GPU is waited for.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether there are no others."""
        return self.world_size == 1

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.is_single:
            self.sum([0.0])

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add the ranks' numbers up, one by one, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[float]) -> list[float]:
        """Take the largest of the ranks' numbers, one by one."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return bool(self.max([float(flag)])[0])

    def all(self, flag: bool) -> bool:
        """Whether it is so on every rank."""
        return not self.any(not flag)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, by rank; values are pickled, so keep them small."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return the main rank's value on all; pickled too."""
        return self.gather_objects(value if self.is_main else None)[0]  # type: ignore[return-value]  # of rank 0

    def run_on_rank0(self, act: Callable[[], T]) -> T:
        """Let the main rank act, and return what it got on all; its error is raised on all."""
        return self.broadcast(self.run_all(lambda: act() if self.is_main else None))  # type: ignore[return-value]  # the main rank's

    def run_all(self, act: Callable[[], T]) -> T:
        """Act on every rank; where some fail all do, so that none waits for one that has left.

        A rank's own error is raised as it is; elsewhere a ValueError or `PeerError` with its words, and the
        rank it comes from.
        """
        if self.is_single:
            return act()
        value: Any = None
        error: Exception | None = None
        try:
            value = act()
        except Exception as caught:
            error = caught
        if not self.any(error is not None):
            return value  # type: ignore[no-any-return]  # the type that act returns
        failures = self.gather_objects(None if error is None else (isinstance(error, ValueError), str(error)))
        if error is not None:
            raise error
        rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
        of_the_user, text = failure
        raise (ValueError if of_the_user else PeerError)(f"rank {rank}: {text}")

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank; each must have as many. They travel in float64."""
        if self.is_single:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(every, own)
        return [numbers.tolist() for numbers in every]

    def host_group(self) -> dist.ProcessGroup | None:
        """Make one more group of all ranks that talks on the host, for a thread; None where this is alone.

        Messages of a thread must not get between those of the training: they need a group to themselves.
        """
        if self.is_single:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        _kept.append(group)
        return group

    def _reduce(self, numbers: Sequence[float], how: Any) -> list[float]:
        if self.is_single:
            return list(map(float, numbers))
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, op=how)
        result: list[float] = values.tolist()
        return result


def join(device: str = "auto", *, timeout_minutes: float = TIMEOUT_MINUTES) -> Ranks:
    """Join the process group that torchrun's environment describes; without one, be alone.

    Each process takes the device of its number on its machine: ``cuda:LOCAL_RANK``, or the CPU. Tensors on
    CUDA go through NCCL, everything on the host through gloo.

    Args:
        device: as the command line has it; with several processes ``auto``, ``cuda`` or ``cpu``.
        timeout_minutes: how long a rank waits for the others before it gives up.

    Raises:
        DeviceError: no such device, or one named by number for several processes.

    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or "RANK" not in os.environ:
        return Ranks(choose_device(device))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device)
    if chosen.index is not None:
        raise DeviceError(
            f"device {device!r} is one device, but there are {world_size} processes; "
            "give --device cuda or cpu, each process takes its own"
        )
    if chosen.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise DeviceError(
                f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                "start fewer by --nproc-per-node"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise DeviceError(f"device {device!r} can't be used by several processes; use cuda or cpu")
    if not dist.is_initialized():
        # One group for both kinds of tensors: the device of a tensor picks gloo or NCCL.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
        )
    return Ranks(chosen, rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def leave() -> None:
    """Leave the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()
