"""Runs that an experiment needs: trained here, gone on with, or read where they have been finished before.

And of those that are trained already: their model, and sequences to evaluate it on.
"""

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
from trainer.checkpoint.load import STATE_FILE, TrainingProgress, load_checkpoint, newest_sound_checkpoint
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.errors import CheckpointError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.lock import FolderLock, LockedError
from trainer.storage.run_folder import RunFolder, differences


class Finished(NamedTuple):
    """A finished run: its spec, its folder, what its files say."""

    name: str
    spec: RunSpec
    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One object a step."""
    evaluations: list[dict[str, Any]]
    """One object a set and evaluation."""


def run_spec(name: str, overrides: Iterable[str] = ()) -> RunSpec:
    """Return a run's spec by its name in the zoo, or a path, with changes.

    Raises:
        ValueError: it can't be loaded, or is of another kind.

    """
    spec = load_spec(name, list(overrides))
    if not isinstance(spec, RunSpec):
        raise ValueError(f"{name} is a spec of kind {spec.kind!r}; experiments train specs of kind 'run'")
    return spec


def explicit_twin(name: str, overrides: Iterable[str] = (), *, n_layers: int | None = None) -> RunSpec:
    """Return the run of the explicit twin of a run's model: as it is, or with another number of layers.

    Changes may be such as only the implicit model knows (its gradient, its phases): the twin leaves them out.
    """
    model: dict[str, Any] = {"kind": "explicit_lm"}
    if n_layers is not None:
        model["n_layers"] = n_layers
    tree = merge_runs(resolve(name, list(overrides)), {"model": model})
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=name) from None


def train(spec: RunSpec, folder: Path, *, name: str, device: str, command: Sequence[str] = ()) -> Finished:
    """Train a run in its folder and return it; what lies there is gone on with, or read if it is finished.

    So an experiment that was interrupted is done by the same command, and several processes may share its
    runs before one of them draws: what another process is training is waited for, and read.

    Raises:
        ValueError: the folder holds a run of another spec, or the run can't be built.
        KeyboardInterrupt: the run was interrupted; it has been saved.

    """
    with _in_turn(folder):
        place = RunFolder(folder)
        if place.spec_path.is_file():
            old = load_spec(place.spec_path).model_dump(mode="json")
            if changes := differences(old, spec.model_dump(mode="json")):
                few = "; ".join(changes[:3])
                raise ValueError(f"{folder} holds a run of other settings ({few}); give another --output")
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
            _let_go()
        return read(folder, name=name)


def _let_go() -> None:
    """Give back what runs held on a device, so that those that follow in this process have it all.

    The parts of a run refer to each other, and so wait for Python to collect them. It counts objects, not the
    gigabytes of their captured graphs: nine runs of four layers came to hold 104 GB, one to hold 12.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process trains the run of this folder, and keep others from it meanwhile.

    Not for runs of several processes, of which one alone would wait. The lock lies beside the folder: that in
    it is the run's own, by which it refuses others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = FolderLock(path)
    except LockedError as held:
        print(f"{folder.name} is being trained by {held.holder}: waiting for it", file=sys.stderr)
        lock = FolderLock(path, wait=True)
    with lock:
        yield


def is_finished(folder: Path) -> bool:
    """Whether a run that was finished lies there."""
    return RunFolder(folder).summary_path.is_file()


def require_same_data(place: RunFolder, spec: RunSpec) -> None:
    """Refuse a finished run on data that have changed since: it would be compared with runs on others.

    Raises:
        RunFolderError: the data, by what the run has noted of them, are others.

    """
    if not place.noted_data():
        return
    try:
        data = data_of(spec)
    except (ValueError, OSError):
        return  # they are not here; what has been measured before can be read without them
    place.require_data(data.identity())


def load_model(finished: Finished, device: torch.device) -> nn.Module:
    """Return the model with its last weights, as its last phase left it, in evaluation mode.

    Raises:
        CheckpointError: the last checkpoint is damaged or missing; an earlier one is not what was trained.

    """
    model: nn.Module = build_component(finished.spec.final_model)
    path, complaints = newest_sound_checkpoint(RunFolder(finished.folder).checkpoints)
    steps = load_checkpoint(path, model=model).step
    if steps != finished.summary["steps"]:
        why = f" ({'; '.join(complaints)})" if complaints else ""
        raise CheckpointError(
            f"{finished.folder} was trained for {finished.summary['steps']} steps, but its newest sound "
            f"checkpoint is {path.name}{why}; train the rest again by python -m trainer --resume --output "
            f"{finished.folder}"
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


def trained(checkpoint: Path, overrides: Sequence[str] = ()) -> tuple[str, RunSpec, Path]:
    """Return the name and spec of a run, changed by ``overrides``, and the checkpoint to read.

    Raises:
        ValueError: it is no run, or its model searches for no fixed point.

    """
    single = (checkpoint / STATE_FILE).is_file()
    folder = RunFolder(checkpoint.resolve().parents[1] if single else checkpoint)
    if not folder.spec_path.is_file():
        raise ValueError(f"{checkpoint} is no run and no checkpoint of one: {folder.spec_path} is missing")
    spec = load_spec(folder.spec_path, list(overrides))
    if not isinstance(spec, RunSpec):
        raise ValueError(f"{folder.spec_path} is a spec of kind {spec.kind!r}, not of a run")
    if spec.model.kind != "implicit_lm":
        raise ValueError(
            f"the model of {checkpoint} is of kind {spec.model.kind!r}, which solves for nothing; give a run "
            "of an implicit_lm"
        )
    if single:
        return folder.run_name(), spec, checkpoint
    newest, complaints = newest_sound_checkpoint(folder.checkpoints)
    for complaint in complaints:
        print(f"WARNING: {complaint}; {newest.name} is taken instead", file=sys.stderr)
    return folder.run_name(), spec, newest


def trained_model(spec: RunSpec, weights: Path) -> tuple[ImplicitLM, TrainingProgress]:
    """Return a run's model as its last phase left it, in evaluation mode, and how far it had come."""
    model: ImplicitLM = build_component(spec.final_model)
    progress = load_checkpoint(weights, model=model)
    return model.eval(), progress


def data_of(spec: RunSpec) -> DataSource:
    """Return a run's data."""
    size = getattr(spec.model, "vocab_size", None)
    data: DataSource = build_component(spec.data, seed=spec.training.seed, vocab_size=size)
    return data


def evaluation_set(
    spec: RunSpec, data: DataSource, length: int, sequences: int | None = None
) -> EvaluationSet:
    """Return the first set of a run's data to evaluate on at this length; None: as many as its spec says."""
    few = {} if sequences is None else {"sequences": sequences}
    asked = spec.evaluation.model_copy(update={"lengths": (length,), "length_multiples": (), **few})
    return next(iter(data.evaluation_sets(asked).values()))


def evaluation_batch(spec: RunSpec, *, sequences: int, length: int | None) -> Batch:
    """Return the first sequences of a run's first evaluation set; None: of the training length."""
    first = evaluation_set(spec, data_of(spec), length or spec.data.seq_len, sequences)
    return first.source.batch(0, first.sequences)
