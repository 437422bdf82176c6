"""``python -m trainer.experiments solvers``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_device, add_evaluation_size

HELP = "iterations, work, time and contraction of every solver, damping, window and warm start"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="run directories or checkpoints (default: word_problem_s3, trained first in minutes)",
    )
    add(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.05, 1e-2, 1e-3],
        metavar="X",
        help="relative residuals at which a search stops (0.05 1e-2 1e-3)",
    )
    add_evaluation_size(parser)
    add("--max-iterations", type=int, default=512, metavar="N", help="maximum iterations per search (512)")
    add("--repeats", type=int, default=3, metavar="N", help="time measurements; the median is reported (3)")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only configurations whose name contains one of these",
    )
    add(
        "--penalties",
        type=float,
        nargs="+",
        default=[],
        metavar="X",
        help="weights of a Jacobian penalty for further training; 0: the same steps without it (none)",
    )
    add("--penalty-steps", type=int, default=60, metavar="N", help="steps of that training (60)")
    add_device(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.solvers.experiment import run

    checkpoints = options.checkpoint
    if not checkpoints:
        from trainer.experiments.common.runs import run_spec, train

        name = "word_problem_s3"
        checkpoints = [train(run_spec(name), folder / name, name=name, device=options.device).folder]
    return run(
        folder,
        checkpoints,
        tolerances=options.tolerances,
        sequences=options.sequences,
        length=options.length,
        max_iterations=options.max_iterations,
        repeats=options.repeats,
        only=options.only,
        penalties=options.penalties,
        penalty_steps=options.penalty_steps,
        device=options.device,
    )
