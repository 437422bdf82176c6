"""The command line: ``python -m trainer.experiments jacobian | duality …``.

Each experiment writes a JSON file with every number and a picture. Exit codes: 0 done, 2 the request can't be
carried out (said in a sentence), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

REFUSED = 2
INTERRUPTED = 130
EXPERIMENTS = ("catbabi", "duality", "jacobian", "language", "solvers", "word-problem")
"""Each has a module in ``trainer.experiments.commands``: HELP, ``add_options`` and ``carry_out``."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m trainer.experiments", description="The paper's experiments."
    )
    commands = made.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name in EXPERIMENTS:
        module = _command(name)
        description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        command = commands.add_parser(name, help=module.HELP, description=description)
        module.add_options(command)
        command.add_argument(
            "--output", type=Path, metavar="DIR", help="folder to write (experiments/<name>-<time>)"
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(arguments)
    folder: Path | None = options.output
    try:
        from trainer.run_folder import default_folder

        folder = folder or default_folder(options.experiment, root=Path("experiments"))
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"the output {folder} is a file, not a folder; give another one by --output")
        text: str = _command(options.experiment).carry_out(folder, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        kept = f"go on by the same command with --output {folder}" if folder and folder.exists() else ""
        print(f"error: stopped; {kept or 'nothing was written'}", file=sys.stderr)
        return INTERRUPTED
    print(text)
    return 0


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"trainer.experiments.commands.{name.replace('-', '_')}")
