"""Resuming a run: choosing and loading the checkpoint, removing records of later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks.checkpoints.find import list_checkpoints
from implicit_blocks.specs import load_spec
from trainer.checkpoint.folder import (
    TrainingProgress,
    newest_sound_checkpoint,
    set_aside,
    step_name,
    verify_checkpoint,
)
from trainer.checkpoint.load import load_checkpoint
from trainer.distributed import Ranks
from trainer.errors import CheckpointError, RunFolderError
from trainer.optim.ema import WeightAverage
from trainer.reporting.display import Display
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder, of_values

_AFTER_TRAINING = (
    "evaluation.",
    "callbacks",
    "training.distributed",
    "training.threads",
    "training.log_every",
    "training.export_every",
)
"""Fields of a spec that affect a finished run."""


def resume(
    folder: RunFolder,
    spec: RunSpec,
    beginning: TrainingProgress,
    *,
    checkpoint: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    data: Mapping[str, Any],
    changes: Sequence[str],
    manifest: Mapping[str, Any],
    display: Display,
    ranks: Ranks,
) -> TrainingProgress:
    """Restore model, optimizer, random number generators and folder from a checkpoint; return its progress.

    A run without checkpoints starts again; its seed makes that the same run. Every rank must call this.

    Args:
        folder: of the run.
        spec: the current spec; written to the folder if there are ``changes``.
        beginning: progress of the run before its first checkpoint.
        checkpoint: name of the checkpoint; None: the newest complete one.
        model: the inner module, without a DDP wrapper; its tensors may be sharded.
        optimizer: of that model.
        average: of the model's weights, if the spec has one.
        data: identity of the data (`DataSource.identity`); refused if it differs, unless ``changes`` name it.
        changes: differences to the spec in the folder.
        manifest: of this start, recorded in the folder.
        display: shows messages.
        ranks: the processes.

    Raises:
        CheckpointError: the checkpoint does not exist, none is complete, or it is of another model.
        RunFolderError: the checkpoint is after the end of the run, or the data differ.

    """
    if not any(change.startswith("data") for change in changes):
        ranks.run_on_rank0(lambda: folder.require_data(data))
    path = ranks.run_on_rank0(lambda: _choose(folder, checkpoint, display))
    progress = beginning
    if path is not None:
        progress = load_checkpoint(
            path,
            model=model,
            optimizer=optimizer,
            average=average,
            restore_random=True,
            verify=False,
            ranks=ranks,
        )
    total_steps = spec.total_steps
    if progress.step > total_steps:
        raise RunFolderError(
            f"{path} is at step {progress.step}, but the spec ends the run at step {total_steps}; "
            "raise training.max_steps, or choose an earlier checkpoint by --checkpoint"
        )

    finished = (
        progress.step == total_steps
        and bool(changes)
        and ranks.run_on_rank0(lambda: _was_finished(folder, progress))
    )
    if finished and (useless := [change for change in changes if not _matters_after_training(change)]):
        raise RunFolderError(
            f"the run in {folder.path} is finished, so these changes would train nothing: "
            f"{'; '.join(useless)}; raise training.max_steps to train on, evaluate it with "
            "other options by python -m trainer.evaluate path.to.key=value, or start anew in another folder"
        )

    def tidy() -> None:
        _leave_later_checkpoints(folder, progress.step, display)
        if progress.step < total_steps:
            folder.set_results_aside()
        folder.metrics.truncate_after(progress.step)
        _warn_of_differences(folder, progress.step, manifest["versions"], display)
        folder.evaluations.truncate_after(progress.step)
        folder.record_resume(
            spec=spec.model_dump(mode="json"),
            manifest=manifest,
            step=progress.step,
            changes=changes,
            stored=not finished,
        )

    ranks.run_on_rank0(tidy)
    if path is None:
        display.log(f"{folder.path} has no checkpoint yet; the run starts again")
    else:
        display.log(f"resumed {folder.path} after step {progress.step}")
    for change in changes:
        display.log(f"  changed since the start: {change}")
    if finished:
        display.log(f"the run is finished: {folder.spec_path.name} keeps the spec of its training")
    if (message := _other_batches(spec, progress)) is not None:
        display.log(f"WARNING: {message}")
    return progress


def _warn_of_differences(folder: RunFolder, step: int, versions: Mapping[str, Any], display: Display) -> None:
    """Warn of missing metrics, and of packages whose versions have changed since the last start."""
    recorded = (folder.metrics.last_row() or {"step": 0})["step"]
    if recorded < step:
        display.log(
            f"WARNING: {folder.metrics.path} ends at step {recorded}, but the checkpoint is of step {step}: "
            f"the metrics of {step - recorded} steps are missing, in summaries and plots too"
        )
    if changed := folder.version_changes(versions):
        display.log(
            f"WARNING: package versions have changed since the last start: {', '.join(changed)}; the values "
            "of the run may differ from those of an uninterrupted run"
        )


def _other_batches(spec: RunSpec, progress: TrainingProgress) -> str | None:
    """Return a message if the tokens seen so far differ from those that the spec plans up to this step.

    They differ after ``batch_size`` or ``seq_len`` was changed on a resume, because the length of a run is
    counted in steps.
    """
    planned = 0
    for phase in spec.phase_specs():
        steps = max(0, min(phase.last_step, progress.step) - phase.first_step)
        planned += steps * phase.training.batch_size * phase.data.seq_len
    if progress.tokens == planned:
        return None
    end = progress.tokens + spec.total_tokens - planned
    return (
        "Changing batch_size or seq_len mid-run changes the token budget: the run has seen "
        f"{progress.tokens:,} tokens instead of {planned:,}, and now ends after {end:,} tokens instead of "
        f"{spec.total_tokens:,}. To keep the budget, restore the previous values and add a phase that "
        "changes them"
    )


def _was_finished(folder: RunFolder, progress: TrainingProgress) -> bool:
    """Whether the run has reached the end given by the spec in its folder."""
    old = load_spec(str(folder.spec_path))
    assert isinstance(old, RunSpec)
    return progress.step >= old.total_steps


def _matters_after_training(change: str) -> bool:
    """Whether a change of the spec affects a finished run, which is evaluated and exported again."""
    return change.startswith(_AFTER_TRAINING) or not of_values(change)


def _choose(folder: RunFolder, name: str | None, display: Display) -> Path | None:
    there = list_checkpoints(folder.checkpoints)
    if name is not None:
        path = folder.checkpoints / (step_name(int(name)) if name.isdigit() else Path(name).name)
        if not path.is_dir():
            names = ", ".join(found.name for found in there) or "none"
            raise CheckpointError(f"{folder.path} has no checkpoint {name!r}; available: {names}")
        verify_checkpoint(path)
        return path
    if not there:
        return None
    path, complaints = newest_sound_checkpoint(folder.checkpoints)
    for message in complaints:
        display.log(f"WARNING: {message}")
    if complaints:
        display.log(f"WARNING: resuming from {path.name}, the newest complete checkpoint")
    return path


def _leave_later_checkpoints(folder: RunFolder, step: int, display: Display) -> None:
    # Later checkpoints are damaged, or of steps that the run now repeats: a later resume must not use them.
    for path in list_checkpoints(folder.checkpoints):
        if path.name > step_name(step):
            display.log(f"set aside: {set_aside(path)}")
