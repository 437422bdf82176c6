"""Command-line options shared by several experiments."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the trained model."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="RUN",
        help="a run directory, or one of its checkpoints",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device."""
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if available)")


def add_changes(
    parser: argparse.ArgumentParser,
    *,
    help: str = "changes to all specs; explicit models ignore those of search and gradient",
) -> None:
    """Add changes to the specs of runs."""
    parser.add_argument(
        "--set",
        nargs="+",
        # Repeated options accumulate instead of replacing each other.
        action="extend",
        default=[],
        metavar="path.to.key=value",
        help=help,
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add seeds, the device, changes to the specs, and whether to train."""
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="N", help="seeds, one run each (0)"
    )
    parser.add_argument(
        "--only-finished",
        action="store_true",
        help="train nothing; combine the runs that other calls have finished in this --output",
    )
    add_device(parser)
    add_changes(parser)


def add_evaluation_size(parser: argparse.ArgumentParser) -> None:
    """Add the number and the length of the evaluation sequences."""
    parser.add_argument("--sequences", type=int, default=16, metavar="N", help="evaluation sequences (16)")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens per sequence (default: training length)"
    )


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the choice between the full and the laptop setting."""
    parser.add_argument(
        "--setting",
        choices=("full", "laptop"),
        default="full",
        help="the full specs, or small models and short runs: minutes on a CPU (full)",
    )
