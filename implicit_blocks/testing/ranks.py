"""Two processes connected by gloo, for contracts that need more than one rank."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from implicit_blocks.testing.contract import require

SECONDS = 120


def run_two_ranks(compute: Callable[..., Tensor], *arguments: Any, name: Any) -> list[Tensor]:
    """Return ``compute(*arguments, rank)`` of two processes in a gloo process group, rank 0 first.

    Args:
        compute: a function at module level; the processes import it by name.
        *arguments: its arguments, which must be picklable.
        name: the component to name in errors.

    Raises:
        ContractError: a rank failed, or the two ranks did not finish in time.

    """
    try:
        payload = pickle.dumps((compute, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        require(False, name, "ddp", f"cannot be pickled for another process: {error}; define it in a module")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "payload").write_bytes(payload)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        shares: list[tuple[int, ...]] = [(0, 1)] if _FORKS else [(0,), (1,)]
        processes = [_started(folder, ranks, environment) for ranks in shares]
        try:
            for process in processes:
                process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            require(False, name, "ddp", f"two ranks did not finish within {SECONDS} s")
        finally:
            for process in processes:
                _end(process)
        for rank in (0, 1):
            errors = Path(folder, f"errors{rank}").read_text(encoding="utf-8", errors="replace")
            last = (errors.strip().splitlines() or ["no error output"])[-1]
            last = last.removeprefix(f"[rank{rank}]: ")
            require(Path(folder, f"result{rank}").exists(), name, "ddp", f"rank {rank} failed: {last}")
        return [torch.load(Path(folder, f"result{rank}"), weights_only=True) for rank in (0, 1)]


_FORKS = hasattr(os, "fork")
"""Whether one process can import torch and the component for both ranks."""


def _started(folder: str, ranks: Sequence[int], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that runs one rank, or forks to run both."""
    for rank in (0, 1):
        Path(folder, f"errors{rank}").touch()
    with open(Path(folder, f"errors{ranks[0]}"), "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "implicit_blocks.testing.ranks", folder, *map(str, ranks)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # so that both ranks are killed together
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the one that it forked, if they still run."""
    if _FORKS:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def main(folder: str, rank: int, other: int | None = None) -> None:
    """Run a rank, and ``other``, if it is given, in a fork of this process."""
    compute, arguments = pickle.loads(Path(folder, "payload").read_bytes())
    forked = 0 if other is None else os.fork()
    if other is not None and forked == 0:
        rank = other
        os.dup2(os.open(Path(folder, f"errors{rank}"), os.O_WRONLY), sys.stderr.fileno())
    try:
        result = _computed(compute, arguments, folder, rank)
        torch.save(result, Path(folder, f"result{rank}"))
    finally:
        if forked:
            os.waitpid(forked, 0)


def _computed(compute: Callable[..., Tensor], arguments: tuple[Any, ...], folder: str, rank: int) -> Tensor:
    """Return ``compute(*arguments, rank)`` in the process group."""
    place = Path(folder, "store").absolute().as_uri()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        return compute(*arguments, rank)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
