"""``python -m trainer.experiments word-problem``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_changes, add_device

HELP = "state tracking, Figures 1 and 3: layers needed per length; training with rare hard tokens"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    add = parser.add_argument
    add(
        "--study",
        choices=("layers", "hard-tokens"),
        default="layers",
        help="layers (Figure 1, the default): the smallest number of layers that solves each length; "
        "hard-tokens (Figure 3): train with rare hard tokens and few iterations, test with many hard tokens",
    )
    add(
        "--setting",
        choices=("laptop", "gpu"),
        default="laptop",
        help="defaults of all other options (laptop)",
    )
    add("--spec", metavar="FILE", help="base run (default: the setting's)")
    add("--groups", nargs="+", metavar="G", help="S3, A4, A5, S5, Z7, A5xZ2, …")
    add(
        "--models",
        nargs="+",
        metavar="NAME",
        help="layers: implicit-mamba2 mamba2 implicit-llama llama, transformers:NAME",
    )
    add("--layers", type=int, nargs="+", metavar="N", help="layers: numbers of layers of explicit models")
    add("--lengths", type=int, nargs="+", metavar="N", help="training lengths")
    add("--threshold", type=float, metavar="X", help="layers: accuracy at which a length is solved")
    add("--iterations", type=int, nargs="+", metavar="N", help="hard-tokens: maximum training iterations")
    add(
        "--token-iterations",
        type=int,
        metavar="N",
        help="hard-tokens: maximum iterations per token in sequential mode",
    )
    add(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="hard-tokens: test these runs or checkpoints instead of training",
    )
    add("--train-p", type=float, metavar="P", help="identity probability throughout training")
    add("--test-p", type=float, nargs="+", metavar="P", help="identity probabilities of the tests")
    add(
        "--test-lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of the tests, in training lengths: 1 4",
    )
    add("--sequences", type=int, metavar="N", help="sequences per test")
    add("--seeds", type=int, nargs="+", metavar="N", help="seeds of the runs")
    add_device(parser)
    add_changes(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.word_problem.experiment import run

    return run(
        folder,
        study=options.study,
        setting=options.setting,
        device=options.device,
        overrides=options.set,
        checkpoints=options.checkpoints or (),
        spec=options.spec,
        groups=options.groups,
        models=options.models,
        layers=options.layers,
        lengths=options.lengths,
        threshold=options.threshold,
        iterations=options.iterations,
        token_iterations=options.token_iterations,
        train_p=options.train_p,
        test_p=options.test_p,
        test_lengths=options.test_lengths,
        sequences=options.sequences,
        seeds=options.seeds,
    )
