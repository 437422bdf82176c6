"""``python -m trainer.experiments language``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.run_options import add_run_options

HELP = (
    "implicit models and their explicit twins on text: tokens, FLOPs, lengths, test-time compute, curricula"
)


def add_options(made: argparse.ArgumentParser) -> None:
    """Add what it is asked."""
    made.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="what python -m trainer.tokenize wrote"
    )
    made.add_argument(
        "--specs",
        nargs="+",
        default=["books_5m_mamba2", "books_5m", "books_10m_mamba2", "books_10m"],
        metavar="FILE",
        help="implicit models, each compared with its explicit twin (two sizes of two families)",
    )
    made.add_argument(
        "--setting",
        choices=("full", "laptop"),
        default="full",
        help="the specs as they are, or narrow and short: minutes on a CPU (full)",
    )
    made.add_argument(
        "--bounded",
        type=float,
        nargs="*",
        default=[0.7, 0.8, 0.9],
        metavar="SHARE",
        help="shares of the run for the first phase, tried on the first spec with each seed "
        "(0.7 0.8 0.9); none: not tried",
    )
    made.add_argument(
        "--self-iterations",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N",
        help="iterations at most, of one checkpoint (1 2 4 8 16 32 64)",
    )
    made.add_argument(
        "--multiples",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="lengths to evaluate at, in training lengths (1 2 4 8)",
    )
    made.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="of the training length, of validation text, and as much text of other lengths (default: all)",
    )
    made.add_argument(
        "--evaluations", type=int, default=10, metavar="N", help="on the way, for the curves (10)"
    )
    add_run_options(made)
    made.add_argument(
        "--explicit-set",
        nargs="+",
        action="extend",
        default=[],
        metavar="path.to.key=value",
        help="changes to explicit twins alone, after those of --set: a learning rate that suits them better",
    )


def carry_out(folder: Path, options: argparse.Namespace) -> str:
    """Run it and return its summary."""
    from trainer.experiments.language import Settings, run

    return run(
        folder,
        options.data,
        specs=options.specs,
        settings=Settings(
            laptop=options.setting == "laptop",
            seeds=tuple(options.seeds),
            bounded=tuple(options.bounded),
            self_iterations=tuple(options.self_iterations),
            multiples=tuple(options.multiples),
            sequences=options.sequences,
            evaluations=options.evaluations,
            changes=tuple(options.set),
            explicit_changes=tuple(options.explicit_set),
            only_finished=options.only_finished,
        ),
        device=options.device,
    )
