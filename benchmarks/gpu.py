"""Everything that is measured on one GPU, by one command: a table beside the published figures, and a JSON.

    python benchmarks/gpu.py [--programs llama_130m …] [--budget 530] [--tiny] [--output gpu]
    python benchmarks/gpu.py --show                      # the table of results/gpu.json
    python benchmarks/gpu.py --quote                     # put it into the README

Each program is a process of its own, one after the other, so that timings are alone on the card, that tuned
kernels and recorded graphs start afresh, and that one that fails or hangs leaves the others theirs. The last
ones are left out where the budget of seconds has no room for them, and the table says so. The published
figures are those of the published implementation for the same work, batch and iterations, timed on an H100;
*reach* and *hope* are what this project set itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.json"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- benchmarks/gpu.py --quote -->\n", "<!-- end of quote -->\n"
Row = dict[str, Any]

# ---------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """A process: its command but for the file it writes to, and the seconds that it may take."""

    command: tuple[str, ...]
    limit: int
    for_trying: tuple[str, ...] = ("--tiny",)
    """What ``--tiny`` adds."""


def training(*works: str, limit: int) -> Program:
    fast = ("--compile", "--graphs", "--as-published", "--steps", "5", "--warm-up", "5")
    trying = ("--tiny", "--steps", "1", "--warm-up", "1")
    return Program(("gpu_training.py", "--works", *works, *fast), limit, trying)


def decoding(model: str, *, limit: int) -> Program:
    trying = ("--tiny", "--device", "cpu", "--iterations", "2", "--tokens", "1", "--context", "8")
    states = ("--states", "float32", "bfloat16")
    return Program(("decoding.py", "--models", model, "--rows", "1", "64", *states), limit, trying)


PROGRAMS = {
    "state_tracking": training("state_tracking", limit=70),
    "decoding_mamba2": decoding("mamba2_1.3b", limit=60),
    "decoding_llama": decoding("llama_1.3b", limit=60),
    "driver": Program(
        ("gpu_driver.py", "--modes", "compiled+graphs"),
        80,
        ("--tiny", "--modes", "launched", "--repeats", "2"),
    ),
    "llama_130m": training("llama_130m_bounded", "llama_130m_free", limit=80),
    "mamba2_130m": training("mamba2_130m_bounded", "mamba2_130m_free", limit=100),
    "llama_1.3b": training("llama_1.3b_bounded", limit=90),
    "mamba2_1.3b": training("mamba2_1.3b_bounded", limit=110),
    "agreement": Program(
        ("agreement.py", "--compile", "--graphs", "--rows", "1"), 90, ("--tiny", "--golden", "none")
    ),
}


STARTER = """import runpy, sys
import torch, torch._dynamo, implicit_blocks.model
path = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = path.rpartition("/")[0]
sys.stdin.readline()
runpy.run_path(path, run_name="__main__")
"""  # what takes seconds and no GPU is done while the program before is at work


class Process:
    """A program's process: it gets ready when it is made, and begins with the GPU at ``finish``."""

    def __init__(self, name: str, *, tiny: bool) -> None:
        program = PROGRAMS[name]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._rows, self._said = folder / "rows.json", folder / "said"
        script = program.command[0]
        # decoding.py names its file as those do that write to the folder of results
        stem = str(self._rows.with_suffix(""))
        into = ["--output", stem] if script == "decoding.py" else ["--json", str(self._rows)]
        options = [*program.command[1:], *(program.for_trying if tiny else ())]
        self.command = " ".join(["python", f"benchmarks/{script}", *options])
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-c", STARTER, str(HERE / script), *options, *into],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

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
            self._process.kill()
            self._process.wait()
        if self._rows.exists():
            found |= json.loads(self._rows.read_text(encoding="utf-8"))
        found["seconds"] = round(time.monotonic() - began, 1)
        return found

    def end(self) -> None:
        """End the program, whatever it is doing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# ---------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """A line of the table: what is read from a program's rows, and what it is held against."""

    work: str
    program: str
    read: Callable[[list[Row]], float | None]
    unit: str
    published: float | None = None
    reach: float | None = None
    hope: float | None = None
    higher_is_better: bool = True

    def row(self, programs: dict[str, Row]) -> Row:
        """Return the line, with the reason where there is no figure."""
        program = programs.get(self.program, {"failed": "not asked for"})
        rows = [row for row in program.get("rows", []) if "failed" not in row]
        value = self.read(rows) if rows else None
        line: Row = {
            "work": self.work.replace(" x ", " \u00d7 "),
            "unit": self.unit,
            "published": self.published,
            "measured": value,
            "reach": self.reach,
            "hope": self.hope,
            "reached": None,
        }
        if value is None:
            failures = [row["failed"] for row in program.get("rows", []) if "failed" in row]
            line["not_measured"] = program.get("failed") or last_line("\n".join(failures)) or "no such row"
        elif self.reach is not None:
            line["reached"] = value >= self.reach if self.higher_is_better else value <= self.reach
        return line


