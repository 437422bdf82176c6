"""The command line: ``python -m trainer.experiments jacobian | duality …``.

Each experiment writes a JSON file with every number and a picture. Exit codes: 0 done, 2 the request can't be
carried out (said in a sentence), 130 interrupted; where a run fails, those of ``python -m trainer``.
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

from trainer.cli.exit_codes import INTERRUPTED, refuse
from trainer.experiments.run_options import require_once

EXPERIMENTS = ("catbabi", "duality", "jacobian", "language", "solvers", "word-problem")
"""Each has a module in ``trainer.experiments.commands``: HELP, ``add_options`` and ``carry_out``."""
_MEASURED_ONCE = ("duality", "jacobian", "solvers")
"""The others train runs, which the same command continues, and puts together again."""
_ADD_UP, _MAY_BE_EQUAL = ("set", "explicit_set"), ("dt",)
"""Lists that add up when given again; whose values may be equal."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m trainer.experiments", description="The paper's experiments."
    )
    commands = made.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name in EXPERIMENTS:
        module = _command(name)
        description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        # Without abbreviations: --seed 0 --seeds 1 would lose the first of them unseen.
        command = commands.add_parser(name, help=module.HELP, description=description, allow_abbrev=False)
        module.add_options(command)
        command.add_argument(
            "--output", type=Path, metavar="DIR", help="folder to write (experiments/<name>-<time>)"
        )
    return made


def _remove_empty(folder: Path | None) -> None:
    """Remove the folder that was made for an experiment, where nothing has been written into it."""
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.rmdir()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    folder: Path | None = options.output
    try:
        from trainer.experiments.failures import require_drawing, require_writable
        from trainer.storage.run_folder import claim_folder

        _require_once(given, options)
        require_drawing()
        require_writable(folder or Path("experiments"))
        if folder is not None:
            _require_no_results(options.experiment, folder)
        folder = folder or claim_folder(options.experiment, root=Path("experiments"))
        text: str = _command(options.experiment).carry_out(folder, options)
    except KeyboardInterrupt:
        _remove_empty(folder)
        kept = f"go on by the same command with --output {folder}" if folder and folder.exists() else ""
        return refuse(f"stopped; {kept or 'nothing was written'}", INTERRUPTED)
    except Exception as error:
        from trainer.experiments.failures import message

        _remove_empty(folder)
        if (found := message(error)) is None:
            raise
        return refuse(*found)
    print(text)
    return 0


def _require_once(given: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse what would be lost or counted twice: a list given again, a value again in its list.

    Raises:
        ValueError: names the option.

    """
    names = Counter(word.partition("=")[0] for word in given if word.startswith("--"))
    for key, values in vars(options).items():
        name = f"--{key.replace('_', '-')}"
        if not isinstance(values, list) or key in _ADD_UP:
            continue
        if names[name] > 1:
            raise ValueError(f"{name} is given {names[name]} times; give it once, with all its values behind")
        if key not in _MAY_BE_EQUAL:
            require_once(name, values)


def _require_no_results(experiment: str, folder: Path) -> None:
    """Refuse to replace the results of an experiment that continues no earlier one.

    Raises:
        ValueError: they are in the folder.

    """
    if experiment in _MEASURED_ONCE and (folder / f"{experiment}.json").exists():
        raise ValueError(
            f"{folder} holds the results of an earlier call ({experiment}.json); name another folder by "
            "--output"
        )


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"trainer.experiments.commands.{name.replace('-', '_')}")
