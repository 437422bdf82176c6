"""Everything that is measured on one GPU, by one command: a table beside the published figures, and a JSON.

    python benchmarks/gpu.py [--programs llama_130m …] [--budget 530] [--tiny] [--output gpu]
    python benchmarks/gpu.py --show                      # the table of results/gpu.json
    python benchmarks/gpu.py --quote                     # write it into docs/results.md

Each program is a process of its own. First they all get ready side by side, as far as the card has room for
them, with two layers for 24 or 48: what one compiled layer needs is then in the compilers' caches, a folder
of this run's own. Nothing of that is timed. Then they run one after the other, each alone on the card, the
next one beginning when the last has ended. A kernel's fastest variant is found out in a program's own turn,
and a program that fails or hangs leaves the others theirs. Before and after each turn the card is looked at:
other processes, memory that is taken, and how fast it copies are in the JSON, and what was disturbed says so
in the table. Programs that failed or were disturbed get a second turn at the end. What the budget of seconds
has no room for is left out, and the table says so. The published figures are those of the published
implementation for the same work, batch and iterations, timed on an H100; *reach* and *hope* are what this
project set itself. The trainer's own steps of the zoo's specs, at the specs' own tolerance, have a table of
their own.
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
LEAST = 10  # seconds: no program begins with less
CONTEXT_GB = 0.7  # that a process takes on a card before it has a tensor there
SAID = 2000  # characters of what a program that failed said last
SHARE = 45  # seconds: so many each may have, and thrice its equal share of what is left

# ---------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """A process: its command but for the file it writes to, and the seconds that it may take."""

    command: tuple[str, ...]
    limit: int
    for_trying: tuple[str, ...] = ("--tiny",)
    """What ``--tiny`` adds."""
    for_preparing: tuple[str, ...] | None = ("--layers", "2")
    """What makes it compile the same and compute little; None: others compile what it needs."""
    preparing_gb: float = 6
    """GPU memory that it may take while it prepares, beside others."""
    preparing_s: float = 20
    """How long that takes, much by experience: those that take long begin first."""
    variants_from: float = 0.0
    """Of the variants of a kernel that is tuned, where its preparation begins."""


def training(*works: str, preparing_gb: float = 8, preparing_s: float = 25) -> Program:
    fast = ("--compile", "--graphs", "--as-published", "--steps", "8", "--warm-up", "6")
    trying = ("--tiny", "--steps", "1", "--warm-up", "1")
    preparing = ("--layers", "2", "--steps", "1", "--warm-up", "5")
    command = ("gpu_training.py", "--works", *works, *fast)
    return Program(command, 150, trying, preparing, preparing_gb, preparing_s)


def decoding(model: str) -> Program:
    trying = ("--tiny", "--device", "cpu", "--iterations", "2", "--tokens", "1", "--context", "8")
    states = ("--states", "float32", "bfloat16", "int8")  # each model those that are for it
    preparing = ("--layers", "2", "--iterations", "2")
    command = ("decoding.py", "--models", model, "--rows", "1", "64", *states)
    return Program(command, 120, trying, preparing)


def zoo(spec: str) -> Program:
    trying = ("--tiny", "--steps", "2", "--warm-up", "1")
    preparing = ("--layers", "2", "--steps", "5", "--warm-up", "1") if "1.3b" in spec else None
    return Program(("gpu_zoo.py", "--specs", spec), 150, trying, preparing, 10)


# In the order of their turns: what there is no time for is at the end.
PROGRAMS = {
    "llama_130m": training("llama_130m_bounded", "llama_130m_free"),
    "mamba2_130m": training("mamba2_130m_bounded", "mamba2_130m_free", preparing_s=45),
    "llama_1.3b": training("llama_1.3b_bounded", preparing_gb=10),
    "mamba2_1.3b": training("mamba2_1.3b_bounded", preparing_gb=10, preparing_s=40),
    "state_tracking": training(
        "state_tracking", preparing_gb=20, preparing_s=35
    ),  # it has one layer in any case
    "decoding_mamba2": decoding("mamba2_1.3b"),
    "decoding_llama": decoding("llama_1.3b"),
    "driver": Program(
        ("gpu_driver.py", "--modes", "compiled+graphs", "--repeats", "15"),
        120,
        ("--tiny", "--modes", "launched", "--repeats", "2"),
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
    """A program's process: it gets ready when it is made, and begins with the GPU when it is told."""

    def __init__(self, name: str, *, tiny: bool, caches: Path, preparing: bool = False) -> None:
        program = PROGRAMS[name]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._rows, self._said, self._card = folder / "rows.json", folder / "said", folder / "card.json"
        script = program.command[0]
        # decoding.py names its file as those do that write to the folder of results
        stem = str(self._rows.with_suffix(""))
        into = ["--output", stem] if script == "decoding.py" else ["--json", str(self._rows)]
        options = [*program.command[1:], *(program.for_trying if tiny else ())]
        self.command = " ".join(["python", f"benchmarks/{script}", *options])
        options += program.for_preparing or () if preparing else ()
        with self._said.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(STARTER), str(self._card), str(HERE / script), *options, *into],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment(caches, program if preparing else None),
                start_new_session=True,  # so that its compilers can be ended with it
            )

    @property
    def ended(self) -> bool:
        """Whether the program has come to its end, in whatever way."""
        return self._process.poll() is not None

    def begin(self) -> None:
        """Let the program have the GPU."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed already
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def finish(self, limit: float) -> Row:
        """Wait for the program and return what it found; it is ended after ``limit`` seconds."""
        began = time.monotonic()
        found: Row = {"command": self.command}
        try:
            code = self._process.wait(timeout=limit)
            if code:
                found["failed"] = f"exit code {code}: {last_line(self._said.read_text(errors='replace'))}"
        except subprocess.TimeoutExpired:
            found["failed"] = f"took longer than {limit:.0f} s"
        self._kill()
        if "failed" in found:
            found["said"] = self._said.read_text(errors="replace")[-SAID:]
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
        """End the program, whatever it is doing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._kill()
        self._folder.cleanup()


