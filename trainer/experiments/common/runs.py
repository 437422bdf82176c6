"""Runs of an experiment: trained, resumed, or read if already finished; and existing trained runs."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.registry import build as build_component
from implicit_blocks.specs import load_spec
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.loading import merge_runs, resolve
from trainer.checkpoint.folder import STATE_FILE, TrainingProgress, newest_sound_checkpoint
from trainer.checkpoint.load import load_checkpoint
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.errors import CheckpointError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.lock import FolderLock, LockedError
from trainer.storage.run_folder import RunFolder, differences


class Finished(NamedTuple):
    """A finished run: its spec, directory and records."""

    name: str
    spec: RunSpec
    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One object per step."""
    evaluations: list[dict[str, Any]]
    """One object per set and evaluation."""


def run_spec(name: str, overrides: Iterable[str] = ()) -> RunSpec:
    """Return a run spec by zoo name or path, with overrides.

    Raises:
        ValueError: it cannot be loaded, or is not a run spec.

    """
    spec = load_spec(name, list(overrides))
    if not isinstance(spec, RunSpec):
        raise ValueError(f"{name} is a spec of kind {spec.kind!r}; experiments train specs of kind 'run'")
    return spec


def explicit_twin(name: str, overrides: Iterable[str] = (), *, n_layers: int | None = None) -> RunSpec:
    """Return the run of the explicit twin of a run's model, optionally with another number of layers.

    Overrides of the gradient, the search and the phases are ignored by the twin, which may be a spec itself.
    """
    model: dict[str, Any] = {"kind": "explicit_lm"} | ({} if n_layers is None else {"n_layers": n_layers})
    implicit = "model.kind=implicit_lm"  # it has all fields that overrides may name
    tree = merge_runs(resolve(name, [implicit, *overrides]), {"model": model})
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=name) from None


def train(spec: RunSpec, folder: Path, *, name: str, device: str, command: Sequence[str] = ()) -> Finished:
    """Train a run in its directory and return it; an existing run is resumed, or read if it is finished.

    An interrupted experiment is therefore completed by the same command, and several processes may share the
    runs of an experiment: a run that another process is training is waited for and read.

    Raises:
        ValueError: the directory contains a run of another spec, or the run cannot be built.
        KeyboardInterrupt: the run was interrupted and saved.

    """
    with _exclusive(folder):
        place = RunFolder(folder)
        if place.spec_path.is_file():
            old = load_spec(place.spec_path).model_dump(mode="json")
            if changes := differences(old, spec.model_dump(mode="json")):
                few = "; ".join(changes[:3])
                raise ValueError(
                    f"{folder} contains a run with different settings ({few}); choose another --output"
                )
        if place.summary_path.is_file():
            require_same_data(place, spec)
        else:
            run = build(
                spec,
                name=name,
                output=folder,
                device=device,
                resume=place.spec_path.is_file(),
                command=command or None,
            )
            size = sum(p.numel() for p in run.model.parameters())
            run.display.log(f"{name}: {size:,} parameters, in {folder}")
            if run.train() is None:
                raise KeyboardInterrupt
            del run
            _release_memory()
        return read(folder, name=name)


