"""Two processes connected by gloo, for contracts that need more than one rank."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
        program = [sys.executable, "-m", "implicit_blocks.testing.ranks", folder]
        # A forked rank need not import torch again.
        shares = [["0", "1"]] if hasattr(os, "fork") else [["0"], ["1"]]
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        ranks = [subprocess.Popen([*program, *share], env=environment, **options) for share in shares]
        try:
            for rank in ranks:
                rank.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            require(False, name, "ddp", f"two ranks did not finish within {SECONDS} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results = [Path(folder, f"result{number}") for number in (0, 1)]
        for number, result in enumerate(results):
            report = Path(folder, f"error{number}")
            last = report.read_text(encoding="utf-8") if report.exists() else "no error output"
            require(result.exists(), name, "ddp", f"rank {number} failed: {last}")
        return [torch.load(result, weights_only=True) for result in results]


def main(folder: str, rank: int, other: int | None = None) -> None:
    """Run a rank, and ``other`` in a fork of this process."""
    forked = 0
    try:
        compute, arguments = pickle.loads(Path(folder, "payload").read_bytes())
        if other is not None and not (forked := os.fork()):
            rank = other
            signal.alarm(SECONDS)  # ends a rank that hangs
        place, limit = Path(folder, "store").absolute().as_uri(), timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=limit)
        torch.save(compute(*arguments, rank), Path(folder, f"result{rank}"))
    except Exception as error:
        Path(folder, f"error{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if forked:
        os.waitpid(forked, 0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