def environment(caches: Path, prepares: Program | None) -> dict[str, str]:
    """Return what all programs share: caches of compiled kernels, and in their turns of tuned ones."""
    found = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TRITON_CACHE_AUTOTUNING": "0" if prepares else "1",
    }
    if prepares:
        each = str(max(1, 2 * (os.cpu_count() or 1) // len(PROGRAMS)))  # they compile by fits and starts
        found |= {"TORCHINDUCTOR_COMPILE_THREADS": each, "OMP_NUM_THREADS": "1"}
        found |= {"PREPARING": str(prepares.variants_from), "PREPARING_GB": str(prepares.preparing_gb)}
    return found


# ---------------------------------------------------------------------------------------------- the command


def prepare(names: list[str], caches: Path, *, tiny: bool, seconds: float) -> dict[str, float | str]:
    """Let the programs compile side by side for so long; return how long each took, or how it ended.

    Those that take long begin first, as far as the card has room for what each may take; where one ends the
    next follow.
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
    """Let a program have the card, and look at it before and after; ``last`` is how the last one left it."""
    before = last if last and not gpu_card.unquiet(last) else gpu_card.once_quiet(patience)
    process.begin()
    found = process.finish(seconds)
    found["card"] = {"before": before, **found.get("card", {}), "after": gpu_card.once_quiet(patience)}
    return found


def share(name: str, left: float, programs: int) -> float:
    """Return the seconds that a program may take where so many wait: one that hangs leaves the rest some."""
    return min(left, PROGRAMS[name].limit, max(SHARE, 3 * left / programs))


def worth(found: Row) -> tuple[int, bool]:
    """Return how many rows a program has measured, and whether it came to its end: what is more is kept."""
    return sum("failed" not in row for row in found.get("rows", [])), "failed" not in found


def judge(programs: dict[str, Row]) -> None:
    """Note which programs were disturbed; how fast the card copies is known from all of them."""
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
        "--budget", type=float, default=BUDGET, help="seconds in all; what is left over isn't run"
    )
    parser.add_argument(
        "--prepare",
        type=float,
        default=None,
        help="seconds of compiling side by side, a quarter of all; or 0",
    )
    parser.add_argument(
        "--patience", type=float, default=5, help="seconds to wait for a card that others have to be quiet"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on any device: to try the program")
    parser.add_argument(
        "--output", default="gpu", help="name of the file in results, or a path without .json"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table of results/gpu.json, measure nothing"
    )
    parser.add_argument(
        "--quote",
        action="store_true",
        help="write the tables of the stored results into docs/results.md; measure nothing",
    )
    arguments = parser.parse_args()
    if arguments.show or arguments.quote:
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(gpu_table.quoted(result))
        if arguments.quote:
            text = gpu_table.quote(result, PAGE.read_text(encoding="utf-8"))
            PAGE.write_text(text, encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no program outlives this one
    with tempfile.TemporaryDirectory() as caches:
        return measure(arguments, Path(caches))


def measure(arguments: argparse.Namespace, caches: Path) -> int:
    """Run the programs and write down what they find."""
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
        for line in found.pop("said", "").splitlines():
            print(f"  | {line}", flush=True)
        result = collected(programs, arguments) | {"prepared": prepared}  # each time: what is measured stays
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with contextlib.ExitStack() as at_the_end:

        def made(name: str) -> Process:
            process = Process(name, tiny=arguments.tiny, caches=caches)
            at_the_end.callback(process.end)
            return process

        # All wait with their imports done: nothing is loaded while another is timed.
        waiting = {name: made(name) for name in arguments.programs}
        seconds = arguments.budget / 4 if arguments.prepare is None else arguments.prepare
        if seconds > 0:
            prepared = prepare(arguments.programs, caches, tiny=arguments.tiny, seconds=seconds)
            print(f"prepared in {time.monotonic() - began:.0f} s: {prepared}", flush=True)
        last: Row = {}
        for index, (name, process) in enumerate(waiting.items()):
            if left() < LEAST:
                keep(name, {"failed": f"no time left of {arguments.budget:.0f} s"})
            else:
                seconds = share(name, left(), len(waiting) - index)
                found = turn(process, seconds, patience=arguments.patience, last=last)
                last = found["card"]["after"]
                keep(name, found)
        for name in arguments.programs:
            first = programs[name]
            short = "failed" in first or any("failed" in row for row in first.get("rows", []))
            if (first.get("disturbed") or short) and first.get("seconds", LEAST) < left():
                print(f"{name}: again", flush=True)
                seconds = share(name, left(), 1)
                again = turn(made(name), seconds, patience=arguments.patience, last={})
                if worth(again) >= worth(first):
                    keep(name, again)
        result = json.loads(path.read_text(encoding="utf-8"))
    print(f"\n{gpu_table.quoted(result)}\n{time.monotonic() - began:.0f} s in all; written to {path}")
    return int(any("failed" in program for program in programs.values()))


def collected(programs: dict[str, Row], arguments: argparse.Namespace) -> Row:
    """Return what is kept: where and with what, the table, and each program's own rows."""
    machine = next((program["machine"] for program in programs.values() if "machine" in program), {})
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
