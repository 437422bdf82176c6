"""The callback of kind ``stop_when``: an early end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks._utils.hints import did_you_mean
from trainer.callbacks.base import Callback, CallbackContext
from trainer.reporting.display import counted
from trainer.specs.callbacks import StopWhenSpec


class StopWhen(Callback):
    """End the run once a value has been above or below its limit for so many steps in a row.

    The steps are counted within one process: after a resume they are counted anew. A value that a step
    doesn't have (None) or that is not finite is past no limit.
    """

    def __init__(self, spec: StopWhenSpec) -> None:
        self._spec = spec
        self._steps = 0

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Look at the value; ask for the end."""
        spec = self._spec
        if spec.value not in row:
            raise ValueError(f"the metrics have no value {spec.value!r}; {did_you_mean(spec.value, row)}")
        value = row[spec.value]
        past = isinstance(value, int | float) and (
            value > spec.above if spec.above is not None else spec.below is not None and value < spec.below
        )
        self._steps = self._steps + 1 if past else 0
        if self._steps >= spec.steps:
            side = f"above {spec.above:g}" if spec.above is not None else f"below {spec.below:g}"
            run.stop(f"{spec.value} {value:g} is {side}, for {counted(self._steps, 'step')}")
