"""Every program's own help says what the program is, and what each of its options means."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

import implicit_blocks.__main__
import trainer.cli.train
import trainer.data.tokenizing.command
import trainer.evaluation.command
import trainer.experiments.cli
import trainer.reporting.report

PROGRAMS = (
    implicit_blocks.__main__,
    trainer.cli.train,
    trainer.evaluation.command,
    trainer.experiments.cli,
    trainer.reporting.report,
    trainer.data.tokenizing.command,
)


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


PARSERS = [parser for program in PROGRAMS for parser in with_commands(program.parser())]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_says_what_everything_is(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert parser.description.endswith(".")
    assert "``" not in parser.format_help()  # marks of docstrings, which a terminal shows as they are
    silent = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not silent
