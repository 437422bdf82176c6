"""Losses of training with searches in 8-bit floats beside full precision: the same data, several seeds.

    python benchmarks/search_dtype_losses.py --data tokens [--spec books_10m] [--seeds 0 1 2] [--seconds 480]
    python benchmarks/search_dtype_losses.py --summary           # print the stored result

All runs train at the same time, each in a process of its own (on an NVIDIA GPU start the multi-process
service first). Layers narrower than those that the library quantizes, as in models of 10 M parameters, are
quantized too: their products are not faster, but have the same errors. The table has the final validation
loss of each run, the mean iterations and seconds per step, and the differences beside the spread of seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import RESULTS, machine, write

NAME = "search_dtype_losses"
DTYPES = ("null", "float8_e4m3fn")
PROGRAM = """
import sys
from implicit_blocks.ops import float8
float8.NARROWEST = 16
from trainer.cli.train import main
sys.exit(main(sys.argv[1:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None, help="folder of tokens")
    parser.add_argument("--spec", default="books_10m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=480, help="time limit; runs beyond it are killed")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the runs")
    parser.add_argument("--folder", type=Path, default=None, help="folder of the runs; default: temporary")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default=NAME, help="name in benchmarks/results, or a path")
    parser.add_argument("--summary", action="store_true", help="print the stored result")
    arguments = parser.parse_args()
    if arguments.summary:
        show(json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))["rows"])
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        rows = trained(arguments, folder)
    show(rows)
    given = {name: str(value) for name, value in vars(arguments).items() if name != "summary"}
    write(arguments.output, {"machine": machine(), "arguments": given, "rows": rows})


def trained(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train all runs side by side; return a row for each."""
    fast = "true" if arguments.device == "cuda" else "false"
    common = [f"training.compile_layers={fast}", f"training.cuda_graphs={fast}"]
    if arguments.data is not None:
        common.append(f"data.path={arguments.data}")
    runs: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    for seed in arguments.seeds:
        for dtype in DTYPES:
            output = folder / f"{dtype}-{seed}"
            output.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-c", PROGRAM, "--spec", arguments.spec, "--device", arguments.device]
            command += ["--output", str(output), *common, f"training.search_dtype={dtype}"]
            command += [f"training.seed={seed}", *arguments.set]
            log = (folder / f"{dtype}-{seed}.log").open("wb")
            environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
            runs[dtype, seed] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    end = time.monotonic() + arguments.seconds
    rows = []
    for (dtype, seed), process in runs.items():
        try:
            code = process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # saves the run
            code = process.wait()
        rows.append({"search_dtype": dtype, "seed": seed, "exit_code": code})
        rows[-1] |= outcome(folder / f"{dtype}-{seed}")
        print(rows[-1], flush=True)
    return rows


def outcome(run: Path) -> dict[str, Any]:
    """Return the losses of a run, with its mean iterations and the median seconds per step."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    metrics = [json.loads(line) for line in lines]
    last = metrics[-50:]
    found: dict[str, Any] = {
        "steps": len(metrics),
        "training_loss": round(statistics.mean(row["loss"] for row in last), 4),
        "iterations": round(statistics.mean(row["iterations"] for row in metrics), 2),
        "last_iterations": round(statistics.mean(row["iterations"] for row in last), 2),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in metrics)),
    }
    evaluations = run / "evaluations.jsonl"
    if evaluations.exists():
        every = [json.loads(line) for line in evaluations.read_text(encoding="utf-8").splitlines()]
        final = min((row for row in every if row["step"] == every[-1]["step"]), key=lambda row: row["length"])
        found["validation"] = {key: final[key] for key in ("length", "loss", "iterations", "non_converged")}
    return found


def losses(rows: list[dict[str, Any]], dtype: str) -> dict[int, float]:
    """Return the loss by seed: of the final validation, or of training where a run did not end."""
    return {
        row["seed"]: row.get("validation", {}).get("loss", row["training_loss"])
        for row in rows
        if row["search_dtype"] == dtype and "training_loss" in row
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the losses, and their differences beside the spread of the seeds."""
    plain, quantized = (losses(rows, dtype) for dtype in DTYPES)
    for name, found in zip(DTYPES, (plain, quantized), strict=True):
        print(name, {seed: round(loss, 4) for seed, loss in found.items()})
    seeds = [seed for seed in plain if seed in quantized]
    if len(seeds) > 1:
        differences = [quantized[seed] - plain[seed] for seed in seeds]
        spread = max(plain.values()) - min(plain.values())
        deviation = statistics.stdev(plain.values())
        print(
            f"mean difference {statistics.mean(differences):+.4f}; seeds of full precision: "
            f"range {spread:.4f}, standard deviation {deviation:.4f}"
        )


if __name__ == "__main__":
    main()
