"""``python -m trainer.experiments language``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_run_options, add_setting

LISTS = ("seeds", "bounded", "self_iterations", "multiples")
HELP = "implicit language models and explicit twins: tokens, FLOPs, lengths, test-time compute, curricula"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="output of python -m trainer.tokenize")
    add(
        "--specs",
        nargs="+",
        default=["books_5m_residual", "books_5m_mamba2_residual"],
        metavar="FILE",
        help="implicit models, each compared with its explicit twin, of the zoo if it has one "
        "(default: the residual models of both families)",
    )
    add_setting(parser)
    add(
        "--bounded",
        type=float,
        nargs="*",
        default=[0.7, 0.8, 0.9],
        metavar="SHARE",
        help="shares of the run for the first phase of the paper's curriculum, for the first spec with each "
        "seed (0.7 0.8 0.9); empty: none",
    )
    add(
        "--self-iterations",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        metavar="N",
        help="maximum iterations, for one checkpoint (1 2 4 8 16 32 64)",
    )
    add(
        "--multiples",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="evaluation lengths, in training lengths (1 2 4 8)",
    )
    add(
        "--sequences",
        type=int,
        metavar="N",
        help="validation sequences at the training length; as much text at other lengths (default: all)",
    )
    add(
        "--evaluations",
        type=int,
        default=10,
        metavar="N",
        help="evaluations during training, for curves (10)",
    )
    add(
        "--petaflops",
        type=float,
        metavar="P",
        help="train every model for as many steps as execute P * 1e15 FLOPs; those that search are trained "
        "anew until they do (default: the steps of the specs)",
    )
    add_run_options(parser)
    add(
        "--explicit-set",
        nargs="+",
        action="extend",
        default=[],
        metavar="path.to.key=value",
        help="changes to explicit twins only, after those of --set, such as their learning rate",
    )


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.language.experiment import Settings, run

    return run(
        folder,
        options.data,
        specs=options.specs,
        settings=Settings(
            laptop=options.setting == "laptop",
            **{name: tuple(getattr(options, name)) for name in LISTS},
            sequences=options.sequences,
            evaluations=options.evaluations,
            petaflops=options.petaflops,
            changes=tuple(options.set),
            explicit_changes=tuple(options.explicit_set),
            only_finished=options.only_finished,
        ),
        device=options.device,
    )