def of(key: str, **wanted: Any) -> Callable[[list[Row]], float | None]:
    """Return a reader of one entry of the row that has these."""

    def read(rows: list[Row]) -> float | None:
        fitting = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
        return next((row.get(key) for row in fitting), None)

    return read


def worst(*keys: str, **wanted: Any) -> Callable[[list[Row]], float | None]:
    """Return a reader of the largest of some entries, over the rows that have these."""

    def read(rows: list[Row]) -> float | None:
        fitting = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
        found = [row[key] for row in fitting for key in keys if row.get(key) is not None]
        return max(found, default=None)

    return read


def of_bounded(family: str) -> Callable[[list[Row]], float | None]:
    """Return a reader of the free phase's operations a second as a share of the bounded phase's."""

    def read(rows: list[Row]) -> float | None:
        shares = [of("share_of_card", work=f"{family}_{phase}")(rows) for phase in ("free", "bounded")]
        free, bounded = shares
        return round(free / bounded, 3) if free and bounded else None

    return read


def farther(mode: str) -> Callable[[list[Row]], float | None]:
    """Return a reader of the worst ratio of our distance to the published rule's."""

    def read(rows: list[Row]) -> float | None:
        ratios = [
            row["distance"] / row["published_distance"]
            for row in rows
            if row["mode"] == mode and row["published_distance"] and row["tight_converged"]
        ]
        return round(max(ratios), 4) if ratios else None

    return read


def trained(work: str, program: str, text: str, *, published: int, reach: int, hope: int) -> Figure:
    return Figure(text, program, of("tokens_per_second", work=work), "tokens/s", published, reach, hope)


def decoded(text: str, *, published: float | None, reach: float, hope: float, **wanted: Any) -> Figure:
    program = "decoding_mamba2" if wanted["model"].startswith("mamba2") else "decoding_llama"
    return Figure(text, program, of("ms", **wanted), "ms an iteration", published, reach, hope, False)


