"""The processes of a run and their communication on the host.

A run of one process uses the same class, without communication.
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
# Process groups are kept until the process ends. Their destructor waits for their threads, and a thread that
# is about to release a tensor waits for the interpreter's lock, which the caller of the destructor holds:
# seen with gloo in torch 2.13, where DistributedDataParallel had the last reference to the group.


def keep_group(group: dist.ProcessGroup) -> None:
    """Keep a process group until the process ends."""
    _kept.append(group)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and communication with the other ranks of its run.

    Every rank must call the methods that communicate, in the same order. They exchange small values on the
    host (gloo), without waiting for a GPU.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: dist.ProcessGroup | None = None
    """The processes; None: all of the run."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether the run has one process."""
        return self.world_size == 1

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.is_single:
            self.sum([0.0])

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sums over the ranks, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise maxima over the ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return bool(self.max([float(flag)])[0])

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""
        return not self.any(not flag)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, by rank; values are pickled and should be small."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank; it is pickled and should be small."""
        return self.gather_objects(value if self.is_main else None)[0]  # type: ignore[return-value]  # rank 0 has one

    def run_on_rank0(self, act: Callable[[], T]) -> T:
        """Run ``act`` on rank 0; return its result, or raise its error, on every rank."""
        return self.broadcast(self.run_all(lambda: act() if self.is_main else None))  # type: ignore[return-value]  # rank 0 has one

    def run_all(self, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank; if it fails on some ranks, raise on all, so that no rank waits forever.

        A failing rank raises its own error. The others raise a ValueError or a `PeerError` with the message
        and the number of the failing rank.
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
            return value  # type: ignore[no-any-return]  # returned by act
        failures = self.gather_objects(None if error is None else (isinstance(error, ValueError), str(error)))
        if error is not None:
            raise error
        rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
        of_the_user, text = failure
        raise (ValueError if of_the_user else PeerError)(f"rank {rank}: {text}")

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank, in float64; all ranks must pass the same number of them."""
        if self.is_single:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(every, own, group=self.group)
        return [numbers.tolist() for numbers in every]

    def host_group(self) -> dist.ProcessGroup | None:
        """Create another host group of all ranks for a thread; None in a run of one process.

        Messages of a thread must not mix with those of training, so they need a group of their own.
        """
        if self.is_single:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        keep_group(group)
        return group

    def _reduce(self, numbers: Sequence[float], how: Any) -> list[float]:
        if self.is_single:
            return list(map(float, numbers))
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, op=how, group=self.group)
        result: list[float] = values.tolist()
        return result


def join(device: str = "auto", *, timeout_minutes: float = TIMEOUT_MINUTES) -> Ranks:
    """Join the process group of torchrun's environment; without one, return a single rank.

    Each process uses the device ``cuda:LOCAL_RANK``, or the CPU. Tensors on CUDA are exchanged by NCCL, those
    on the host by gloo.

    Args:
        device: as on the command line; with several processes ``auto``, ``cuda`` or ``cpu``.
        timeout_minutes: how long a rank waits for the others.

    Raises:
        DeviceError: the device does not exist, or a numbered device is given to several processes.

    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or "RANK" not in os.environ:
        return Ranks(choose_device(device))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device)
    if chosen.index is not None:
        raise DeviceError(
            f"device {device!r} is a single device, but there are {world_size} processes; "
            "use --device cuda or cpu, so that each process uses its own"
        )
    if chosen.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise DeviceError(
                f"process {local_rank} of this machine has no GPU (available: {torch.cuda.device_count()}); "
                "start fewer processes by --nproc-per-node"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise DeviceError(f"device {device!r} can't be used by several processes; use cuda or cpu")
    if not dist.is_initialized():
        timeout, store = timedelta(minutes=timeout_minutes), _store_of_attempt()
        own = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
        # One group for both: the device of a tensor selects gloo or NCCL.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=timeout, **own
        )
    return Ranks(chosen, rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _store_of_attempt() -> Any:
    """Return the store for the processes that torchrun has restarted; None: the one that torch finds.

    torchrun keeps one store for all attempts (seen in torch 2.13). Without a prefix the new processes read
    the addresses of those that have ended. Only the processes of one machine agree on the number of the
    attempt; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has torchrun create a store for each attempt.
    """
    environment, attempt = os.environ, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = (
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environment.get("GROUP_WORLD_SIZE", "1") == "1"
    )
    if attempt == "0" or not shared:
        return None
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]  # torch does not list it
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]  # as above


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()
