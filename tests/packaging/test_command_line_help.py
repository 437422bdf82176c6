"""The help of every program describes the program and each of its options."""

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
import trainer.sweep.command

PROGRAMS = (
    implicit_blocks.__main__,
    trainer.cli.train,
    trainer.evaluation.command,
    trainer.experiments.cli,
    trainer.reporting.report,
    trainer.sweep.command,
    trainer.data.tokenizing.command,
)


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


PARSERS = [parser for program in PROGRAMS for parser in with_commands(program.parser())]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_describes_the_program_and_every_option(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert parser.description.endswith(".")
    assert "``" not in parser.format_help()  # docstring markup, which a terminal shows unrendered
    undescribed = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not undescribed
