"""The folder that a run's checkpoints stand in: which there are, which are whole, which stay.

A checkpoint is a folder ``step-00000120``:

- ``__RANK_0.distcp`` and ``.metadata``: weights and optimizer state, as ``torch.distributed.checkpoint``
  writes them, each process its share; they can be read by any number of processes.
- ``rank-00000.json``: what only that process knows, its random number generators.
- ``state.json``: how far the run had come, and size and checksum of every other file.

It is written under a temporary name, forced onto the disk and renamed, so that under its final name it is
whole, unless the disk or someone altered it since: sizes and checksums tell.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_blocks.saved_files import RECORD, first_fault, list_checkpoints, newest_sound
from trainer.errors import CheckpointError
from trainer.files import digest

FORMAT = 2
STATE_FILE = RECORD
OPTIMIZER_PREFIX = "optimizer/"
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Progress:
    """How far a run has come: what a checkpoint stores beside the tensors.

    ``step`` batches have been seen, of ``samples`` sequences and ``tokens`` tokens in all; ``skipped`` of
    them made no update, the last ``skipped_in_a_row`` among them; ``seconds`` were spent on it. The data
    position is counted in global samples, so that it means the same for any number of processes.
    """

    step: int = 0
    phase: str = ""
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file of what only process ``rank`` knows."""
    return f"rank-{rank:05d}.json"


def remove_unfinished(folder: Path) -> None:
    """Remove what an earlier process left half written: it is of no use to anybody."""
    for stale in folder.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)


def prune(folder: Path, *, newest: Path, keep: int, keep_every: int | None = None) -> None:
    """Remove all but the last ``keep`` checkpoints and those at multiples of ``keep_every`` steps.

    Checkpoints later than ``newest`` belong to a future that a resumed run has left: they are neither
    touched nor counted, so that they can't push out the run's own.
    """
    own = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    for path in own[: max(0, len(own) - max(1, keep))]:
        if keep_every is None or int(path.name[5:]) % keep_every:
            shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is neither resumed from nor counted, but still there to look at."""
    target = path.with_name(f"left-{path.name}")
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the checkpoint at ``path``, which is checked, but none of the other files.

    Raises:
        CheckpointError: it is missing, cut short, altered, or of another format.

    """
    state_path = path / STATE_FILE
    if not state_path.is_file():
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} is missing")
    try:
        state = json.loads(state_path.read_text(encoding="utf-8"))
        recorded = state.pop("digest")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {STATE_FILE} is cut short or not JSON ({error})"
        ) from error
    if digest(state) != recorded:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} was altered since it was written (digest)")
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {state['format']}, this version reads format {FORMAT}; "
            "resume with the version that wrote it (see manifest.json)"
        )
    assert isinstance(state, dict)
    return state


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of the checkpoint at ``path`` after checking every file's size and checksum.

    More than ``saved_files.require_whole``: the state's own digest and format are looked at too.

    Raises:
        CheckpointError: naming the file that is missing, cut short or altered.

    """
    state = read_state(path)
    if fault := first_fault(path, state["files"]):
        raise CheckpointError(f"checkpoint {path}: {fault}")
    return state


def newest_sound_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return the newest checkpoint in ``folder`` that is whole, and what is wrong with each newer one.

    Raises:
        CheckpointError: there is none, or none is whole.

    """
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise CheckpointError(
            f"{folder} holds no checkpoint to resume from; start the run again in another folder"
        )
    path, complaints = newest_sound(checkpoints, verify_checkpoint)
    if path is None:
        raise CheckpointError(
            f"no checkpoint is whole, start the run again in another folder: {'; '.join(complaints)}"
        )
    return path, complaints
