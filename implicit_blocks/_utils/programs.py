"""The programs and their parsers, which know how the user started them, and hint at other names."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

from implicit_blocks._utils.hints import nearest, synonyms
from implicit_blocks._utils.synonyms import PLACES

_started_as: ContextVar[Mapping[str, str] | None] = ContextVar("started_as", default=None)
_UNKNOWN = "unrecognized arguments: "
UNREAD = 141
"""Exit code of a program whose output is no longer read: 128 + SIGPIPE, as shells report it."""


def run_program(main: Callable[[], int]) -> int:
    """Return the exit code of a program; it ends silently where its output is cut off, as by ``| head``."""
    try:
        try:
            code = main()
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        try:
            print(flush=True)  # a blank line before the traceback, if another pipe or socket is broken
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # avoids an error at exit
            return UNREAD
        raise


@contextlib.contextmanager
def started_as(names: Mapping[str, str]) -> Iterator[None]:
    """Context in which the usage messages of programs have the given names.

    Args:
        names: from ``python -m trainer.report`` to what the user typed, such as ``implicit-blocks report``.

    """
    before = _started_as.set(names)
    try:
        yield
    finally:
        _started_as.reset(before)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors name the nearest option, or the override of a field of the spec."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=(_started_as.get() or {}).get(prog, prog), **options)

    def add_subparsers(self, **options: Any) -> Any:
        """Add subcommands, which report their unknown options themselves."""
        return super().add_subparsers(**{"parser_class": _Subcommand, **options})

    def error(self, message: str) -> NoReturn:
        """Print the message and a hint, and exit with code 2."""
        option = message.removeprefix(_UNKNOWN).split()[0] if message.startswith(_UNKNOWN) else ""
        super().error(message + (self._hint(option) if option.startswith("--") else ""))

    def _hint(self, option: str) -> str:
        name = option.partition("=")[0].removeprefix("--").replace("-", "_")
        known = {text.removeprefix("--").replace("-", "_"): text for text in self._option_string_actions}
        if (near := nearest(name, [key for key in known if len(key) > 2])) is not None:
            return f"; did you mean {known[near]}?"
        if not any(action.dest == "overrides" for action in self._actions):
            return ""
        field = next(iter(synonyms(name)), name)
        return f"; write settings of the spec without dashes: {PLACES.get(field, f'path.to.{field}')}=value"


class _Subcommand(CommandParser):
    """The parser of a subcommand. argparse would leave its unknown options to the parser of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and refuse unknown ones."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_UNKNOWN + " ".join(unknown))
        return parsed, unknown
