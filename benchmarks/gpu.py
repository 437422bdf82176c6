"""All measurements on one GPU with one command: a table beside the published figures, and a JSON file.

    python benchmarks/gpu.py [--programs llama_130m …] [--budget 530] [--tiny] [--output gpu]
    python benchmarks/gpu.py --show                      # print the table of results/gpu.json
    python benchmarks/gpu.py --quote                     # write the tables into docs/results.md

Each program is a separate process. First all programs prepare side by side, as far as GPU memory allows, with
two layers instead of 24 or 48: this fills the compilers' caches, a folder of this run, and is not timed. Then
they run one after the other, each alone on the GPU. A program selects the fastest variant of a kernel during
its own turn, and a program that fails or hangs does not affect the others. Before and after each turn the
state of the GPU is recorded in the JSON (other processes, used memory, copy bandwidth), and disturbed results
are marked in the table. Programs that failed or were disturbed are repeated at the end. Programs that
exceed the time budget are skipped, and the table lists them. The published figures are those of the published
implementation for the same work, batch and iterations, timed on an H100; *target* and
*stretch_target* are those of this project. The trainer's own steps of the zoo's specs, at the specs' own
tolerance, have a separate table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gpu_card
import gpu_table
from gpu_table import Row, last_line

HERE = Path(__file__).resolve().parent
STARTER = HERE / "gpu_program.py"
RESULTS = HERE / "results" / "gpu.json"
PAGE = HERE.parent / "docs" / "results.md"
BUDGET = 530  # seconds
LEAST = 10  # seconds: the minimum remaining time to start a program
CONTEXT_GB = 0.7  # GPU memory of a process without tensors
MAX_LOG_LENGTH = 2000  # characters kept of a failed program's last output
SHARE = 45  # seconds: minimum limit per program; the limit is three times its share of the rest

# ---------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """A program: its command without the output file, and its time limit in seconds."""

    command: tuple[str, ...]
    limit: int
    for_trying: tuple[str, ...] = ("--tiny",)
    """Options added by ``--tiny``."""
    for_preparing: tuple[str, ...] | None = ("--layers", "2")
    """Options for compiling the same with little computation; None: other programs compile what it needs."""
    preparing_gb: float = 6
    """GPU memory limit while it prepares, beside others."""
    preparing_s: float = 20
    """Approximate duration of the preparation; long ones start first."""
    variants_from: float = 0.0
    """Fraction of an autotuned kernel's variants at which its preparation starts."""


def training(*works: str, preparing_gb: float = 8, preparing_s: float = 25) -> Program:
    fast = ("--compile", "--graphs", "--as-published", "--steps", "8", "--warm-up", "6")
    trying = ("--tiny", "--steps", "1", "--warm-up", "1")
    preparing = ("--layers", "2", "--steps", "1", "--warm-up", "5")
    command = ("gpu_training.py", "--works", *works, *fast)
    return Program(command, 150, trying, preparing, preparing_gb, preparing_s)


def decoding(model: str) -> Program:
    trying = ("--tiny", "--device", "cpu", "--iterations", "2", "--tokens", "1", "--context", "8")
    states = ("--states", "float32", "bfloat16", "int8")  # types that do not apply to a model are skipped
    preparing = ("--layers", "2", "--iterations", "2")
    command = ("decoding.py", "--models", model, "--rows", "1", "64", *states)
    return Program(command, 120, trying, preparing)


def zoo(spec: str) -> Program:
    trying = ("--tiny", "--steps", "2", "--warm-up", "1")
    preparing = ("--layers", "2", "--steps", "5", "--warm-up", "1") if "1.3b" in spec else None
    return Program(("gpu_zoo.py", "--specs", spec), 150, trying, preparing, 10)


