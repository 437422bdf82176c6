"""The active phase of a run: the configuration of the model and the batches of the phase's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from implicit_blocks.specs import ModelSpec
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Batch, DataSource, rank_share
from trainer.distributed.grid import Grid
from trainer.errors import DataError
from trainer.reporting.display import Display
from trainer.run.trainable_model import CheckpointsActivations, Reconfigures
from trainer.specs.run import Phase, RunSpec


class ActivePhase:
    """Configures the model for the phase of a step, and loads this rank's share of its batches.

    Args:
        spec: of the run.
        model: reconfigured when a phase with another model spec begins.
        sources: the data of each phase; phases with equal data share one object.
        grid: the processes, and those that divide a batch.
        display: shows the begin of a phase.

    """

    def __init__(
        self, spec: RunSpec, *, model: nn.Module, sources: Sequence[DataSource], grid: Grid, display: Display
    ) -> None:
        self._phases = spec.phase_specs()
        self._total_steps = self._phases[-1].last_step
        self._model = model
        self._sources = sources
        self._ranks, self._batches = grid.ranks, grid.batches
        self._display = display
        self._threads = spec.training.loader_threads
        self._loader = self._loader_of(sources[0])
        self.model_spec: ModelSpec = spec.model
        """The model spec that the model is configured for."""
        self._index: int | None = None

    @property
    def phase(self) -> Phase:
        """The active phase; `enter` has been called."""
        assert self._index is not None
        return self._phases[self._index]

    @property
    def data(self) -> DataSource:
        """The data of the active phase."""
        return self._loader.source

    def enter(self, step: int) -> bool:
        """Activate the phase of ``step``, counted from 0; return whether it was not active before."""
        index = self._index_at(step)
        if index == self._index:
            return False
        self._index, phase = index, self._phases[index]
        if phase.model != self.model_spec:
            if not isinstance(self._model, Reconfigures):
                raise ValueError(
                    f"phase {phase.name!r} changes a model of kind {phase.model.kind!r}, which does not "
                    "offer reconfigure; remove `model` from the phase"
                )
            self._model.reconfigure(phase.model)
            self.model_spec = phase.model
            self._display.log(f"phase {phase.name}: steps {phase.first_step + 1} to {phase.last_step}")
        if (source := self._sources[index]) is not self.data:
            self._loader.close()
            self._loader = self._loader_of(source)
        if isinstance(self._model, CheckpointsActivations):
            self._model.checkpoint_activations(phase.training.checkpoint_activations)
        return True

    def batch(self, step: int, first: int, *, steps: int = 1) -> Batch:
        """Load this rank's share of the batch of ``step``, which begins at global sample ``first``.

        With several ``steps``, which a run of one process has, load all their batches in the active phase.

        Raises:
            DataError: the data of the step cannot be used; on every rank.

        """
        own, *following = self.own_ranges(step, first)
        if steps > 1:
            own, following = (first, steps * self.phase.training.batch_size), []
        try:
            return self._ranks.run_all(lambda: self._loader.batch(*own, following=following))
        except ValueError as error:
            raise DataError(f"the data of step {step + 1} can't be used: {error}") from error

    def own_ranges(self, step: int, first: int) -> list[tuple[int, int]]:
        """Return position and size of this rank's share of a batch, and of the batches to prefetch after it.

        The batch of ``step`` begins at global sample ``first``.
        """
        ranges: list[tuple[int, int]] = []
        for ahead in range(step, min(step + 1 + self._loader.depth, self._total_steps)):
            index = self._index_at(ahead)
            if self._sources[index] is not self.data:
                break
            size = self._phases[index].training.batch_size
            offset, count = rank_share(size, rank=self._batches.rank, world_size=self._batches.world_size)
            ranges.append((first + offset, count))
            first += size
        return ranges

    def epochs(self, step: int, samples: int) -> Mapping[str, float]:
        """Return the passes over the data before ``step``, by part; phases with other data add up."""
        found = dict(self.data.epochs(samples))
        for index in range(self._index or 0, 0, -1):
            phase, (before, after) = self._phases[index], self._sources[index - 1 : index + 1]
            samples = max(0, samples - (step - phase.first_step) * phase.training.batch_size)
            step = phase.first_step
            for sign, source in ((1, before), (-1, after)) if before is not after else ():
                for name, passes in source.epochs(samples).items():
                    found[name] = found.get(name, 0.0) + sign * passes
        return found

    def close(self) -> None:
        """Stop the threads that load batches."""
        self._loader.close()

    def _index_at(self, step: int) -> int:
        return next(
            index for index, phase in enumerate(self._phases) if phase.first_step <= step < phase.last_step
        )

    def _loader_of(self, source: DataSource) -> Prefetcher:
        return Prefetcher(source, workers=self._threads, pin=self._ranks.device.type == "cuda")
