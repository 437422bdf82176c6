"""``python -m trainer.experiments duality``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_checkpoint, add_device, add_evaluation_size

HELP = "compare sequential and simultaneous evaluation of a trained model over tolerances"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add_checkpoint(parser)
    add(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.05, 1e-2, 1e-3, 1e-4, 1e-5],
        metavar="X",
        help="tolerances of both modes (0.05 1e-2 1e-3 1e-4 1e-5)",
    )
    add_evaluation_size(parser)
    add(
        "--max-iterations",
        type=int,
        metavar="N",
        help="maximum iterations per search (default: the evaluation's)",
    )
    add("--damping", type=float, metavar="X", help="damping in both modes (default: the evaluation's)")
    add(
        "--scope",
        choices=("prefix", "sequence"),
        help="residual that stops a token's search in simultaneous mode: its own and those before it, or its "
        "whole row's, as published (default: the evaluation's)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json with the names of the tokens (default: the one beside the data, if any)",
    )
    add("--double", action="store_true", help="compute in float64")
    add_device(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.duality.experiment import run

    return run(
        folder,
        options.checkpoint,
        tolerances=options.tolerances,
        sequences=options.sequences,
        length=options.length,
        max_iterations=options.max_iterations,
        damping=options.damping,
        scope=options.scope,
        tokenizer=options.tokenizer,
        double=options.double,
        device=options.device,
    )
