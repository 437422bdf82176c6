"""The folder that a run's checkpoints stand in: which there are, which are whole, which stay.

A checkpoint is a folder ``step-00000120``:

- ``__RANK_0.distcp``: weights and optimizer state, as ``torch.distributed.checkpoint`` writes them, each
  process its share; they can be read by any number of processes.
- ``tensors.json``: where in those files each tensor is. Checkpoints of format 2 have it as a pickle,
  ``.metadata``, of which no code is run.
- ``rank-00000.json``: what only that process knows, its random number generators.
- ``state.json``: how far the run had come, and size and checksum of every other file.

It is written under a temporary name, forced onto the disk and renamed, so that under its final name it is
whole, unless the disk or someone altered it since: sizes and checksums tell.
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
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class TrainingProgress:
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
        remove_tree(stale)


def remove_tree(path: Path) -> None:
    """Remove a folder, as far as that can be done; of a link to one the link alone."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, *, newest: Path, keep: int, keep_every: int | None = None) -> None:
    """Remove all but the last ``keep`` checkpoints and those at multiples of ``keep_every`` steps.

    Checkpoints later than ``newest`` belong to a future that a resumed run has left: they are neither
    touched nor counted, so that they can't push out the run's own.
    """
    own = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    for path in own[: max(0, len(own) - max(1, keep))]:
        if keep_every is None or int(path.name[5:]) % keep_every:
            # Renamed first, so that nobody who reads it finds half of it under its name.
            remove_tree(path.rename(path.with_name(f"{path.name}{TEMPORARY}removed")))


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is neither resumed from nor counted, but still there to look at."""
    target = path.with_name(f"left-{path.name}")
    if target.exists() or target.is_symlink():
        remove_tree(target)
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
        state = read_json(state_path)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} {_after(state_path, error)}") from error
    if not isinstance(state, dict) or "digest" not in state:
        raise CheckpointError(
            f"checkpoint {path}: {STATE_FILE} is not the state of a checkpoint: it holds "
            + ("no digest" if isinstance(state, dict) else f"a {type(state).__name__}")
        )
    recorded = state.pop("digest")
    if digest(state) != recorded:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} was altered since it was written (digest)")
    if state.get("format") not in _READABLE:
        raise CheckpointError(
            f"checkpoint {path} has format {state.get('format')}, this version reads format "
            f"{' and '.join(map(str, _READABLE))}; resume with the version that wrote it (see manifest.json)"
        )
    if (fault := _state_fault(state)) is not None:
        raise CheckpointError(f"checkpoint {path}: {STATE_FILE} is not the state of a checkpoint: {fault}")
    return state


def _after(path: Path, error: ValueError) -> str:
    return str(error).removeprefix(f"{path} ")


def _state_fault(state: Mapping[str, Any]) -> str | None:
    """Say what of a state is missing or of another kind; None: all is as `load_checkpoint` relies on it."""
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
            return f"its {name} is a {type(state.get(name)).__name__}"
    defaults = vars(TrainingProgress())
    if state["progress"].keys() != defaults.keys():
        return f"its progress has {', '.join(sorted(state['progress']))}"
    for name, value in state["progress"].items():
        allowed = (int, float) if isinstance(defaults[name], float) else (type(defaults[name]),)
        if type(value) not in allowed or (not isinstance(value, str) and value < 0):
            return f"its progress has {value!r} as {name}"
    if not all(isinstance(name, str) for name in state["aliases"].values()):
        return "its aliases are not names of tensors"
    for name, entry in state["files"].items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or "sha256" not in entry:
            return f"it has no size and checksum of {name}"
    return None


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
    path, complaints = newest_sound(folder, verify_checkpoint)
    if path is None and not complaints:
        raise CheckpointError(
            f"{folder} holds no checkpoint to resume from; start the run again in another folder"
        )
    if path is None:
        raise CheckpointError(
            f"no checkpoint is whole, start the run again in another folder: {'; '.join(complaints)}"
        )
    return path, complaints
