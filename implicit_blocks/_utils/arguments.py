"""Arguments of the commands that load a trained model. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Add the source of a model, and its spec, tokenizer and device."""
    command.add_argument(
        "source", type=Path, help="run directory, checkpoint, pretrained folder, or weights file"
    )
    command.add_argument("--spec", help="name in the zoo, or YAML file (default: that of the source)")
    command.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, a directory with one, or bytes (default: that of the source or the run's data)",
    )
    command.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if available)")


@contextlib.contextmanager
def optional_packages() -> Iterator[None]:
    """Report a missing optional package as a user error; other import errors pass.

    Raises:
        ValueError: transformers is missing.

    """
    try:
        yield
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise ValueError(str(error)) from None