# In order of execution: the last ones are skipped if time runs out.
PROGRAMS = {
    "llama_130m": training("llama_130m_bounded", "llama_130m_free"),
    "mamba2_130m": training("mamba2_130m_bounded", "mamba2_130m_free", preparing_s=45),
    "llama_1.3b": training("llama_1.3b_bounded", preparing_gb=10),
    "mamba2_1.3b": training("mamba2_1.3b_bounded", preparing_gb=10, preparing_s=40),
    "state_tracking": training("state_tracking", preparing_gb=20, preparing_s=35),  # it has a single layer
    "decoding_mamba2": decoding("mamba2_1.3b"),
    "decoding_llama": decoding("llama_1.3b"),
    "driver": Program(
        ("gpu_driver.py", "--modes", "compiled+graphs", "--repeats", "15"),
        120,
        ("--tiny", "--modes", "eager", "--repeats", "2"),
        ("--layers", "2", "--repeats", "1"),
        variants_from=0.25,
    ),
    "agreement": Program(
        ("agreement.py", "--compile", "--graphs", "--golden", "none"),
        120,
        preparing_gb=16,  # logits in float64
        preparing_s=60,  # both models, in training and in evaluation
        variants_from=0.5,
    ),
    "zoo_llama_1.3b": zoo("llama_1.3b"),
    "zoo_mamba2_1.3b": zoo("mamba2_1.3b"),
    "zoo_llama_130m": zoo("llama_130m"),
    "zoo_mamba2_130m": zoo("mamba2_130m"),
}


