"""A small run that every test of the trainer can vary."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from trainer.specs.run import RunSpec

SMALL: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 1,
        "mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8},
        "gradient": {"kind": "phantom", "steps": 1, "damping": 0.8},
        "stopping": {"tolerance": 0.05, "max_iterations": 4},
        "at_evaluation": {"stopping": {"max_iterations": 6}},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 4,
        "batch_size": 8,
        "max_grad_norm": 0.25,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "evaluation": {"lengths": [12, 16], "identity_probabilities": [0.5], "sequences": 6, "batch_size": 4},
}


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


@pytest.fixture(scope="session")
def small() -> Callable[..., RunSpec]:
    """Return a function that makes small run specs: ``small({"training.max_steps": 12})``."""

    def make(changes: Mapping[str, Any] | None = None) -> RunSpec:
        tree = deepcopy(SMALL)
        for path, value in (changes or {}).items():
            _set(tree, path, value)
        return RunSpec.model_validate(tree)

    return make


class ForkServer:
    """Starts runs in processes of their own without importing torch each time; see ``fork_server.py``."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        )

    def _ask(self, order: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments: Sequence[str], *, log: Path, **order: Any) -> int:
        """Start ``python -m trainer ARGUMENTS`` and return its process id; its output goes to ``log``."""
        return self._ask({"arguments": list(arguments), "log": str(log), **order})

    def wait(self, pid: int, *, seconds: float = 300.0) -> int:
        """Wait for a run and return its exit code: negative for a signal, -1000 if it does not end."""
        return self._ask({"wait": pid, "seconds": seconds})

    def run(self, arguments: Sequence[str], *, log: Path, **order: Any) -> int:
        """Start a run and wait for it."""
        return self.wait(self.start(arguments, log=log, **order))

    def start_ranks(
        self,
        count: int,
        arguments: Sequence[str],
        *,
        log: Path,
        orders: Mapping[int, Any] | None = None,
        more: Mapping[int, Sequence[str]] | None = None,
    ) -> list[int]:
        """Start a run of ``count`` processes, as torchrun does; ``orders`` and ``more`` are single ranks'."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            self.start(
                [*arguments, *(more or {}).get(rank, ())],
                log=log,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                **(orders or {}).get(rank, {}),
            )
            for rank in range(count)
        ]

    def wait_for_all(self, pids: Sequence[int]) -> list[int]:
        """Return the exit codes of all ranks; ranks that outlive another one too long are killed."""
        codes = {pid: self.wait(pid, seconds=0.0) for pid in pids}
        while any(code == -1000 for code in codes.values()):
            failed = any(code not in (0, -1000) for code in codes.values())
            for pid in [pid for pid, code in codes.items() if code == -1000]:
                codes[pid] = self.wait(pid, seconds=20.0 if failed else 0.05)
                if failed and codes[pid] == -1000:
                    os.kill(pid, signal.SIGKILL)
        return [codes[pid] for pid in pids]

    def run_ranks(self, count: int, arguments: Sequence[str], *, log: Path, **kwargs: Any) -> list[int]:
        """Start a run of several processes and wait for them."""
        return self.wait_for_all(self.start_ranks(count, arguments, log=log, **kwargs))

    def close(self) -> None:
        """End the server."""
        with self._process:
            self._process.kill()


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Return a server that starts runs cheaply."""
    server = ForkServer()
    yield server
    server.close()
