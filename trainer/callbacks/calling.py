"""Calling the callbacks of a run, so that a failure says whose it is and how to go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from implicit_blocks import registry
from trainer.callbacks.base import Callback, CallbackContext
from trainer.errors import CallbackError
from trainer.specs.callbacks import CallbackSpec


class Callbacks:
    """The callbacks of a run, in the order of its spec; those that failed are called no more."""

    def __init__(self, members: Sequence[tuple[CallbackSpec, Callback]] = ()) -> None:
        self._members = list(members)
        self.stop_reason: str | None = None
        """Why a callback asked the run to end, or None."""

    @classmethod
    def build(cls, specs: Sequence[CallbackSpec]) -> Self:
        """Build what the specs describe.

        Raises:
            ValueError: a builder refuses its spec, fails, or makes something that is no callback.

        """
        members: list[tuple[CallbackSpec, Callback]] = []
        for index, spec in enumerate(specs):
            try:
                made = registry.build(spec)
            except Exception as error:  # a plugin may raise anything; the run has not begun
                raise ValueError(f"callbacks.{index}: {_whose(spec)} can't be built: {error}") from error
            if not isinstance(made, Callback):
                raise ValueError(
                    f"callbacks.{index}: {_whose(spec)} is built as {type(made).__qualname__}, which is no "
                    "trainer.callbacks.Callback; derive it from that class"
                )
            members.append((spec, made))
        return cls(members)

    def stop(self, reason: str) -> None:
        """Note that the run is to end after this step; the first reason given counts."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def call(self, event: str, run: CallbackContext, **details: Any) -> None:
        """Call a method of every callback.

        Raises:
            CallbackError: one that the run can't do without failed; the others have been called.

        """
        failures: list[CallbackError] = []
        for spec, member in list(self._members):
            try:
                getattr(member, event)(run, **details)
            except Exception as error:  # a plugin may raise anything
                self._members.remove((spec, member))
                failed = CallbackError(callback=_whose(spec), event=event, error=error)
                failed.__cause__ = error
                if spec.required:
                    failures.append(failed)
                else:
                    run.log(f"WARNING: {failed}; the run goes on without it")
        if failures:
            raise failures[0]


def _whose(spec: CallbackSpec) -> str:
    entry = registry.entry("callback", spec.kind)
    return f"callback {spec.kind!r} of {entry.owner} {entry.version}"
