"""``python -m trainer.experiments catbabi``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.run_options import add_run_options

HELP = "bAbI's stories in a row: explicit models of 1, 2, 4 layers, the implicit one, accuracy by task"


def add_options(made: argparse.ArgumentParser) -> None:
    """Add what it is asked."""
    made.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="en-valid-10k.tar.xz, or its folder"
    )
    made.add_argument("--spec", default="catbabi", metavar="FILE", help="of the implicit model (catbabi)")
    made.add_argument(
        "--setting",
        choices=("full", "laptop"),
        default="full",
        help="the spec as it is, or narrow and short: minutes on a CPU (full)",
    )
    made.add_argument(
        "--models",
        nargs="+",
        default=["implicit-1", "explicit-1", "explicit-2", "explicit-4"],
        metavar="KIND-LAYERS",
        help="models and their layers (implicit-1 explicit-1 explicit-2 explicit-4)",
    )
    made.add_argument(
        "--scoring",
        nargs="+",
        choices=("answers", "all"),
        default=["answers", "all"],
        help="what the training loss is over: answers (QA mode), all next words (LM mode); both",
    )
    made.add_argument(
        "--split",
        choices=("valid", "test"),
        default="valid",
        help="whose answers are asked (valid); nothing should be chosen by the test split",
    )
    made.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens in the rows that are asked (default: as in training); longer ones cut fewer stories",
    )
    made.add_argument("--sequences", type=int, metavar="N", help="rows to ask (default: all of the split)")
    add_run_options(made)


def carry_out(folder: Path, options: argparse.Namespace) -> str:
    """Run it and return its summary."""
    from trainer.experiments.catbabi import run

    return run(
        folder,
        options.data,
        spec=options.spec,
        laptop=options.setting == "laptop",
        models=options.models,
        scoring=options.scoring,
        seeds=options.seeds,
        split=options.split,
        lengths=options.lengths,
        sequences=options.sequences,
        device=options.device,
        changes=options.set,
        only_finished=options.only_finished,
    )
