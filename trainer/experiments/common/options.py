"""Command-line options shared by several experiments."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_checkpoint(made: argparse.ArgumentParser) -> None:
    """Add the trained model."""
    made.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN",
        help="a run directory, or one of its checkpoints",
    )


def add_device(made: argparse.ArgumentParser) -> None:
    """Add the device."""
    made.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if available)")


def add_changes(made: argparse.ArgumentParser) -> None:
    """Add changes to the specs of runs."""
    made.add_argument(
        "--set",
        nargs="+",
        # Repeated options accumulate instead of replacing each other.
        action="extend",
        default=[],
        metavar="path.to.key=value",
        help="changes to all specs; explicit models ignore those of search and gradient",
    )


def add_run_options(made: argparse.ArgumentParser) -> None:
    """Add seeds, the device, changes to the specs, and whether to train."""
    made.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="N", help="seeds, one run each (0)"
    )
    made.add_argument(
        "--only-finished",
        action="store_true",
        help="train nothing; combine the runs that other calls have finished in this --output",
    )
    add_device(made)
    add_changes(made)


def add_evaluation_size(made: argparse.ArgumentParser) -> None:
    """Add the number and the length of the evaluation sequences."""
    made.add_argument("--sequences", type=int, default=16, metavar="N", help="evaluation sequences (16)")
    made.add_argument(
        "--length", type=int, metavar="N", help="tokens per sequence (default: training length)"
    )


def add_setting(made: argparse.ArgumentParser) -> None:
    """Add the choice between the full and the laptop setting."""
    made.add_argument(
        "--setting",
        choices=("full", "laptop"),
        default="full",
        help="the full specs, or small models and short runs: minutes on a CPU (full)",
    )
