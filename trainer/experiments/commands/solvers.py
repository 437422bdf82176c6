"""``python -m trainer.experiments solvers``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.run_options import add_device

HELP = "every solver, windows, warm start, damping on trained models: iterations, work, time, contraction"


def add_options(made: argparse.ArgumentParser) -> None:
    """Add what it is asked."""
    made.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="folders of runs, or checkpoints (default: word_problem_s3, trained here first: minutes)",
    )
    made.add_argument(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.05, 1e-2, 1e-3],
        metavar="X",
        help="relative residuals that end a search (0.05 1e-2 1e-3)",
    )
    made.add_argument("--sequences", type=int, default=16, metavar="N", help="of evaluation data (16)")
    made.add_argument("--length", type=int, metavar="N", help="tokens each (default: the training length)")
    made.add_argument("--max-iterations", type=int, default=512, metavar="N", help="of each search (512)")
    made.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="measurements of a time, the median counts (3)"
    )
    made.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="ways with one of these in their names"
    )
    made.add_argument(
        "--penalties",
        type=float,
        nargs="+",
        default=[],
        metavar="X",
        help="weights of a Jacobian penalty to train on with, 0 for the same steps without (none)",
    )
    made.add_argument("--penalty-steps", type=int, default=60, metavar="N", help="for so many steps (60)")
    add_device(made)


def carry_out(folder: Path, options: argparse.Namespace) -> str:
    """Run it and return its summary."""
    from trainer.experiments.solvers import run

    checkpoints = options.checkpoint
    if not checkpoints:
        from trainer.experiments.runs import run_spec, train

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