class Process:
    """The process of a program: it prepares when created, and uses the GPU after ``begin``."""

    def __init__(self, name: str, *, tiny: bool, caches: Path, preparing: bool = False) -> None:
        program = PROGRAMS[name]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._rows, self._log, self._card = folder / "rows.json", folder / "log", folder / "card.json"
        script = program.command[0]
        # decoding.py takes the output name without .json
        stem = str(self._rows.with_suffix(""))
        into = ["--output", stem] if script == "decoding.py" else ["--json", str(self._rows)]
        options = [*program.command[1:], *(program.for_trying if tiny else ())]
        self.command = " ".join(["python", f"benchmarks/{script}", *options])
        options += program.for_preparing or () if preparing else ()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(STARTER), str(self._card), str(HERE / script), *options, *into],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment(caches, program if preparing else None),
                start_new_session=True,  # so that its compiler processes can be killed with it
            )

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""
        return self._process.poll() is not None

    def begin(self) -> None:
        """Start the program's turn on the GPU."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has already failed
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def finish(self, limit: float) -> Row:
        """Wait for the program and return its results; kill it after ``limit`` seconds."""
        began = time.monotonic()
        found: Row = {"command": self.command}
        try:
            code = self._process.wait(timeout=limit)
            if code:
                found["failed"] = f"exit code {code}: {last_line(self._log.read_text(errors='replace'))}"
        except subprocess.TimeoutExpired:
            found["failed"] = f"took longer than {limit:.0f} s"
        self._kill()
        if "failed" in found:
            found["output"] = self._log.read_text(errors="replace")[-MAX_LOG_LENGTH:]
        if self._rows.exists():
            found |= json.loads(self._rows.read_text(encoding="utf-8"))
        found["seconds"] = round(time.monotonic() - began, 1)
        if self._card.exists():
            found["card"] = json.loads(self._card.read_text(encoding="utf-8"))
        return found

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Kill the program."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._kill()
        self._folder.cleanup()


def environment(caches: Path, prepares: Program | None) -> dict[str, str]:
    """Return the shared environment: caches of compiled kernels, and of tuned ones during turns."""
    found = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TRITON_CACHE_AUTOTUNING": "0" if prepares else "1",
    }
    if prepares:
        each = str(max(1, 2 * (os.cpu_count() or 1) // len(PROGRAMS)))  # compilation is not continuous
        found |= {"TORCHINDUCTOR_COMPILE_THREADS": each, "OMP_NUM_THREADS": "1"}
        found |= {"PREPARING": str(prepares.variants_from), "PREPARING_GB": str(prepares.preparing_gb)}
    return found


# ---------------------------------------------------------------------------------------------- the command


def prepare(names: list[str], caches: Path, *, tiny: bool, seconds: float) -> dict[str, float | str]:
    """Compile all programs side by side within a time limit; return the duration or failure of each.

    Slow ones start first, as far as the memory limits allow; others follow when one ends.
    """
    end = time.monotonic() + seconds
    room = gpu_card.free_gb()
    waiting = [name for name in names if PROGRAMS[name].for_preparing is not None]
    waiting.sort(key=lambda name: -PROGRAMS[name].preparing_s)
    took: dict[str, float | str] = {}
    running: dict[str, Process] = {}
    with contextlib.ExitStack() as at_the_end:
        while (waiting or running) and time.monotonic() < end:
            for name in list(waiting):
                taken = sum(PROGRAMS[other].preparing_gb + CONTEXT_GB for other in running)
                if running and taken + PROGRAMS[name].preparing_gb + CONTEXT_GB > room:
                    continue
                waiting.remove(name)
                running[name] = Process(name, tiny=tiny, caches=caches, preparing=True)
                at_the_end.callback(running[name].end)
                running[name].begin()
            for name in [name for name, process in running.items() if process.ended]:
                found = running.pop(name).finish(0)
                took[name] = found.get("failed", found.get("card", {}).get("seconds", found["seconds"]))
            time.sleep(0.1)
    took |= dict.fromkeys(running, f"took longer than {seconds:.0f} s")
    return took | dict.fromkeys(waiting, f"no room in {seconds:.0f} s")


def turn(process: Process, seconds: float, *, patience: float, last: Row) -> Row:
    """Run a program's turn; record the GPU's state before and after (``last``: after the previous turn)."""
    before = last if last and not gpu_card.unquiet(last) else gpu_card.once_quiet(patience)
    process.begin()
    found = process.finish(seconds)
    found["card"] = {"before": before, **found.get("card", {}), "after": gpu_card.once_quiet(patience)}
    return found


def share(name: str, left: float, programs: int) -> float:
    """Return the time limit of a program, so that a hanging program leaves time for the waiting ones."""
    return min(left, PROGRAMS[name].limit, max(SHARE, 3 * left / programs))


def worth(found: Row) -> tuple[int, bool]:
    """Return the number of rows of a result, and whether it is complete; the larger result is kept."""
    return sum("failed" not in row for row in found.get("rows", [])), "failed" not in found


def judge(programs: dict[str, Row]) -> None:
    """Mark disturbed programs by comparing the copy bandwidth of all turns."""
    states = [state for program in programs.values() for state in program.get("card", {}).values()]
    speeds = [state.get("copies_tb_s") for state in states if isinstance(state, dict)]
    fastest = max((speed for speed in speeds if speed is not None), default=None)
    for program in programs.values():
        program["disturbed"] = gpu_card.disturbances(program.get("card", {}), fastest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="total seconds; programs beyond it are skipped"
    )
    parser.add_argument(
        "--prepare",
        type=float,
        default=None,
        help="seconds for parallel compilation (default: a quarter of the budget); 0 disables it",
    )
    parser.add_argument(
        "--patience", type=float, default=5, help="seconds to wait for other processes on the GPU to end"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on any device, to test the program")
    parser.add_argument(
        "--output", default="gpu", help="name of the file in results, or a path without .json"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table of results/gpu.json without measuring"
    )
    parser.add_argument(
        "--quote",
        action="store_true",
        help="write the tables of the stored results into docs/results.md without measuring",
    )
    arguments = parser.parse_args()
    if arguments.show or arguments.quote:
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(gpu_table.quoted_tables(result))
        if arguments.quote:
            text = gpu_table.quote(result, PAGE.read_text(encoding="utf-8"))
            PAGE.write_text(text, encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all programs end with this one
    with tempfile.TemporaryDirectory() as caches:
        return measure(arguments, Path(caches))


def measure(arguments: argparse.Namespace, caches: Path) -> int:
    """Run the programs and write their results."""
    began = time.monotonic()
    programs: dict[str, Row] = {}
    path = RESULTS.parent / f"{arguments.output}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    prepared: dict[str, float | str] = {}

    def left() -> float:
        return float(arguments.budget - (time.monotonic() - began))

    def keep(name: str, found: Row) -> None:
        programs[name] = found
        judge(programs)
        remarks = found.get("failed", ""), *found.get("disturbed", ())
        print(f"{name}: {found.get('seconds', 0)} s {', '.join(filter(None, remarks))}", flush=True)
        for row in found.get("rows", []):
            print(f"  {row}", flush=True)
        for line in found.pop("output", "").splitlines():
            print(f"  | {line}", flush=True)
        result = collected(programs, arguments) | {
            "prepared": prepared
        }  # after each program, to keep its results
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with contextlib.ExitStack() as at_the_end:

        def start_process(name: str) -> Process:
            process = Process(name, tiny=arguments.tiny, caches=caches)
            at_the_end.callback(process.end)
            return process

        # All processes import first and wait: nothing is loaded while another program is timed.
        waiting = {name: start_process(name) for name in arguments.programs}
        seconds = arguments.budget / 4 if arguments.prepare is None else arguments.prepare
        if seconds > 0:
            prepared = prepare(arguments.programs, caches, tiny=arguments.tiny, seconds=seconds)
            print(f"prepared in {time.monotonic() - began:.0f} s: {prepared}", flush=True)
        last: Row = {}
        for index, (name, process) in enumerate(waiting.items()):
            if left() < LEAST:
                keep(name, {"failed": f"skipped: budget of {arguments.budget:.0f} s exhausted"})
            else:
                seconds = share(name, left(), len(waiting) - index)
                found = turn(process, seconds, patience=arguments.patience, last=last)
                last = found["card"]["after"]
                keep(name, found)
        for name in arguments.programs:
            first = programs[name]
            short = "failed" in first or any("failed" in row for row in first.get("rows", []))
            if (first.get("disturbed") or short) and first.get("seconds", LEAST) < left():
                print(f"{name}: repeated", flush=True)
                seconds = share(name, left(), 1)
                again = turn(start_process(name), seconds, patience=arguments.patience, last={})
                if worth(again) >= worth(first):
                    keep(name, again)
        result = json.loads(path.read_text(encoding="utf-8"))
    print(
        f"\n{gpu_table.quoted_tables(result)}\n{time.monotonic() - began:.0f} s in total; written to {path}"
    )
    return int(any("failed" in program for program in programs.values()))


def collected(programs: dict[str, Row], arguments: argparse.Namespace) -> Row:
    """Return the result: machine, command, table, and the rows of each program."""
    machine: Row = next((program["machine"] for program in programs.values() if "machine" in program), {})
    options = [] if list(programs) == list(PROGRAMS) else ["--programs", *arguments.programs]
    options += [] if arguments.budget == BUDGET else ["--budget", f"{arguments.budget:g}"]
    options += [] if arguments.prepare is None else ["--prepare", f"{arguments.prepare:g}"]
    options += ["--tiny"] if arguments.tiny else []
    figures = [figure for figure in gpu_table.FIGURES if set(figure.names) <= set(arguments.programs)]
    kept = ("command", "seconds", "failed", "disturbed", "card")
    went = [
        {"program": name, **{key: program[key] for key in kept if program.get(key)}}
        for name, program in programs.items()
    ]
    details: dict[str, list[Row]] = {}
    for name, program in programs.items():
        kind = PROGRAMS[name].command[0].removesuffix(".py").removeprefix("gpu_")
        for row in program.get("rows", []):
            failed = {"failed": last_line(row["failed"])} if "failed" in row else {}
            details.setdefault(kind, []).append(row | failed)
    return {
        "machine": machine or {"date": "", "python": ""},
        "command": " ".join(["python benchmarks/gpu.py", *options]),
        "rows": [figure.row(programs) for figure in figures],
        "programs": went,
        **details,
    }


if __name__ == "__main__":
    sys.exit(main())
