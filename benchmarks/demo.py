"""A fixed point learns what its explicit twin cannot: S3 word problems, both models trained side by side.

    python benchmarks/demo.py [--implicit SPEC] [--seeds 0 1 2] [--output DIR] [--record [NAME]] [KEY=VALUE …]

Trains ``word_problem_s3`` and ``word_problem_s3_explicit`` at the same time, each in a process with one
thread, draws the comparison, and prints the accuracy over the last tokens for each length and identity
probability p, at convergence, with the residual and the share of converged sequences. With several seeds it
repeats this for each; ``--record`` writes the figures to ``results/demo.json``, or ``results/NAME.json``.
``--implicit`` names another implicit model for this task, such as ``word_problem_s3_residual``. Overrides of
spec keys apply to both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from report import machine, write

SPECS = {"implicit": "word_problem_s3", "explicit": "word_problem_s3_explicit"}


@dataclass(frozen=True)
class Run:
    """The run of one model: its name, its folder and its training process."""

    name: str
    folder: Path
    process: subprocess.Popen[str]


def start(name: str, folder: Path, *, spec: str, device: str, seed: int, overrides: Sequence[str]) -> Run:
    """Start training in a separate process with one thread."""
    command = [sys.executable, "-m", "trainer", "--spec", spec, "--output", str(folder)]
    command += ["--device", device, "training.threads=1", f"training.seed={seed}", "training.log_every=25"]
    process = subprocess.Popen(
        [*command, *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
    )
    return Run(name=name, folder=folder, process=process)


def relay(run: Run) -> None:
    """Print the output of a run, each line prefixed with the run's name."""
    stream: IO[str] | None = run.process.stdout
    assert stream is not None
    for line in stream:
        print(f"{run.name} │ {line.rstrip()}", flush=True)


def train(
    folder: Path, *, specs: dict[str, str], device: str, seed: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train both models side by side and return their summaries; if one fails, stop the other."""
    runs = [
        start(name, folder / name, spec=spec, device=device, seed=seed, overrides=overrides)
        for name, spec in specs.items()
    ]
    relays = [threading.Thread(target=relay, args=(run,), daemon=True) for run in runs]
    for thread in relays:
        thread.start()
    try:
        waiting = list(runs)
        while waiting:
            for run in list(waiting):
                code = run.process.poll()
                if code is not None:
                    waiting.remove(run)
                if code:
                    raise SystemExit(
                        f"error: the {run.name} run failed with exit code {code}; see its output above"
                    )
            time.sleep(0.2)
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.terminate()
                run.process.wait()
        for thread in relays:
            thread.join()
    return {run.name: json.loads((run.folder / "summary.json").read_text(encoding="utf-8")) for run in runs}


def draw(folder: Path) -> Path:
    """Draw the two runs side by side; return the path of the picture."""
    picture = folder / "comparison.png"
    command = [sys.executable, "-m", "trainer.report", *(str(folder / name) for name in SPECS)]
    for name in SPECS:
        command += ["--label", name]
    command += [
        "--title",
        "Products in S3: one layer iterated to its fixed point, and the same layer run once",
    ]
    subprocess.run([*command, "--output", str(picture)], check=True, stdout=subprocess.DEVNULL)
    return picture


def table(summaries: dict[str, Any]) -> str:
    """Return the results, one line per p and length."""
    implicit, explicit = (summaries[name] for name in SPECS)
    rows = [["p", "length", "explicit", "implicit", "residual", "converged", "iterations"]]
    for ours, theirs in zip(implicit["evaluation"], explicit["evaluation"], strict=True):
        factor = ours["length"] / implicit["training_length"]
        rows.append(
            [
                f"{ours['identity_probability']:g}",
                f"{ours['length']} ({factor:g}x)",
                f"{theirs['accuracy_last']:.2%}",
                f"{ours['accuracy_last']:.2%}",
                f"{ours['residual']:.1e}",
                f"{1 - ours['non_converged']:.1%}",
                f"{ours['iterations']:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = f"accuracy over the last {implicit['last_tokens']} tokens, chance {implicit['chance']:.1%}"
    return "\n".join(
        [f"{title}; residual, converged and iterations are those of the implicit model:", *lines]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="path.to.key=value", help="overrides for both specs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the runs (default runs/demo-<time>)"
    )
    parser.add_argument(
        "--record", nargs="?", const="demo", metavar="NAME", help="write results/NAME.json (demo)"
    )
    parser.add_argument("--implicit", default=SPECS["implicit"], metavar="SPEC", help="the implicit model")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_intermixed_args(arguments)
    output = options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    found = []
    for seed in options.seeds:
        began = time.perf_counter()
        folder = output / f"seed-{seed}" if len(options.seeds) > 1 else output
        print(f"training both models on S3, seed {seed}, one thread each; output folder: {folder}")
        specs = {**SPECS, "implicit": options.implicit}
        summaries = train(folder, specs=specs, device=options.device, seed=seed, overrides=options.overrides)
        picture = draw(folder)
        seconds = time.perf_counter() - began
        print()
        for name, summary in summaries.items():
            size = f"{summary['parameters']:,} parameters, {summary['steps']} steps"
            print(f"{name}: {size}, {summary['seconds']:.0f} s")
        print(f"\n{table(summaries)}\n\n{seconds:.0f} s in total. Picture: {picture}")
        found.append(
            {"seed": seed, "seconds": round(seconds, 1), **{n: _figures(s) for n, s in summaries.items()}}
        )
    if options.record is not None:
        chosen = {"seeds": options.seeds, "overrides": options.overrides}
        if options.implicit != SPECS["implicit"]:
            chosen["implicit"] = options.implicit
        print("figures:", write(options.record, {"machine": machine(), "arguments": chosen, "rows": found}))
    return 0


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    kept = ("identity_probability", "length", "accuracy_last", "residual", "residual_max", "non_converged",
            "iterations", "iterations_max")  # fmt: skip
    rows = [{key: row[key] for key in kept} for row in summary["evaluation"]]
    return {**{key: summary[key] for key in ("parameters", "steps", "seconds")}, "evaluation": rows}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; the lines above show how to resume each run", file=sys.stderr)
        sys.exit(130)
