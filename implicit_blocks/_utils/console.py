"""The console script ``implicit-blocks``, also ``python -m implicit_blocks``: every program as one command.

A command is imported when it runs, so that the list of commands appears at once. The console script does not
search the working directory for modules, as ``python -m`` does: a user's ``trainer.py`` hides nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from implicit_blocks._utils.programs import run_program, started_as

SCRIPT = "implicit-blocks"

TRAINER: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "train": ("trainer", "trainer.cli.train", "train a model described by a spec"),
        "tokenize": (
            "trainer.tokenize",
            "trainer.data.tokenizing.command",
            "tokenize text into shards for training",
        ),
        "evaluate": ("trainer.evaluate", "trainer.evaluation.command", "evaluate a model on benchmarks"),
        "report": ("trainer.report", "trainer.reporting.report", "plot runs side by side, or watch them"),
        "sweep": ("trainer.sweep", "trainer.sweep.command", "train a grid of runs and compare them"),
        "experiments": ("trainer.experiments", "trainer.experiments.cli", "run the paper's experiments"),
    }
)
"""Commands of the trainer: the module that ``python -m`` runs, the module with its ``main``, a summary."""

LIBRARY: Mapping[str, str] = MappingProxyType(
    {
        "generate": "continue prompts with a trained model",
        "serve": "serve a trained model over HTTP, with OpenAI's API",
        "inspect": "write a report of a text's searches as one HTML file",
        "export": "save a spec's model as a pretrained folder for transformers",
        "convert": "convert published models, or language models of transformers, and back",
        "describe": "show a spec's model as a tree, its search settings and its phases",
        "diff": "show the differences between two specs, after extends and defaults",
        "list": "list kinds, their distributions, and plugins that failed",
        "schema": "print the JSON schema of spec files, with every registered kind, for editors",
        "new-plugin": "create an installable plugin from a template",
    }
)
"""Commands of `implicit_blocks.__main__`, with their summaries."""


def main(arguments: Sequence[str] | None = None, *, script: str = SCRIPT) -> int:
    """Run a command and return its exit code; 2 for an unknown one.

    Args:
        arguments: the command and its arguments; None: those of the process.
        script: how the user started this program, for usage messages.

    """
    return run_program(lambda: _main(list(sys.argv[1:] if arguments is None else arguments), script))


def _main(given: list[str], script: str) -> int:
    name = given[0] if given else "--help"
    if name in ("-h", "--help", "help"):
        print(_help(script))
        return 0 if given else 2
    if name == "--version":
        print(f"implicit_blocks {import_module('implicit_blocks').__version__}")
        return 0
    if name not in {**TRAINER, **LIBRARY}:
        from implicit_blocks._utils.hints import did_you_mean

        print(
            f"{script}: unknown command {name!r}; {did_you_mean(name, {**TRAINER, **LIBRARY})}",
            file=sys.stderr,
        )
        return 2
    return _run(name, given[1:], script)


def _run(name: str, arguments: list[str], script: str) -> int:
    """Import the program of a command and run it."""
    from implicit_blocks._utils.own_packages import load_own

    names = {f"python -m {module}": f"{script} {command}" for command, (module, _, _) in TRAINER.items()}
    with started_as({**names, "python -m implicit_blocks": script}):
        if name in LIBRARY:
            module, words = "implicit_blocks.__main__", [name, *arguments]
        else:
            load_own("trainer")
            module, words = TRAINER[name][1], arguments
        code: int = import_module(module).main(words)
        return code


def _help(script: str) -> str:
    width = max(map(len, [*TRAINER, *LIBRARY])) + 2
    rows = {
        "training": {command: summary for command, (_, _, summary) in TRAINER.items()},
        "models and specs": LIBRARY,
    }
    lines = [
        f"usage: {script} COMMAND [ARGUMENTS]",
        "",
        "Train, evaluate and serve implicit sequence models.",
    ]
    for title, commands in rows.items():
        lines += ["", f"{title}:"]
        lines += [f"  {command.ljust(width)}{summary}" for command, summary in commands.items()]
    return "\n".join(
        [*lines, "", f"{script} COMMAND --help describes a command; --version prints the version."]
    )
