"""``python -m trainer.experiments catbabi``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_run_options, add_setting

HELP = "catbAbI: accuracy per task of explicit models with 1, 2 and 4 layers and of an implicit model"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="PATH", help="en-valid-10k.tar.xz or its directory")
    add("--spec", default="catbabi", metavar="FILE", help="spec of the implicit model (catbabi)")
    add_setting(parser)
    add(
        "--models",
        nargs="+",
        default=["implicit-1", "explicit-1", "explicit-2", "explicit-4"],
        metavar="KIND-LAYERS",
        help="models and their numbers of layers (implicit-1 explicit-1 explicit-2 explicit-4)",
    )
    add(
        "--scoring",
        nargs="+",
        choices=("answers", "all"),
        default=["answers", "all"],
        help="positions in the training loss: answers (QA mode), all next words (LM mode) (both)",
    )
    add(
        "--split",
        choices=("valid", "test"),
        default="valid",
        help="split to score (valid); do not tune on the test split",
    )
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens per scored row (default: training length); longer rows cut fewer stories",
    )
    add("--sequences", type=int, metavar="N", help="rows to score (default: all of the split)")
    add_run_options(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.catbabi.experiment import run

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
