"""Loading a checkpoint into a model and an optimizer, on any number of processes.

:mod:`trainer.checkpoint.folder` describes the files, :mod:`trainer.checkpoint.writer` writes them. On the
number of processes that saved the checkpoint, the run continues bit by bit. On another number, tensors are
resharded and the data continue at the same sample, but random numbers of training (dropout) differ.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from implicit_blocks.checkpoints.find import MODEL_PREFIX
from implicit_blocks.checkpoints.sharded import load_tensors, read_whole_tensors, tensor_index
from trainer.checkpoint.folder import (
    OPTIMIZER_PREFIX,
    TRAINING_PREFIX,
    TrainingProgress,
    rank_file,
    read_state,
    verify_checkpoint,
)
from trainer.checkpoint.rng import restore_random_state, seed_everything
from trainer.checkpoint.writer import named_tensors
from trainer.distributed import Ranks
from trainer.distributed.tensor_parts import parts_of, tensor_ranks
from trainer.errors import CheckpointError
from trainer.optim.ema import WeightAverage
from trainer.optim.optimizers import load_optimizer_state
from trainer.run.trainable_model import MatchesCounters
from trainer.storage.files import read_json


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    average: WeightAverage | None = None,
    restore_random: bool = False,
    verify: bool = True,
    ranks: Ranks | None = None,
) -> TrainingProgress:
    """Verify and load the checkpoint at ``path``; return the progress of the run.

    With several processes all of them call this. Model and optimizer may be sharded in another way than when
    the checkpoint was saved.

    Args:
        path: of the checkpoint.
        model: the inner module, without a DDP wrapper.
        optimizer: of that model; None: its state is not loaded. With it the model gets the weights of
            training, otherwise their average if the checkpoint has one.
        average: of the model's weights, loaded with the optimizer; begins anew if the checkpoint has none.
        restore_random: whether to restore the random number generators.
        verify: whether to verify all files; False directly after :func:`verify_checkpoint`.
        ranks: the processes; None: this one only.

    Raises:
        CheckpointError: a file is damaged or the model differs; nothing is loaded then.

    """
    ranks = ranks or Ranks(torch.device("cpu"))
    state = ranks.run_on_rank0(lambda: verify_checkpoint(path) if verify else read_state(path))
    counters: set[str] = set()
    if isinstance(model, MatchesCounters):
        stored = tensor_index(path, prefix=MODEL_PREFIX)
        counters = model.match_counters(stored.keys())
    tensors, aliases = named_tensors(model)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in counters}
    parts = parts_of(model)
    _require_same_model(path, tensors if parts is None else parts.as_stored(tensors), aliases, state)
    found = {MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
    of_optimizer: dict[str, Tensor] = {}
    if optimizer is not None:
        found = _with_training_weights(path, found, average)
        of_optimizer = _empty_optimizer_state(path, model)
        found |= {OPTIMIZER_PREFIX + name: tensor for name, tensor in of_optimizer.items()}
    load_tensors(path, found if parts is None else parts.as_stored(found), one_process=ranks.is_single)
    if optimizer is not None:
        load_optimizer_state(optimizer, model, of_optimizer, state["optimizer_values"])
        if average is not None:  # an extended run may have moved a share of its steps behind this one
            average.updates = state.get("average_updates", 0) * (state["progress"]["step"] > average.start)
    if restore_random:
        _restore_random(path, state, ranks, tensor_ranks(model))
    return TrainingProgress(**state["progress"])


def _with_training_weights(
    path: Path, found: dict[str, Tensor], average: WeightAverage | None
) -> dict[str, Tensor]:
    """Load into the model the weights of training, and the stored average into ``average``, if there is one.

    ``found`` are the tensors to load by their names in the checkpoint.
    """
    stored = [name.removeprefix(TRAINING_PREFIX) for name in tensor_index(path, prefix=TRAINING_PREFIX)]
    averages = {} if average is None else average.tensors
    result = dict(found)
    for name in stored:
        result[TRAINING_PREFIX + name] = result.pop(MODEL_PREFIX + name)
        if name in averages:
            result[MODEL_PREFIX + name] = averages[name]
    return result


def read_model_tensors(path: Path) -> dict[str, Tensor]:
    """Return the unsharded model tensors of the checkpoint at ``path``, on the CPU.

    In a run with ``training.ema`` the weights are their average.

    Raises:
        CheckpointError: the state is damaged; the checksums of the tensors are not verified.

    """
    aliases = read_state(path)["aliases"]
    tensors = read_whole_tensors(path, prefix=MODEL_PREFIX)
    return {**tensors, **{name: tensors[target] for name, target in aliases.items()}}


def _require_same_model(
    path: Path, tensors: dict[str, Tensor], aliases: dict[str, str], state: dict[str, Any]
) -> None:
    stored = {name: tuple(entry.size) for name, entry in tensor_index(path, prefix=MODEL_PREFIX).items()}
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"lacks {name}" for name in own.keys() - stored.keys()]
    problems += [f"has {name}, which the model lacks" for name in stored.keys() - own.keys()]
    problems += [
        f"has {name} of shape {stored[name]}, the model {own[name]}"
        for name in own.keys() & stored.keys()
        if stored[name] != own[name]
    ]
    if not problems and state["aliases"] != aliases:
        problems = ["ties different weights to each other"]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + ("; …" if len(problems) > 5 else "")
        raise CheckpointError(f"checkpoint {path} is of another model: it {shown}")


def _empty_optimizer_state(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return zeros for the stored state of the optimizer, sharded like the model's parameters."""
    parameters, parts = dict(model.named_parameters()), parts_of(model)
    state: dict[str, Tensor] = {}
    for key, entry in tensor_index(path, prefix=OPTIMIZER_PREFIX).items():
        name = key.rpartition("/")[0]
        parameter = parameters.get(name)
        if parameter is None:
            raise CheckpointError(
                f"checkpoint {path}: the optimizer state names the parameter {name!r}, which this model lacks"
            )
        part = None if parts is None else parts.named(name, parameter)
        state[key] = _empty_entry(parameter, entry, parameter.shape if part is None else part.shape)
    return state


def _empty_entry(parameter: nn.Parameter, entry: TensorStorageMetadata, shape: torch.Size) -> Tensor:
    # Entries of the whole parameter's shape are sharded like the parameter; others (counters, sums over
    # rows) are replicated.
    if entry.size == shape and parameter.dim() > 0:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _restore_random(path: Path, state: dict[str, Any], ranks: Ranks, tensor: int) -> None:
    # Ranks that divide heads must have the same random numbers.
    if state["ranks"] == ranks.world_size and state.get("tensor_ranks", 1) == tensor:
        file = path / rank_file(ranks.rank)
        try:
            restore_random_state(read_json(file)["random_state"])
        except Exception as error:  # each generator raises another exception for an invalid state
            raise CheckpointError(
                f"checkpoint {path}: {file.name} has no valid states of the random number generators "
                f"({type(error).__name__}: {error}); resume from another checkpoint by --checkpoint"
            ) from error
        return
    # Another number of processes: new random numbers, the same at every attempt.
    text = f"{state['spec_digest']}/{state['progress']['step']}/{ranks.rank // tensor}"
    seed_everything(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
