"""The folder with the checkpoints of a run: their files, verification and removal.

A checkpoint is a folder such as ``step-00000120``:

- ``__RANK_0.distcp``: weights and optimizer state in the format of ``torch.distributed.checkpoint``. Each
  process writes its share; any number of processes can read them. In a run with an average of the weights
  (``training.ema``), the tensors ``model/…`` are the average, and ``training/…`` the weights of training.
- ``tensors.json``: the position of each tensor in those files. Checkpoints of format 2 have it as a pickle,
  ``.metadata``, whose code is not executed.
- ``rank-00000.json``: the states of that process's random number generators.
- ``state.json``: the progress of the run, and size and checksum of every other file.

It is written under a temporary name, synced to the disk and renamed. A checkpoint under its final name is
therefore complete; sizes and checksums detect later damage.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import RECORD, first_fault, list_checkpoints, newest_sound, read_json
from trainer.errors import CheckpointError
from trainer.storage.files import digest

FORMAT = 3
_READABLE = (2, FORMAT)
STATE_FILE = RECORD
OPTIMIZER_PREFIX = "optimizer/"
TRAINING_PREFIX = "training/"
"""Of the weights that the optimizer updates, where the model's are their average."""
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run, which a checkpoint stores.

    The run has seen ``step`` batches with ``samples`` sequences and ``tokens`` tokens in ``seconds``.
    ``skipped`` batches made no update, ``skipped_in_a_row`` of them at the end. The position in the data is
    counted in global samples, so that it does not depend on the number of processes.
    """

    step: int = 0
    phase: str = ""
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0


def step_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with the state of process ``rank``."""
    return f"rank-{rank:05d}.json"


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that an earlier process left incomplete."""
    for stale in folder.glob(f"*{TEMPORARY}*"):
        remove_tree(stale)


def remove_tree(path: Path) -> None:
    """Remove a folder, ignoring errors; of a symbolic link, only the link."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, *, newest: Path, keep: int, keep_every: int | None = None) -> None:
    """Remove all but the last ``keep`` checkpoints and those at multiples of ``keep_every`` steps.

    Checkpoints later than ``newest`` were written before the run was resumed from an earlier one: they are
    neither removed nor counted.
    """
    own = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    for path in own[: max(0, len(own) - max(1, keep))]:
        if keep_every is None or int(path.name[5:]) % keep_every:
            # Renamed first, so that no reader finds an incomplete checkpoint under its name.
            remove_tree(path.rename(path.with_name(f"{path.name}{TEMPORARY}removed")))


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is neither resumed from nor counted; return the new path."""
    target = path.with_name(f"left-{path.name}")
    if target.exists() or target.is_symlink():
        remove_tree(target)
    return path.rename(target)


def read_state(path: Path) -> dict[str, Any]:
    """Return the verified state of the checkpoint at ``path``, without verifying its other files.

    Raises:
        CheckpointError: the state is missing, truncated, altered, or of another format.

    """
    state_path = path / STATE_FILE
    if not state_path.is_file():
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} is missing")
    try:
        state = read_json(state_path)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} {_after(state_path, error)}") from error
    if not isinstance(state, dict) or "digest" not in state:
        raise CheckpointError(
            f"checkpoint {path}: {STATE_FILE} is not the state of a checkpoint: "
            + ("digest is missing" if isinstance(state, dict) else f"got a {type(state).__name__}")
        )
    recorded = state.pop("digest")
    if digest(state) != recorded:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} was altered since it was written (digest)")
    if state.get("format") not in _READABLE:
        raise CheckpointError(
            f"checkpoint {path} has format {state.get('format')}, but this version reads format "
            f"{' and '.join(map(str, _READABLE))}; resume with the version that wrote it (see manifest.json)"
        )
    if (fault := _state_fault(state)) is not None:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} is not the state of a checkpoint: {fault}")
    return state


def _after(path: Path, error: ValueError) -> str:
    return str(error).removeprefix(f"{path} ")


def _state_fault(state: Mapping[str, Any]) -> str | None:
    """Return what is missing or invalid in a state; None if `load_checkpoint` can use it."""
    kinds = {
        "progress": dict,
        "spec_digest": str,
        "ranks": int,
        "aliases": dict,
        "optimizer_values": dict,
        "files": dict,
    }
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            return f"{name} must be a {kind.__name__}, got a {type(state.get(name)).__name__}"
    defaults = vars(TrainingProgress())
    if state["progress"].keys() != defaults.keys():
        return f"progress has the wrong keys: {', '.join(sorted(state['progress']))}"
    for name, value in state["progress"].items():
        allowed = (int, float) if isinstance(defaults[name], float) else (type(defaults[name]),)
        if type(value) not in allowed or (not isinstance(value, str) and value < 0):
            return f"progress.{name} is invalid: {value!r}"
    if not all(isinstance(name, str) for name in state["aliases"].values()):
        return "aliases must be names of tensors"
    for name, entry in state["files"].items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or "sha256" not in entry:
            return f"size or checksum of {name} is missing"
    return None


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of the checkpoint at ``path`` after verifying size and checksum of every file.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names the file.

    """
    state = read_state(path)
    if fault := first_fault(path, state["files"]):
        raise CheckpointError(f"checkpoint {path}: {fault}")
    return state


def newest_sound_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint in ``folder``, and the fault of each newer one.

    Raises:
        CheckpointError: there is no checkpoint, or no complete one.

    """
    path, complaints = newest_sound(folder, verify_checkpoint)
    if path is None and not complaints:
        raise CheckpointError(
            f"{folder} holds no checkpoint to resume from; start the run again in another folder"
        )
    if path is None:
        raise CheckpointError(
            f"no checkpoint is complete; start the run again in another folder: {'; '.join(complaints)}"
        )
    return path, complaints
