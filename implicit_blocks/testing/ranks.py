"""Two processes connected by gloo, for contracts that need more than one rank."""

from __future__ import annotations

import os
import pickle
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
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "implicit_blocks.testing.ranks", folder, str(rank)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            outputs = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            outputs = []
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        require(bool(outputs), name, "ddp", f"two ranks did not finish within {SECONDS} s")
        for number, rank in enumerate(ranks):
            last = (outputs[number].strip().splitlines() or ["no error output"])[-1]
            last = last.removeprefix(f"[rank{number}]: ")
            require(rank.returncode == 0, name, "ddp", f"rank {number} failed: {last}")
        return [torch.load(Path(folder, f"result{rank}"), weights_only=True) for rank in (0, 1)]


def main(folder: str, rank: int) -> None:
    """Run one of the two ranks."""
    compute, arguments = pickle.loads(Path(folder, "payload").read_bytes())
    place = Path(folder, "store").absolute().as_uri()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        torch.save(compute(*arguments, rank), Path(folder, f"result{rank}"))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
