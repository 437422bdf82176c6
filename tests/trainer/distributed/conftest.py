"""Several processes on the CPU that communicate by gloo; each runs a scenario of `scenarios.py`."""

from __future__ import annotations

import multiprocessing
import pickle
import runpy
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).with_name("scenarios.py")
PATIENCE_SECONDS = 300.0
PRELOADED = ["tests.trainer.distributed.preloaded"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return a runner: ``processes("scenario", world_size=2, …)`` gives what each rank returned.

    A rank's exception is returned as ``(its class's name, its words)``. Processes that don't end in time are
    taken to hang: they are killed, and the test fails.
    """
    # Forked from a server that has torch loaded and has never run it: a fork of this process could not
    # run backward passes, and a fresh one takes seconds to import torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def run(scenario: str, *, world_size: int = 2, **arguments: Any) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        port, started = _free_port(), []
        for rank in range(world_size):
            task = {
                "scenario": scenario,
                "arguments": arguments,
                "result": str(folder / f"rank-{rank}.pickle"),
                "environment": {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            }
            process = context.Process(
                target=runpy.run_path, args=(str(SCENARIOS), {"TASK": task}, "scenarios"), daemon=True
            )
            process.start()
            started.append(process)
        end = time.monotonic() + PATIENCE_SECONDS
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(started) if process.is_alive()]
        for process in started:
            process.kill()
            process.join()
        assert not hanging, f"{scenario}: ranks {hanging} never came to an end"
        return [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(world_size)]

    return run