FLOAT32 = ["bfloat16", "float32"]  # as decoding.py says what Mamba2's states are: the convolution's, and h
BY_FLOPS = "the same, by FLOPs beside (4+1)"
FIGURES = [
    trained("llama_1.3b_bounded", "llama_1.3b", "llama 1.3B (4+1), 4 x 2048",
            published=6_133, reach=18_000, hope=24_000),
    trained("llama_130m_bounded", "llama_130m", "llama 130M (4+1), 8 x 2048",
            published=64_687, reach=180_000, hope=240_000),
    trained("mamba2_1.3b_bounded", "mamba2_1.3b", "mamba2 1.3B (4+1), 4 x 2048",
            published=10_949, reach=15_500, hope=21_000),
    trained("mamba2_130m_bounded", "mamba2_130m", "mamba2 130M (4+1), 8 x 2048",
            published=48_638, reach=110_000, hope=160_000),
    Figure("free phase, llama 130M (32+4) at 13 iterations", "llama_130m",
           of("tokens_per_second", work="llama_130m_free"), "tokens/s", 22_108),
    Figure(BY_FLOPS, "llama_130m", of_bounded("llama_130m"), "of 1", None, 0.9),
    Figure("free phase, mamba2 130M (24+4) at 14 iterations", "mamba2_130m",
           of("tokens_per_second", work="mamba2_130m_free"), "tokens/s", 14_347),
    Figure(BY_FLOPS, "mamba2_130m", of_bounded("mamba2_130m"), "of 1", None, 0.9),
    trained("state_tracking", "state_tracking", "state tracking, 512 x 256, at 18 iterations",
            published=642_693, reach=3 * 642_693, hope=5 * 642_693),
    decoded("decoding mamba2 1.3B, batch 1, h in float32", published=86.7, reach=3, hope=1.4,
            model="mamba2_1.3b", rows=1, state_types=FLOAT32),
    decoded("decoding llama 1.3B, batch 1", published=52.2, reach=3, hope=1.4, model="llama_1.3b", rows=1),
    decoded("decoding mamba2 1.3B, 64 rows at context 512, h in float32", published=None, reach=5, hope=3,
            model="mamba2_1.3b", rows=64, state_types=FLOAT32),
    decoded("the same, h in bfloat16", published=None, reach=5, hope=3,
            model="mamba2_1.3b", rows=64, state_types=["bfloat16"]),
    decoded("decoding llama 1.3B, 64 rows at context 512, keys and values in bfloat16", published=None,
            reach=5, hope=3, model="llama_1.3b", rows=64),
    Figure("the driver beside the bare map, llama 130M, 8 x 2048", "driver",
           worst("overhead_sequence_percent", "overhead_prefix_percent", model="llama_130m"),
           "% more", None, 2, None, False),
    Figure("the driver beside the bare map, mamba2 130M, 8 x 2048", "driver",
           worst("overhead_sequence_percent", "overhead_prefix_percent", model="mamba2_130m"),
           "% more", None, 2, None, False),
    Figure("operator calls of the driver", "driver",
           worst("operator_calls_sequence", "operator_calls_prefix"), "an iteration", None, 20, None, False),
    Figure("distance of training's logits from a tight solve, beside the published rule's", "agreement",
           farther("training"), "times", 1, 1.02, None, False),
    Figure("the same in evaluation", "agreement", farther("evaluation"), "times", 1, 1.02, None, False),
    Figure("breaks in the compiled map, state tracking", "state_tracking",
           worst("graph_breaks"), "breaks", None, 0, None, False),
    Figure("waits for the device in a step, state tracking", "state_tracking",
           worst("waits"), "waits", None, 0, None, False),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- the table


def introduction(result: Row) -> str:
    """Say when, on what and with what it was measured."""
    machine = result["machine"]
    known = ("torch", "cuda", "triton", "mamba_ssm", "causal_conv1d", "fla-core", "flash_attn", "xformers")
    versions = ", ".join(f"{name} {machine[name]}" for name in known if machine.get(name))
    return (
        f"`{result['command']}` on one {machine.get('gpu', 'CPU: tiny models, to try the program')}, "
        f"{machine['date'][:10]}, Python {machine['python']}, {versions}; training in bfloat16 autocast, "
        "its layers compiled and recorded as CUDA graphs, at the published number of iterations:"
    )


def table(result: Row) -> str:
    """Return the table as Markdown."""
    lines = [
        "| work | unit | published | here | to reach | hoped for |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        here = shown(row["measured"])
        if row["measured"] is None:
            here = f"not measured: {row['not_measured']}"
        elif row["reached"] is not None:
            here = f"**{here}**" if row["reached"] else f"{here} (short)"
        cells = [
            row["work"],
            row["unit"],
            shown(row["published"]),
            here,
            shown(row["reach"]),
            shown(row["hope"]),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def shown(value: float | None) -> str:
    """Write a number down: thousands apart, four digits."""
    if value is None:
        return ""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.4g}"


def quoted(result: Row) -> str:
    """Return what stands in the README: what is measured, and the names of what is not."""
    measured = [row for row in result["rows"] if row["measured"] is not None]
    missing = "; ".join(row["work"] for row in result["rows"] if row["measured"] is None)
    parts = [introduction(result), table({**result, "rows": measured})]
    parts += [f"Not measured in this run: {missing}."] if missing else []
    parts += [f"To know: {result['note']}."] if result.get("note") else []
    return "\n\n".join(parts) + "\n"


def quote(result: Row, text: str) -> str:
    """Return a text with the table between its marks renewed."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + quoted(result) + END + after


# ---------------------------------------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME"
    )
    parser.add_argument(
        "--budget", type=float, default=530, help="seconds in all; what is left over isn't run"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on any device: to try the program")
    parser.add_argument(
        "--output", default="gpu", help="name of the file in results, or a path without .json"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table of results/gpu.json, measure nothing"
    )
    parser.add_argument("--quote", action="store_true", help="renew the table in the README, measure nothing")
    arguments = parser.parse_args()
    if arguments.show or arguments.quote:
        result = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(quoted(result))
        if arguments.quote:
            README.write_text(quote(result, README.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no program outlives this one
    began = time.monotonic()
    programs: dict[str, Row] = {}
    path = RESULTS.parent / f"{arguments.output}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as at_the_end:
        waiting = Process(arguments.programs[0], tiny=arguments.tiny)
        at_the_end.callback(waiting.end)
        for name, following in itertools.zip_longest(arguments.programs, arguments.programs[1:]):
            process = waiting
            left = arguments.budget - (time.monotonic() - began)
            if left < 10:
                process.end()
                programs[name] = {"failed": f"no time left of {arguments.budget:.0f} s"}
            else:
                process.begin()
            if following is not None:
                waiting = Process(following, tiny=arguments.tiny)
                at_the_end.callback(waiting.end)
            if left >= 10:
                programs[name] = process.finish(min(left, PROGRAMS[name].limit))
            found = programs[name]
            print(f"{name}: {found.get('seconds', 0)} s {found.get('failed', '')}", flush=True)
            for row in found.get("rows", []):
                print(f"  {row}", flush=True)
            result = collected(programs, arguments)  # written each time: what is measured stays
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{quoted(result)}\n{time.monotonic() - began:.0f} s in all; written to {path}")
    return int(any("failed" in program for program in programs.values()))


def collected(programs: dict[str, Row], arguments: argparse.Namespace) -> Row:
    """Return what is kept: where and with what, the table, and each program's own rows."""
    machine = next((program["machine"] for program in programs.values() if "machine" in program), {})
    options = [] if list(programs) == list(PROGRAMS) else ["--programs", *arguments.programs]
    options += ["--tiny"] if arguments.tiny else []
    rows = [figure.row(programs) for figure in FIGURES if figure.program in arguments.programs]
    went = [
        {"program": name, **{key: program[key] for key in ("command", "seconds", "failed") if key in program}}
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
        "rows": rows,
        "programs": went,
        **details,
    }


if __name__ == "__main__":
    sys.exit(main())
