"""Going on with a run: which checkpoint, what it puts back, what is left of a future that didn't happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks.specs import load_spec
from trainer.checkpoint.load import (
    TrainingProgress,
    list_checkpoints,
    load_checkpoint,
    newest_sound_checkpoint,
    set_aside,
    step_name,
    verify_checkpoint,
)
from trainer.distributed import Ranks
from trainer.errors import CheckpointError, RunFolderError
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
"""Fields of a spec that have an effect on a run that is finished."""


def resume(
    folder: RunFolder,
    spec: RunSpec,
    beginning: TrainingProgress,
    *,
    checkpoint: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Any],
    changes: Sequence[str],
    manifest: Mapping[str, Any],
    display: Display,
    ranks: Ranks,
) -> TrainingProgress:
    """Put model, optimizer, generators and the folder back to where a checkpoint has them; return how far.

    A run that was stopped before its first checkpoint starts again; its seed makes that the same run. Every
    rank must call this.

    Args:
        folder: of the run.
        spec: as it is now; written to the folder where there are ``changes``.
        beginning: how far it has come before its first checkpoint.
        checkpoint: the name of the one to go on from; None: the newest that is whole.
        model: as it was built; the inner module, its tensors may be sharded.
        optimizer: of that model.
        data: what its data are (`DataSource.identity`); others are refused unless ``changes`` have them.
        changes: what differs from the spec in the folder.
        manifest: of this start, noted in the folder.
        display: where to say what happens.
        ranks: the processes.

    Raises:
        CheckpointError: no such checkpoint, none that is whole, or one of another model.
        RunFolderError: the checkpoint lies beyond the end of the run, or the data are others.

    """
    if not any(change.startswith("data") for change in changes):
        ranks.run_on_rank0(lambda: folder.require_data(data))
    path = ranks.run_on_rank0(lambda: _choose(folder, checkpoint, display))
    progress = beginning
    if path is not None:
        progress = load_checkpoint(
            path, model=model, optimizer=optimizer, restore_random=True, verify=False, ranks=ranks
        )
    total_steps = spec.total_steps
    if progress.step > total_steps:
        raise RunFolderError(
            f"{path} is {progress.step} steps into the run, but the spec ends at {total_steps}; "
            "raise training.max_steps, or name an earlier checkpoint by --checkpoint"
        )

    finished = (
        progress.step == total_steps
        and bool(changes)
        and ranks.run_on_rank0(lambda: _was_finished(folder, progress))
    )
    if finished and (useless := [change for change in changes if not _matters_after_training(change)]):
        raise RunFolderError(
            f"the run in {folder.path} is finished, so these changes would train nothing: "
            f"{'; '.join(useless)}; raise training.max_steps to train on, evaluate it by "
            "python -m trainer.evaluate, or start anew in another folder"
        )

    def tidy() -> None:
        _leave_later_checkpoints(folder, progress.step, display)
        if progress.step < total_steps:
            folder.set_results_aside()
        folder.metrics.truncate_after(progress.step)
        _warn_of_differences(folder, progress.step, manifest["versions"], display)
        # At its end a run is evaluated again, for its summary.
        folder.evaluations.truncate_after(progress.step - (progress.step == total_steps))
        folder.record_resume(
            spec=spec.model_dump(mode="json"),
            manifest=manifest,
            step=progress.step,
            changes=changes,
            stored=not finished,
        )

    ranks.run_on_rank0(tidy)
    if path is None:
        display.log(f"{folder.path} was stopped before its first checkpoint; it starts again")
    else:
        display.log(f"resumed {folder.path} after step {progress.step}")
    for change in changes:
        display.log(f"  changed since it was started: {change}")
    if finished:
        display.log(f"the run is finished: {folder.spec_path.name} keeps the spec that it was trained with")
    if (message := _other_batches(spec, progress)) is not None:
        display.log(f"WARNING: {message}")
    return progress


def _warn_of_differences(folder: RunFolder, step: int, versions: Mapping[str, Any], display: Display) -> None:
    """Say which metrics are missing, and which packages have changed since the run was trained last."""
    recorded = (folder.metrics.last_row() or {"step": 0})["step"]
    if recorded < step:
        display.log(
            f"WARNING: {folder.metrics.path} ends at step {recorded}, but the checkpoint is of step {step}: "
            f"the metrics of {step - recorded} steps are missing, in summaries and pictures too"
        )
    if changed := folder.version_changes(versions):
        display.log(
            f"WARNING: versions have changed since the run was trained last: {', '.join(changed)}; the run "
            "goes on, but its values may differ from those of an uninterrupted run"
        )


def _other_batches(spec: RunSpec, progress: TrainingProgress) -> str | None:
    """Say what it means that a run has seen more or less than so many steps of its spec come to, or None.

    So it is where the batch or the length was changed on a resume: what is left is counted in steps.
    """
    planned = 0
    for phase in spec.phase_specs():
        steps = max(0, min(phase.last_step, progress.step) - phase.first_step)
        planned += steps * phase.training.batch_size * phase.data.seq_len
    if progress.tokens == planned:
        return None
    end = progress.tokens + spec.total_tokens - planned
    return (
        f"{progress.step} steps of this spec are {planned:,} tokens, but the run has seen "
        f"{progress.tokens:,}; its end, phases and schedule stand in this spec's steps, so it ends after "
        f"{end:,} tokens of {spec.total_tokens:,}; for another batch from here on give back the one it had, "
        "and a phase the other"
    )


def _was_finished(folder: RunFolder, progress: TrainingProgress) -> bool:
    """Whether the run has come to the end that the spec in its folder gives it."""
    old = load_spec(str(folder.spec_path))
    assert isinstance(old, RunSpec)
    return progress.step >= old.total_steps


def _matters_after_training(change: str) -> bool:
    """Whether a change of the spec has an effect on a run that is finished: it is evaluated and exported."""
    return change.startswith(_AFTER_TRAINING) or not of_values(change)


def _choose(folder: RunFolder, name: str | None, display: Display) -> Path | None:
    there = list_checkpoints(folder.checkpoints)
    if name is not None:
        path = folder.checkpoints / (step_name(int(name)) if name.isdigit() else Path(name).name)
        if not path.is_dir():
            names = ", ".join(found.name for found in there) or "none"
            raise CheckpointError(f"{folder.path} has no checkpoint {name!r}; there are: {names}")
        verify_checkpoint(path)
        return path
    if not there:
        return None
    path, complaints = newest_sound_checkpoint(folder.checkpoints)
    for complaint in complaints:
        display.log(f"WARNING: {complaint}")
    if complaints:
        display.log(f"WARNING: going back to {path.name}, the newest checkpoint that is whole")
    return path


def _leave_later_checkpoints(folder: RunFolder, step: int, display: Display) -> None:
    # They are damaged, or of a future that this run now leaves: a later resume must not jump there.
    for path in list_checkpoints(folder.checkpoints):
        if path.name > step_name(step):
            display.log(f"set aside: {set_aside(path)}")
