"""Telling the callbacks of a run that has several processes, so that one's failure ends all of them."""

from __future__ import annotations

from typing import Any

from trainer.callbacks.base import CallbackContext
from trainer.callbacks.calling import Callbacks
from trainer.distributed import Ranks
from trainer.errors import CallbackError


class CallbackDispatcher:
    """Tells the callbacks of one process what happens, and all processes what a callback failed with."""

    def __init__(self, callbacks: Callbacks, context: CallbackContext, *, ranks: Ranks) -> None:
        self._callbacks = callbacks
        self._context = context
        self._ranks = ranks
        self._failure: CallbackError | None = None

    @property
    def failed(self) -> bool:
        """Whether a callback that the run needs has failed in this process."""
        return self._failure is not None

    def notify(self, event: str, **details: Any) -> None:
        """Call the callbacks' method for ``event``.

        Raises:
            CallbackError: one that the run needs failed, and this process is alone. Else the failure is kept
                for :meth:`raise_failure`.

        """
        try:
            self._callbacks.call(event, self._context, **details)
        except CallbackError as error:
            if self._ranks.is_single:
                raise
            # The other processes don't know of it, and would wait for this one: it is raised where all meet.
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise, on every rank, what a callback failed with on some; every rank must call this."""

        def own() -> None:
            if self._failure is not None:
                raise self._failure

        self._ranks.run_all(own)
