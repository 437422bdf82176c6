"""The command line: ``python -m trainer.experiments jacobian | duality …``.

Each experiment writes a JSON file with all numbers and a plot. Exit codes: 0 success, 2 the request cannot be
carried out (with a message), 130 interrupted; if a run fails, those of ``python -m trainer``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from implicit_blocks._utils.programs import CommandParser
from trainer.cli.exit_codes import INTERRUPTED, refuse
from trainer.experiments.common.checks import require_once

EXPERIMENTS = (
    "catbabi",
    "duality",
    "equal-compute",
    "jacobian",
    "language",
    "puzzles",
    "solvers",
    "word-problem",
)
"""Each has a module ``trainer.experiments.<name>.command`` with HELP, ``add_options`` and ``run_command``."""
_MEASURED_ONCE = ("duality", "jacobian", "puzzles", "solvers")
"""Experiments that do not resume; the others train runs that the same command continues."""
_ACCUMULATING, _REPEATABLE = ("set", "explicit_set"), ("dt",)
"""Lists that add up when given again; whose values may be equal."""


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    root = CommandParser(prog="python -m trainer.experiments", description="The paper's experiments.")
    commands = root.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name in EXPERIMENTS:
        module = _command(name)
        description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        # No abbreviations: with --seed 0 --seeds 1 the first would be silently lost.
        command = commands.add_parser(name, help=module.HELP, description=description, allow_abbrev=False)
        module.add_options(command)
        command.add_argument(
            "--output", type=Path, metavar="DIR", help="output directory (experiments/<name>-<time>)"
        )
    return root


def _remove_empty(folder: Path | None) -> None:
    """Remove the output directory if nothing has been written to it."""
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.rmdir()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(words)
    folder: Path | None = options.output
    try:
        from trainer.experiments.common.checks import require_matplotlib, require_writable
        from trainer.storage.run_folder import claim_folder

        _require_once(words, options)
        require_matplotlib()
        require_writable(folder or Path("experiments"))
        if folder is not None:
            _require_no_results(options.experiment, folder)
        folder = folder or claim_folder(options.experiment, root=Path("experiments"))
        text: str = _command(options.experiment).run_command(folder, options)
    except KeyboardInterrupt:
        _remove_empty(folder)
        kept = f"resume by the same command with --output {folder}" if folder and folder.exists() else ""
        return refuse(f"interrupted; {kept or 'nothing was written'}", INTERRUPTED)
    except Exception as error:
        from trainer.experiments.common.errors import describe_error

        _remove_empty(folder)
        if (found := describe_error(error)) is None:
            raise
        return refuse(*found)
    print(text)
    return 0


def _require_once(words: Sequence[str], options: argparse.Namespace) -> None:
    """Reject repeated lists and repeated values in a list, which would be lost or counted twice.

    Raises:
        ValueError: names the option.

    """
    names = Counter(word.partition("=")[0] for word in words if word.startswith("--"))
    for key, values in vars(options).items():
        name = f"--{key.replace('_', '-')}"
        if not isinstance(values, list) or key in _ACCUMULATING:
            continue
        if names[name] > 1:
            raise ValueError(f"{name} is given {names[name]} times; give it once with all its values")
        if key not in _REPEATABLE:
            require_once(name, values)


def _require_no_results(experiment: str, folder: Path) -> None:
    """Reject an output directory with results of an experiment that does not resume.

    Raises:
        ValueError: the directory contains results.

    """
    if experiment in _MEASURED_ONCE and (folder / f"{experiment}.json").exists():
        raise ValueError(
            f"{folder} contains the results of an earlier call ({experiment}.json); choose another --output"
        )


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"trainer.experiments.{name.replace('-', '_')}.command")
