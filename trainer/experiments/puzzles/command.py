"""``python -m trainer.experiments puzzles``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_changes, add_checkpoint, add_device

HELP = "solve puzzles with more iterations and more starts, from one trained model"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add_checkpoint(parser)
    parser.add_argument(
        "--iterations",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32, 64, 128],
        metavar="N",
        help="maximum numbers of iterations (4 8 16 32 64 128)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=8,
        metavar="N",
        help="starts per board: the model's own, and random ones; the most confident answer is chosen (8)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=1.0,
        metavar="X",
        help="standard deviation of the noise added to the model's own start (1.0)",
    )
    parser.add_argument(
        "--symmetries",
        action="store_true",
        help="solve up to eight symmetric variants of a maze, instead of adding noise to the start",
    )
    parser.add_argument("--boards", type=int, default=256, metavar="N", help="evaluation boards (256)")
    add_changes(parser, help="changes to the run's spec, such as harder or larger boards")
    add_device(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.puzzles.experiment import run

    return run(
        folder,
        options.checkpoint,
        iterations=options.iterations,
        restarts=options.restarts,
        noise=None if options.symmetries else options.noise,
        boards=options.boards,
        overrides=options.set,
        device=options.device,
    )
