"""Reading weights from a file, a folder, or a checkpoint of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from implicit_blocks.checkpoints.find import (
    CHECKPOINTS,
    MODEL_PREFIX,
    RECORD,
    SAFETENSORS,
    read_newest,
    require_whole,
)
from implicit_blocks.checkpoints.folder import check_tensors, read_file
from implicit_blocks.checkpoints.sharded import read_whole_tensors
from implicit_blocks.checkpoints.tensor_index import has_index
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec


def empty_state(spec: ImplicitLMSpec | ExplicitLMSpec) -> dict[str, Tensor]:
    """Return a model's state dict on the meta device (names and shapes only)."""
    with torch.device("meta"):
        model: nn.Module = build(spec)
    return model.state_dict()


def read_newest_weights(
    source: Path, *, expected: Mapping[str, Tensor]
) -> tuple[Path, dict[str, Tensor], list[str]]:
    """Read weights as :func:`read_weights` does; for a run folder, those of the newest complete checkpoint.

    The run may be training and remove a checkpoint while it is read; then the next one is read.

    Returns:
        The path of the weights, the weights, and the problems of each newer checkpoint.

    Raises:
        ValueError: as :func:`read_weights`; or the run has no complete checkpoint.

    """
    if not (source / CHECKPOINTS).is_dir():
        return source, read_weights(source, expected=expected), []
    path, state, complaints = read_newest(
        source / CHECKPOINTS, require_whole, lambda path: read_weights(path, expected=expected)
    )
    if path is not None and state is not None:
        return path, state, complaints
    if not complaints:
        raise ValueError(f"the run in {source} has no checkpoint yet; train it, or give a file of weights")
    raise ValueError(f"the run in {source} has no complete checkpoint:  {'; '.join(complaints)}")


def read_weights(path: Path, *, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a file of weights, or a checkpoint of the trainer, whose checksums are verified.

    Args:
        path: the file, a folder with ``model.safetensors``, or the checkpoint.
        expected: the model's own state dict. The trainer stores tied weights once; the other names are
            resolved through this dict, unless it is on the meta device.

    Raises:
        ValueError: the weights cannot be read or do not fit; all differences are listed.

    """
    state = _read(path)
    stored = {expected[name].data_ptr(): tensor for name, tensor in state.items() if name in expected}
    tied = {
        name: stored[own.data_ptr()]
        for name, own in expected.items()
        if name not in state and not own.is_meta and own.data_ptr() in stored
    }
    state |= tied
    check_tensors(state, expected, what=str(path))
    return state


def _read(path: Path) -> dict[str, Tensor]:
    if (path / RECORD).is_file():  # otherwise weights or tensors without a record
        try:
            require_whole(path)
        except ValueError as error:
            raise ValueError(f"{error}; use another checkpoint") from None
    if has_index(path):
        tensors = read_whole_tensors(path, prefix=MODEL_PREFIX)
        if not tensors:
            raise ValueError(f"{path} contains no model tensors; give a checkpoint of the trainer")
        return tensors
    file = path / SAFETENSORS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"no weights at {file}; give a file, a folder with {SAFETENSORS}, or a checkpoint of the trainer"
        )
    return read_file(file)
