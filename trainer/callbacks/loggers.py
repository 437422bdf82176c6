"""The callbacks ``tensorboard`` and ``wandb``: send the metrics of a run to a dashboard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from implicit_blocks._utils.own_packages import install_extra
from trainer.callbacks.base import Callback, CallbackContext
from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.iteration_map import IterationMap
from trainer.specs.callbacks import TensorBoardSpec, WandbSpec
from trainer.storage.files import write_atomically

_NOT_METRICS = ("step", "set", "length", "sequences")


class TensorBoard(Callback):
    """Writes the metrics of steps and evaluations as scalars to the run's folder ``tensorboard``.

    Evaluations whose searches count iterations per token also give a picture: the heat map of iterations
    against position and evaluation. View them by ``tensorboard --logdir runs``. A resumed run continues the
    same curves, and values written after its checkpoint are hidden.
    """

    def __init__(self, spec: TensorBoardSpec) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError as error:
            raise ValueError(
                f"tensorboard is not installed; {install_extra('log')}, or remove the callback"
            ) from error
        self._make = tensorboard.SummaryWriter
        self._every = spec.every
        self._writer: Any = None
        self._pictures = _Pictures()

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Open the file, on rank 0."""
        if run.is_main:
            self._writer = self._make(str(run.folder / "tensorboard"), purge_step=step + 1)

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Write the metrics of a step."""
        if self._writer is not None and row["step"] % self._every == 0:
            for name, value in numbers(row).items():
                self._writer.add_scalar(f"train/{name}", value, row["step"])

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """Write the metrics of an evaluation."""
        if self._writer is not None:
            for name, value in of_results(results).items():
                self._writer.add_scalar(name, value, step)
            for name, pixels in self._pictures.of(run, step=step, results=results).items():
                self._writer.add_image(name, pixels, step, dataformats="HWC")
            self._writer.flush()

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class Wandb(Callback):
    """Sends the metrics of steps and evaluations to Weights & Biases, or stores them (``mode: offline``).

    The file ``wandb.id`` in the run's folder holds the ID of the run, so that a resumed run continues the
    same curves. wandb drops steps that are repeated after a crash; their values are the same.
    """

    def __init__(self, spec: WandbSpec) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("wandb is not installed; pip install wandb, or remove the callback") from error
        self._wandb: Any = wandb
        self._spec = spec
        self._run: Any = None
        self._pictures = _Pictures()

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Start a run, or continue it, on rank 0."""
        if not run.is_main:
            return
        spec, known = self._spec, run.folder / "wandb.id"
        self._run = self._wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=spec.name or run.folder.name,
            mode=spec.mode,
            dir=str(run.folder),
            id=known.read_text().strip() if known.exists() else None,
            resume="allow",
            config=run.spec.model_dump(mode="json"),
        )
        write_atomically(known, f"{self._run.id}\n")

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Send the metrics of a step."""
        if self._run is not None and row["step"] % self._spec.every == 0:
            found = {f"train/{name}": value for name, value in numbers(row).items()}
            self._run.log(found, step=row["step"])

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """Send the metrics of an evaluation."""
        if self._run is not None:
            pictures = self._pictures.of(run, step=step, results=results)
            images = {name: self._wandb.Image(pixels) for name, pixels in pictures.items()}
            self._run.log({**of_results(results), **images}, step=step)

    def on_end(self, run: CallbackContext, *, step: int, finished: bool) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


class _Pictures:
    """The pictures of a run's evaluations, without an error if matplotlib is missing."""

    def __init__(self) -> None:
        self._map = IterationMap()
        self._warned = False

    def of(
        self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]
    ) -> dict[str, NDArray[np.uint8]]:
        """Return RGB images (height, width, 3) by their names."""
        names = self._map.add(step, results)
        try:
            return {f"evaluation/{name}/iterations_by_position": self._map.pixels(name) for name in names}
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            if not self._warned:
                self._warned = True
                run.log(f"no pictures of iterations: matplotlib is not installed ({install_extra('train')})")
            return {}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row of metrics, without the step."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value) and name not in _NOT_METRICS
    }


def of_results(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Return the metrics of an evaluation, such as ``evaluation/L2048/perplexity``."""
    return {
        f"evaluation/{result.name}/{name}": value
        for result in results
        for name, value in numbers(result.as_row(by_position=False)).items()
    }
