"""``python -m trainer.experiments equal-compute``."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.experiments.common.options import add_device, add_setting
from trainer.experiments.equal_compute.plan import KINDS, NORMALIZATIONS, OPTIMIZERS

HELP = "implicit and explicit models at equal text and equal executed FLOPs, each tuned over the same grid"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment; None: the value of the setting."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="tokens with a validation split")
    add("--report", type=Path, required=True, metavar="DIR", help="tokens of the books of the report")
    add_setting(parser)
    kinds = "; ".join(f"{name}: {words}" for name, words in KINDS.items())
    add("--kinds", nargs="+", choices=list(KINDS), help=f"settings (all): {kinds}")
    add("--families", nargs="+", choices=["llama", "mamba2"], help="models (both)")
    add("--normalizations", nargs="+", choices=list(NORMALIZATIONS), help="normalization (qk_norm)")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, help="optimizer, the same on both sides (adamw)")
    add(
        "--shapes",
        nargs="+",
        metavar="P-C-KxN",
        help="layers of prelude, core and coda, and loops (1-2-1x3+8@.8); k2: gradient of the last 2 loops; "
        "@.6: one loop for 60 %% of the steps; +8@.8: 8 loops after 80 %% of them",
    )
    add("--layers", nargs="+", type=int, metavar="N", help="layers of explicit models of other sizes (8 12)")
    add("--widths", nargs="+", type=int, metavar="N", help="further widths of these models (none)")
    add(
        "--learning-rates", nargs="+", type=float, metavar="X", help="grid of learning rates (1e-3 2e-3 4e-3)"
    )
    add("--weight-decays", nargs="+", type=float, metavar="X", help="grid of weight decays (0.75 1.5 3)")
    add("--shares", nargs="+", type=float, metavar="X", help="grid of shares of the FLOP budget (0.6 1)")
    add("--widen", type=int, metavar="N", help="times to widen a grid whose best value is at its edge (0)")
    add("--petaflops", type=float, metavar="X", help="FLOP budget per run, in PFLOP (1.83)")
    add("--fresh-petaflops", type=float, metavar="X", help="the same for fresh text (0.15)")
    add(
        "--average",
        nargs="+",
        type=float,
        metavar="X",
        help="averages of the weights, by decay per step; the best counts (0.997 0.998 0.999 0.9995)",
    )
    add("--choosing-seeds", nargs="+", type=int, metavar="N", help="seeds for choosing the recipes (0)")
    add("--seeds", nargs="+", type=int, metavar="N", help="seeds of the reported runs (1 2 3 4 5)")
    add("--sequences", type=int, metavar="N", help="sequences of each evaluation set (512)")
    add("--side-by-side", type=int, metavar="N", help="models trained at the same time (6)")
    add("--only-finished", action="store_true", help="train nothing; compare the finished runs")
    add_device(parser)


def run_command(folder: Path, options: argparse.Namespace) -> str:
    """Run the experiment and return its summary."""
    from trainer.experiments.equal_compute.experiment import LAPTOP, Settings, changed, run

    settings = changed(Settings(), LAPTOP if options.setting == "laptop" else {})
    changes = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Settings.__dataclass_fields__
    }
    return run(
        folder, options.data, options.report, settings=changed(settings, changes), device=options.device
    )