def _release_memory() -> None:
    """Release the device memory of finished runs for those that follow in this process.

    The parts of a run reference each other and are freed by the garbage collector, which counts objects, not
    the gigabytes of their captured graphs: without this call, nine runs of four layers reserve 104 GB, not
    12.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on the run of this directory, waiting for other processes that train it.

    Runs of several processes are not locked, because only one of them would wait. The lock is beside the
    directory: the lock inside it belongs to the run itself.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = FolderLock(path)
    except LockedError as error:
        print(f"waiting for {error.holder}, which is training {folder.name}", file=sys.stderr)
        lock = FolderLock(path, wait=True)
    with lock:
        yield


def is_finished(folder: Path) -> bool:
    """Whether the directory contains a finished run."""
    return RunFolder(folder).summary_path.is_file()


def require_same_data(place: RunFolder, spec: RunSpec) -> None:
    """Reject a finished run whose data have changed since, because it is not comparable with new runs.

    Raises:
        RunFolderError: the data differ from those recorded by the run.

    """
    if not place.noted_data():
        return
    try:
        data = data_of(spec)
    except (ValueError, OSError):
        return  # without the data, earlier measurements can still be read
    place.require_data(data.identity())


def load_model(finished: Finished, device: torch.device) -> nn.Module:
    """Return the model of a run's last phase with its final weights, in evaluation mode.

    Raises:
        CheckpointError: the last checkpoint is damaged or missing.

    """
    model: nn.Module = build_component(finished.spec.final_model)
    path, complaints = newest_sound_checkpoint(RunFolder(finished.folder).checkpoints)
    steps = load_checkpoint(path, model=model).step
    if steps != finished.summary["steps"]:
        why = f" ({'; '.join(complaints)})" if complaints else ""
        raise CheckpointError(
            f"{finished.folder} was trained for {finished.summary['steps']} steps, but its newest valid "
            f"checkpoint is {path.name}{why}; train the remaining steps by python -m trainer --resume "
            f"--output {finished.folder}"
        )
    return model.to(device).eval()


def read(folder: Path, *, name: str) -> Finished:
    """Read a finished run."""
    place = RunFolder(folder)
    spec = load_spec(place.spec_path)
    assert isinstance(spec, RunSpec)
    return Finished(
        name=name,
        spec=spec,
        folder=folder,
        summary=json.loads(place.summary_path.read_text(encoding="utf-8")),
        metrics=list(read_metrics(place.metrics.path)),
        evaluations=list(read_metrics(place.evaluations.path)),
    )


# ------------------------------------------------------------------------------------ trained already


def find_trained_run(checkpoint: Path, overrides: Sequence[str] = ()) -> tuple[str, RunSpec, Path]:
    """Return the name and spec of an existing run, with ``overrides`` applied, and the checkpoint to load.

    Raises:
        ValueError: it is not a run, or its model is not implicit.

    """
    single = (checkpoint / STATE_FILE).is_file()
    folder = RunFolder(checkpoint.resolve().parents[1] if single else checkpoint)
    if not folder.spec_path.is_file():
        raise ValueError(
            f"{checkpoint} is neither a run nor a checkpoint of one: {folder.spec_path} is missing"
        )
    spec = load_spec(folder.spec_path, list(overrides))
    if not isinstance(spec, RunSpec):
        raise ValueError(f"{folder.spec_path} is a spec of kind {spec.kind!r}, not of a run")
    if spec.model.kind != "implicit_lm":
        raise ValueError(
            f"the model of {checkpoint} is of kind {spec.model.kind!r}, which has no fixed point; give a run "
            "of an implicit_lm"
        )
    if single:
        return folder.run_name(), spec, checkpoint
    newest, complaints = newest_sound_checkpoint(folder.checkpoints)
    for complaint in complaints:
        print(f"WARNING: {complaint}; using {newest.name} instead", file=sys.stderr)
    return folder.run_name(), spec, newest


def load_trained_model(spec: RunSpec, weights: Path) -> tuple[ImplicitLM, TrainingProgress]:
    """Return the model of a run's last phase, in evaluation mode, and the training progress."""
    model: ImplicitLM = build_component(spec.final_model)
    progress = load_checkpoint(weights, model=model)
    return model.eval(), progress


def data_of(spec: RunSpec) -> DataSource:
    """Return the data source of a run."""
    size = getattr(spec.model, "vocab_size", None)
    data: DataSource = build_component(spec.data, seed=spec.training.seed, vocab_size=size)
    return data


def evaluation_set(
    spec: RunSpec, data: DataSource, length: int, sequences: int | None = None
) -> EvaluationSet:
    """Return a run's first evaluation set at this length; `sequences` None: as many as in its spec."""
    few = {} if sequences is None else {"sequences": sequences}
    evaluation = spec.evaluation.model_copy(update={"lengths": (length,), "length_multiples": (), **few})
    return next(iter(data.evaluation_sets(evaluation).values()))


def evaluation_batch(spec: RunSpec, *, sequences: int, length: int | None) -> Batch:
    """Return the first sequences of a run's first evaluation set; `length` None: the training length."""
    first = evaluation_set(spec, data_of(spec), length or spec.data.seq_len, sequences)
    return first.source.batch(0, first.sequences)
