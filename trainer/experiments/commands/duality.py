"""``python -m trainer.experiments duality``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.run_options import add_device

HELP = "sequential against simultaneous evaluation of a trained model, over tolerances"


def add_options(made: argparse.ArgumentParser) -> None:
    """Add what it is asked."""
    made.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN",
        help="a run's folder, or one of its checkpoints",
    )
    made.add_argument(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.05, 1e-2, 1e-3, 1e-4, 1e-5],
        metavar="X",
        help="of both searches (0.05 1e-2 1e-3 1e-4 1e-5)",
    )
    made.add_argument("--sequences", type=int, default=16, metavar="N", help="of evaluation data (16)")
    made.add_argument("--length", type=int, metavar="N", help="tokens each (default: the training length)")
    made.add_argument(
        "--max-iterations", type=int, metavar="N", help="of each search (default: the evaluation's)"
    )
    made.add_argument(
        "--damping", type=float, metavar="X", help="of both searches (default: the evaluation's)"
    )
    made.add_argument(
        "--scope",
        choices=("prefix", "sequence"),
        help="whose residual ends a search of all tokens together: a token's own and those before it, or its "
        "whole row's, as published (default: the evaluation's)",
    )
    made.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json, to name tokens by (default: the one beside the data, if there is one)",
    )
    made.add_argument("--double", action="store_true", help="compute in float64")
    add_device(made)


def carry_out(folder: Path, options: argparse.Namespace) -> str:
    """Run it and return its summary."""
    from trainer.experiments.duality import run

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
