"""``python -m trainer.experiments equal-compute``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_device, add_setting
from trainer.experiments.equal_compute.plan import KINDS, NORMALIZATIONS

HELP = "implicit and explicit models at equal text and equal executed FLOPs, each tuned over the same grid"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment; None: the value of the setting."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="tokens with a validation split"
    )
    parser.add_argument(
        "--report",
        type=Path,
        required=True,
        metavar="DIR",
        help="tokens of the held-out books for the report",
    )
    add_setting(parser)
    kinds = "; ".join(f"{name}: {words}" for name, words in KINDS.items())
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help=f"settings (all): {kinds}")
    parser.add_argument("--families", nargs="+", choices=["llama", "mamba2"], help="models (both)")
    parser.add_argument(
        "--normalizations",
        nargs="+",
        choices=list(NORMALIZATIONS),
        help="normalization of both sides (qk_norm)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="P-C-KxN",
        help="layers of prelude, core and coda, and loops (1-2-1x3); k2: gradient of the last 2 loops; "
        "@.6: one loop for 60 %% of the steps",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of layers of explicit models of another size (8 12)",
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, metavar="N", help="further widths of these models (none)"
    )
    parser.add_argument(
        "--learning-rates", nargs="+", type=float, metavar="X", help="grid of learning rates (1e-3 2e-3 4e-3)"
    )
    parser.add_argument(
        "--weight-decays", nargs="+", type=float, metavar="X", help="grid of weight decays (0.75 1.5 3)"
    )
    parser.add_argument(
        "--shares", nargs="+", type=float, metavar="X", help="grid of shares of the FLOP budget (0.6 1)"
    )
    parser.add_argument(
        "--widen",
        type=int,
        metavar="N",
        help="number of times to widen a grid whose best value is at its edge (0)",
    )
    parser.add_argument("--petaflops", type=float, metavar="X", help="FLOP budget per run, in PFLOP (3)")
    parser.add_argument(
        "--fresh-petaflops",
        type=float,
        metavar="X",
        help="FLOP budget per run on fresh text, in PFLOP (0.15)",
    )
    parser.add_argument(
        "--average",
        type=float,
        metavar="X",
        help="also train with averaged weights, with this decay per step",
    )
    parser.add_argument(
        "--choosing-seeds", nargs="+", type=int, metavar="N", help="seeds for choosing the recipes (0)"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="seeds of the reported runs (1 2 3 4 5)"
    )
    parser.add_argument("--sequences", type=int, metavar="N", help="sequences of each evaluation set (512)")
    parser.add_argument(
        "--side-by-side", type=int, metavar="N", help="number of models trained at the same time (6)"
    )
    parser.add_argument(
        "--only-finished", action="store_true", help="train nothing; compare the finished runs"
    )
    add_device(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.equal_compute.experiment import LAPTOP, Settings, changed, run

    settings = changed(Settings(), LAPTOP if options.setting == "laptop" else {})
    asked = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Settings.__dataclass_fields__
    }
    return run(folder, options.data, options.report, settings=changed(settings, asked), device=options.device)
