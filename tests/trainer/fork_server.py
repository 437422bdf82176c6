"""A process that has imported the trainer once and makes runs by forking itself: a hundred starts are cheap.

It reads a JSON object a line from its standard input: {"arguments": [...], "log": path, "env": {...},
"kill_at": n | null, "full_at": n | null, "count": path | null}. It forks a run of the command line and
answers with its process id; {"wait": pid, "seconds": s} is answered with the exit code, negative for a
signal, or -1000 where it still runs after so long.

A run counts its *events*: steps (before and after), lines of metrics, tensors written, files forced onto the
disk, renames, removals. ``kill_at`` kills it with SIGKILL at the event of that number, ``kill_at_step`` at
that of the steps alone, with ``idle`` once no save is in flight; ``full_at`` makes the disk full at an event,
and from then on ("full_for" events). The number of events goes to the file ``count``, the positions of the
samples read in training to the file ``samples``.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Events:
    """Counts events; kills the process or fills the disk at a given one."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.count = 0
        self._steps = 0
        self._kill_at = order.get("kill_at")
        self._kill_at_step = order.get("kill_at_step")
        self._idle = order.get("idle", False)
        self._full_from = order.get("full_at")
        self._full_for = order.get("full_for", 10**9)
        self._lock = threading.Lock()

    def strike(self, *, writes: bool, step: bool = False) -> None:
        with self._lock:
            self.count += 1
            self._steps += step
            number, steps = self.count, self._steps
        if number == self._kill_at or (step and steps == self._kill_at_step):
            while self._idle and any("Checkpoint" in thread.name for thread in threading.enumerate()):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        full = self._full_from is not None and 0 <= number - self._full_from < self._full_for
        if full and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def around(
        self, owner: Any, name: str, *, writes: bool = True, after: bool = False, step: bool = False
    ) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.strike(writes=writes, step=step)
            result = original(*args, **kwargs)
            if after:
                self.strike(writes=False, step=step)
            return result

        setattr(owner, name, counted)


def run(order: dict[str, Any]) -> int:
    import torch
    from torch.distributed.checkpoint import filesystem

    import trainer.run.build
    from trainer.cli import train as cli
    from trainer.reporting.metrics import MetricsFile
    from trainer.run import loop

    torch.set_num_threads(1)
    setattr(trainer.run.build, "draw", lambda runs, path: None)  # noqa: B010  # a picture takes longer than a run
    events = Events(order)
    events.around(loop, "training_step", writes=False, after=True, step=True)
    events.around(MetricsFile, "write", writes=False)
    events.around(filesystem, "_write_item", after=True)
    events.around(os, "fsync")
    events.around(Path, "rename", writes=False, after=True)
    events.around(Path, "replace", writes=False)
    events.around(shutil, "rmtree", writes=False)
    samples: list[int] = []
    if order.get("samples"):
        from trainer.data.prefetch import Prefetcher

        batch = Prefetcher.batch

        def noted(self: Any, position: int, count: int, **kwargs: Any) -> Any:
            samples.extend(range(position, position + count))
            return batch(self, position, count, **kwargs)

        Prefetcher.batch = noted  # type: ignore[method-assign]  # of this process
    code = cli.main(order["arguments"])
    if samples:
        Path(order["samples"]).write_text("\n".join(map(str, samples)))
    if order.get("count"):
        Path(order["count"]).write_text(str(events.count))
    return code


def child(order: dict[str, Any]) -> None:
    code = 99
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order.get("env", {}))
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # prints the stacks of a hanging run
        code = run(order)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 98
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_everything() -> None:
    """Import all modules that runs need, also those that they import lazily; start no thread."""
    import torch
    import torch.distributed.checkpoint  # the same

    import trainer.cli.train
    import trainer.data.word_problem
    import trainer.run.build  # noqa: F401  # the same
    from implicit_blocks import registry
    from implicit_blocks.specs import load_spec

    spec: Any = load_spec("word_problem_s3", ["model.d_model=16", "model.mixer.head_dim=8"])
    model = registry.build(spec.model)
    registry.build(spec.training.optimizer, model=model)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64))
    # A garbage collection in a fork would visit the objects of all these modules and copy their memory pages.
    gc.collect()
    gc.freeze()


def main() -> None:
    import_everything()
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            deadline = time.monotonic() + order["seconds"]
            pid, status = os.waitpid(order["wait"], os.WNOHANG)
            while pid == 0 and time.monotonic() < deadline:
                time.sleep(0.005)
                pid, status = os.waitpid(order["wait"], os.WNOHANG)
            answer.write(f"{os.waitstatus_to_exitcode(status) if pid else -1000}\n")
            continue
        pid = os.fork()
        if pid == 0:
            child(order)
        answer.write(f"{pid}\n")


if __name__ == "__main__":
    main()
