"""Checkpoints: everything a run needs to go on exactly where it was, in files anyone can read.

A checkpoint is a folder ``step-00000120`` with ``model.safetensors``, ``optimizer.safetensors`` and
``state.json``. The folder is written under a temporary name, forced onto the disk and renamed, so that
under its final name it is whole, unless the disk or someone altered it since: sizes and checksums in
``state.json`` tell.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.errors import CheckpointError
from trainer.files import digest, fsync_path, sha256_of, write_json
from trainer.optimizers import load_optimizer_state, optimizer_state
from trainer.rng import random_state, restore_random_state

FORMAT = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Progress:
    """How far a run has come: what a checkpoint stores beside the tensors.

    ``step`` updates have been made, from ``samples`` sequences and ``tokens`` tokens; ``seconds`` were
    spent on it. The data position is counted in global samples, so that it means the same for any number of
    processes.
    """

    step: int = 0
    phase: str = ""
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` updates."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first, without what a crash left half written."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit())


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    spec_digest: str,
    keep: int,
) -> Path:
    """Write the checkpoint of ``progress.step`` into ``folder``, keep the last ``keep``; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    # What an earlier process left half written is of no use to anybody.
    for stale in folder.glob(f"*{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    final = folder / step_name(progress.step)
    temporary = folder / f"{final.name}{_TEMPORARY}{os.getpid()}"
    temporary.mkdir()

    _save_tensors(temporary / MODEL_FILE, model.state_dict())
    tensors, values = optimizer_state(optimizer, model)
    _save_tensors(temporary / OPTIMIZER_FILE, tensors)
    state: dict[str, Any] = {
        "format": FORMAT,
        "progress": vars(progress),
        "spec_digest": spec_digest,
        "optimizer_values": values,
        "random_state": random_state(),
        "files": {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": sha256_of(temporary / name)}
            for name in (MODEL_FILE, OPTIMIZER_FILE)
        },
    }
    write_json(temporary / STATE_FILE, {**state, "digest": digest(state)})
    fsync_path(temporary)

    if final.exists():  # a run resumed from an earlier checkpoint has come here again
        replaced = folder / f"{final.name}{_TEMPORARY}replaced"
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced)
    else:
        temporary.rename(final)
    fsync_path(folder)
    _prune(folder, newest=final, keep=keep)
    return final


def _prune(folder: Path, *, newest: Path, keep: int) -> None:
    # Checkpoints later than the newest belong to a future that a resumed run has left: they are not touched
    # here, and not counted either, so that they can't push out the run's own.
    own = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    for path in own[: max(0, len(own) - max(1, keep))]:
        shutil.rmtree(path)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of the checkpoint at ``path`` after checking every file's size and checksum.

    Raises:
        CheckpointError: naming the file that is missing, cut short or altered.

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
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            kind = "cut short" if size < expected["bytes"] else "altered"
            raise CheckpointError(
                f"checkpoint {path}: {name} is {kind}: {size} bytes where {expected['bytes']} were written"
            )
        if sha256_of(file) != expected["sha256"]:
            raise CheckpointError(f"checkpoint {path}: {name} was altered since it was written (checksum)")
    assert isinstance(state, dict)
    return state


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    restore_random: bool = False,
) -> Progress:
    """Check the checkpoint at ``path`` and load it; return how far the run had come.

    The optimizer and the generators are restored where asked for. Raises :class:`CheckpointError` if a file
    is damaged or the model is another one; nothing is loaded then.
    """
    state = verify_checkpoint(path)
    tensors = _load_tensors(path / MODEL_FILE)
    own = model.state_dict()
    problems = [f"lacks {name}" for name in own.keys() - tensors.keys()]
    problems += [f"has {name}, which the model lacks" for name in tensors.keys() - own.keys()]
    problems += [
        f"has {name} of shape {tuple(tensors[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if tensors[name].shape != own[name].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + ("; …" if len(problems) > 5 else "")
        raise CheckpointError(f"checkpoint {path} is of another model: it {shown}")
    model.load_state_dict(tensors)
    if optimizer is not None:
        try:
            load_optimizer_state(
                optimizer, model, load_file(path / OPTIMIZER_FILE), state["optimizer_values"]
            )
        except ValueError as error:
            raise CheckpointError(f"checkpoint {path}: {error}") from error
    if restore_random:
        restore_random_state(state["random_state"])
    return Progress(**state["progress"])


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
    complaints: list[str] = []
    for path in reversed(checkpoints):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            complaints.append(str(error))
        else:
            return path, complaints
    raise CheckpointError(
        f"no checkpoint is whole, start the run again in another folder: {'; '.join(complaints)}"
    )


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is neither resumed from nor counted, but still there to look at."""
    target = path.with_name(f"left-{path.name}")
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors refuses tensors that share storage, such as tied weights under two names: the first name
    # is stored, the others are noted as aliases.
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() > 0 and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            stored[name] = tensor.detach().contiguous()
    save_file(stored, path, metadata={"format": "pt", "aliases": json.dumps(aliases)})
    fsync_path(path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    tensors: dict[str, Tensor] = load_file(path)
    return {**tensors, **{name: tensors[target] for name, target in aliases.items()}}
