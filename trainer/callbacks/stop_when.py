"""The callback ``stop_when``: ends a run early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from implicit_blocks._utils.hints import did_you_mean
from trainer.callbacks.base import Callback, CallbackContext
from trainer.reporting.display import counted
from trainer.specs.callbacks import StopWhenSpec


class StopWhen(Callback):
    """Ends the run when a value has been above or below a limit for a number of consecutive steps.

    The count starts again when a run is resumed. A value that is None or not finite resets the count.
    """

    def __init__(self, spec: StopWhenSpec) -> None:
        self._spec = spec
        self._steps = 0

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Check the value of a step; stop the run if its limit was exceeded long enough."""
        spec = self._spec
        if spec.value not in row:
            raise ValueError(f"the metrics have no value {spec.value!r}; {did_you_mean(spec.value, row)}")
        value = row[spec.value]
        is_finite = isinstance(value, int | float) and math.isfinite(value)
        above, below = spec.above, spec.below
        past = is_finite and (value > above if above is not None else below is not None and value < below)
        self._steps = self._steps + 1 if past else 0
        if self._steps >= spec.steps:
            side = f"above {spec.above:g}" if spec.above is not None else f"below {spec.below:g}"
            run.stop(f"{spec.value} {value:g} is {side}, for {counted(self._steps, 'step')}")
