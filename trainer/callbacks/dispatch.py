"""Calling the callbacks of a run, and reporting a failure on every rank with the callback's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from implicit_blocks import registry
from trainer.callbacks.base import Callback, CallbackContext
from trainer.distributed import Ranks
from trainer.errors import CallbackError
from trainer.specs.callbacks import CallbackSpec


class Callbacks:
    """The callbacks of a run, in the order of its spec. A callback that fails is not called again."""

    def __init__(self, members: Sequence[tuple[CallbackSpec, Callback]] = ()) -> None:
        self._members = list(members)
        self.stop_reason: str | None = None
        """Why a callback requested the end of the run, or None."""

    @classmethod
    def build(cls, specs: Sequence[CallbackSpec]) -> Self:
        """Build the callbacks that the specs describe.

        Raises:
            ValueError: a builder refuses its spec, fails, or returns something other than a callback.

        """
        members: list[tuple[CallbackSpec, Callback]] = []
        for index, spec in enumerate(specs):
            try:
                built = registry.build(spec)
            except Exception as error:  # a plugin may raise anything; the run has not begun
                raise ValueError(f"callbacks.{index}: {_describe(spec)} can't be built: {error}") from error
            if not isinstance(built, Callback):
                raise ValueError(
                    f"callbacks.{index}: {_describe(spec)} is built as {type(built).__qualname__}, which is "
                    "not a trainer.callbacks.Callback; derive it from that class"
                )
            members.append((spec, built))
        return cls(members)

    def stop(self, reason: str) -> None:
        """Request the end of the run after this step; the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def call(self, event: str, run: CallbackContext, **details: Any) -> None:
        """Call the method ``event`` of every callback.

        Raises:
            CallbackError: a required callback failed; the others have been called.

        """
        failures: list[CallbackError] = []
        for spec, member in list(self._members):
            try:
                getattr(member, event)(run, **details)
            except Exception as error:  # a plugin may raise anything
                self._members.remove((spec, member))
                failed = CallbackError(callback=_describe(spec), event=event, error=error)
                failed.__cause__ = error
                if spec.required:
                    failures.append(failed)
                else:
                    run.log(f"WARNING: {failed}; the run continues without it")
        if failures:
            raise failures[0]


class CallbackDispatcher:
    """Notifies the callbacks of this process, and all processes of a callback's failure."""

    def __init__(self, callbacks: Callbacks, context: CallbackContext, *, ranks: Ranks) -> None:
        self._callbacks = callbacks
        self._context = context
        self._ranks = ranks
        self._failure: CallbackError | None = None

    @property
    def failed(self) -> bool:
        """Whether a required callback has failed in this process."""
        return self._failure is not None

    def notify(self, event: str, **details: Any) -> None:
        """Call the callbacks' method ``event``.

        Raises:
            CallbackError: a required callback failed, in a run of one process. With several processes the
                failure is stored for :meth:`raise_failure`.

        """
        try:
            self._callbacks.call(event, self._context, **details)
        except CallbackError as error:
            if self._ranks.is_single:
                raise
            # The other ranks do not know of the failure and would wait: it is raised where all ranks meet.
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise a failure of any rank on every rank; every rank must call this."""

        def raise_own() -> None:
            if self._failure is not None:
                raise self._failure

        self._ranks.run_all(raise_own)


def _describe(spec: CallbackSpec) -> str:
    entry = registry.entry("callback", spec.kind)
    return f"callback {spec.kind!r} of {entry.owner} {entry.version}"
