"""``python -m trainer.experiments word-problem``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.run_options import add_changes, add_device

HELP = "state tracking, Figures 1 and 3: least layers against length; rare hard tokens, training iterations"


def add_options(made: argparse.ArgumentParser) -> None:
    """Add what it is asked."""
    made.add_argument(
        "--study",
        choices=("layers", "hard-tokens"),
        default="layers",
        help="layers (Figure 1, the default): the least layers that solve each length; hard-tokens "
        "(Figure 3): trained where hard tokens are rare, by so many iterations, tested where they are not",
    )
    made.add_argument(
        "--setting", choices=("laptop", "gpu"), default="laptop", help="says what isn't given here (laptop)"
    )
    made.add_argument("--spec", metavar="FILE", help="the run that is varied (default: the setting's)")
    made.add_argument("--groups", nargs="+", metavar="G", help="S3, A4, A5, S5, Z7, A5xZ2, …")
    made.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        help="layers: implicit-mamba2 mamba2 implicit-llama llama, transformers:NAME",
    )
    made.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers: of explicit models")
    made.add_argument("--lengths", type=int, nargs="+", metavar="N", help="of training")
    made.add_argument("--threshold", type=float, metavar="X", help="layers: accuracy that counts as solved")
    made.add_argument("--iterations", type=int, nargs="+", metavar="N", help="hard-tokens: in training")
    made.add_argument(
        "--token-iterations",
        type=int,
        metavar="N",
        help="hard-tokens: of one token's search at most, in sequential mode",
    )
    made.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="hard-tokens: test these trained runs, or checkpoints of them, and train none",
    )
    made.add_argument(
        "--train-p", type=float, metavar="P", help="identity probability in training, all of it"
    )
    made.add_argument("--test-p", type=float, nargs="+", metavar="P", help="identity probabilities in tests")
    made.add_argument(
        "--test-lengths", type=int, nargs="+", metavar="N", help="of the tests, in training lengths: 1 4"
    )
    made.add_argument("--sequences", type=int, metavar="N", help="in each test")
    made.add_argument("--seeds", type=int, nargs="+", metavar="N", help="of the runs")
    add_device(made)
    add_changes(made)


def carry_out(folder: Path, options: argparse.Namespace) -> str:
    """Run it and return its summary."""
    from trainer.experiments.word_problem import run

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
