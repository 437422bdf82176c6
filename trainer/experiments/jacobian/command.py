"""``python -m trainer.experiments jacobian``."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Theorem 1 and Figure 7: the state-to-state Jacobian by formula, autograd and finite differences"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="seed of weights and tokens (0)")
    add("--tokens", type=int, default=16, metavar="N", help="length of the sequence (16)")
    add("--width", type=int, default=64, metavar="N", help="d_model (64, the paper's)")
    add(
        "--dt",
        type=float,
        nargs=2,
        default=(0.001, 0.1),
        metavar=("MIN", "MAX"),
        help="range of the initial step sizes (0.001 0.1, Mamba2's); larger values couple the state more",
    )
    add("--tolerance", type=float, default=1e-12, metavar="X", help="tolerance of the fixed point (1e-12)")
    add("--max-iterations", type=int, default=512, metavar="N", help="maximum iterations (512)")


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.jacobian.experiment import run

    return run(
        folder,
        seed=options.seed,
        tokens=options.tokens,
        width=options.width,
        dt=tuple(options.dt),
        tolerance=options.tolerance,
        max_iterations=options.max_iterations,
    )
