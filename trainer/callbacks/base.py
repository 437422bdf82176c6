"""What a callback is: a class with a method for each event of a run that it cares about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.evaluation.evaluate import EvaluationResult
from trainer.specs.run import Phase, RunSpec


@dataclass(frozen=True, kw_only=True)
class CallbackContext:
    """The run that a callback is called from.

    ``say(text)`` prints above the progress bar. ``stop(reason)`` ends the run after the current step, as if
    it were its last: saved, evaluated, summed up with the reason. ``is_main`` is true in one process of the
    run, the one to write files.
    """

    spec: RunSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    folder: Path
    log: Callable[[str], None]
    stop: Callable[[str], None]
    rank: int = 0
    is_main: bool = True


class Callback:
    """Something to do while a run trains; every method may be left as it is, doing nothing.

    Built as ``MyCallback(spec)``. The methods see the run between two steps. They must leave torch's random
    numbers, the weights and the optimizer alone, unless changing those is what the callback is for: a run is
    repeated to the last bit only if its callbacks are. Where a run has several processes each of them makes
    its own callbacks and calls them with the same values; a file is to be written by one of them.

    What one raises is reported with the names of the plugin and the callback. Then the run is saved and ends,
    or goes on without it where its spec has ``required: false``.

    A checkpoint is written while training goes on. So a callback with a state of its own sets it aside in
    ``on_save``, adds it as a file to the checkpoint's folder in ``on_checkpoint``, and reads it back in
    ``on_start``; the file is missing where the process was killed between the two.
    """

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Before the first step; ``step`` have been made, ``checkpoint`` is what a resumed run loaded."""

    def on_phase(self, run: CallbackContext, *, step: int, phase: Phase) -> None:
        """Before the first step of a phase, in a resumed run of the phase that it is in."""

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """After an update; ``row`` is the step's line of ``metrics.jsonl``."""

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """After the model was evaluated, on the way or at the end."""

    def on_save(self, run: CallbackContext, *, step: int) -> None:
        """Before a checkpoint of the run as it is after ``step`` begins to be written."""

    def on_checkpoint(self, run: CallbackContext, *, step: int, path: Path) -> None:
        """Once the checkpoint after ``step`` is whole, in the folder ``path``; the run may have gone on."""

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """After the last step; ``finished`` unless the run was interrupted and is to be resumed.

        Not called where the run ends by an error.
        """
