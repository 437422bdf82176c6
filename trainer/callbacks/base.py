"""The interface of callbacks: one method for each event of a run."""

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
    """The run that calls a callback.

    ``log(text)`` prints above the progress bar. ``stop(reason)`` ends the run after the current step, as if
    that were its last one: the run is saved and evaluated, and its summary contains the reason. ``is_main``
    is true on rank 0 only, which writes files.
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
    """Actions at the events of a run. Override the methods of the events needed; the defaults do nothing.

    A callback is built as ``MyCallback(spec)`` and called between steps. It must not change the random number
    generators, the weights or the optimizer, unless that is its purpose: otherwise the run is not
    reproducible bit by bit. With several processes each one builds its own callbacks and calls them with the
    same values; only rank 0 should write files.

    An exception is reported with the names of the plugin and the callback. The run is then saved and ends, or
    continues without the callback if its spec has ``required: false``.

    Checkpoints are written in the background. A callback with state copies it in ``on_save``, writes it as a
    file to the checkpoint's folder in ``on_checkpoint``, and reads it in ``on_start``. The file is missing if
    the process was killed between the two events.
    """

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Before the first step, after ``step`` earlier ones; ``checkpoint`` is what a resumed run loaded."""

    def on_phase(self, run: CallbackContext, *, step: int, phase: Phase) -> None:
        """Before the first step of a phase; in a resumed run also before its first step."""

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """After a step; ``row`` is its row in ``metrics.jsonl``."""

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """After an evaluation, during or at the end of the run."""

    def on_save(self, run: CallbackContext, *, step: int) -> None:
        """Before the checkpoint after ``step`` is written."""

    def on_checkpoint(self, run: CallbackContext, *, step: int, path: Path) -> None:
        """When the checkpoint after ``step`` is complete in the folder ``path``; later steps may have run."""

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """After the last step; ``finished`` is False if the run was interrupted and can be resumed.

        Not called if the run ends by an error.
        """
