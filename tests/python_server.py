"""A process that has imported torch once and starts Python programs by forking itself, in milliseconds.

It reads a JSON object a line from its standard input, with the keys "arguments" (``["-m", module, …]``,
``["-c", code, …]`` or ``[file, …]``), "cwd", "env", "warnings" (an action), "stdout" and "stderr" (paths),
and answers with the process id. {"wait": process id, "timeout": seconds} is answered with the exit code,
negative for a signal; a process that takes longer is killed. A program imports the packages of the repository
and of plugins itself: only other libraries are shared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy.random",
    "pydantic.main",
    "pydantic.type_adapter",
    "yaml",
    "pluggy",
    "rich.console",
)
SHARED = ("matplotlib.pyplot",)  # not required


def run(order: dict[str, Any]) -> None:
    """Run the program of an order in this process."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:0] = [path for path in order["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    warnings.simplefilter(order["warnings"])
    first, *words = order["arguments"]
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *words]
        runpy.run_path(first, run_name="__main__")


def child(order: dict[str, Any]) -> None:
    """Run a program with its output in files, and end this process as the interpreter would."""
    code = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        run(order)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int:
    """Return the exit code of a process, which is killed if it takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main() -> None:
    """Answer the orders."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in SHARED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    sys.path.remove(str(Path(__file__).resolve().parent))
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer.write(f"{wait(order['wait'], order['timeout'])}\n")
            continue
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            child(order)
        answer.write(f"{pid}\n")


if __name__ == "__main__":
    main()
