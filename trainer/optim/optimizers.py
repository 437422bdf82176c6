"""Optimizers built from specs, and their state by parameter name.

State is stored by parameter name, not by position: a checkpoint is readable, does not depend on the order of
the parameters, and needs no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.run.trainable_model import TrainableModel

if TYPE_CHECKING:
    from trainer.specs.training import AdamWSpec


def build_adamw(spec: AdamWSpec, *, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW for ``model``, with weight decay on the first of its ``decay_groups()``.

    On CUDA the fused kernel is used, on the CPU the plain one, whose order of summation is fixed.

    Raises:
        ValueError: the model has no ``decay_groups``.

    """
    if not isinstance(model, TrainableModel):
        raise ValueError(
            f"{type(model).__name__} has no decay_groups(), which optimizer 'adamw' needs; "
            "implement it, or choose another optimizer"
        )
    with_decay, without_decay = model.decay_groups()
    groups = [
        {"params": list(with_decay), "weight_decay": spec.weight_decay},
        {"params": list(without_decay), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    on_cuda = all(parameter.is_cuda for parameter in model.parameters())
    beta1, beta2 = spec.betas
    return torch.optim.AdamW(
        groups, lr=spec.learning_rate, betas=(beta1, beta2), eps=spec.eps, fused=True if on_cuda else None
    )


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state: tensors named ``<parameter>/<entry>``, and the other entries as JSON values."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{entry}"] = value
            else:
                values[f"{name}/{entry}"] = value
    return tensors, values


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Restore a state that :func:`optimizer_state` returned.

    Raises:
        ValueError: the state names a parameter that the model lacks, or a shape differs.

    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in [*tensors.items(), *values.items()]:
        name, _, entry = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"the optimizer state names the parameter {name!r}, which this model lacks")
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != parameter.shape and entry.startswith("exp_avg"):
                raise ValueError(
                    f"the optimizer state of {name!r} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(parameter.shape)}"
                )
            value = value.to(parameter.device)
        elif isinstance(value, Tensor):
            # Step counters: AdamW keeps them on the CPU, unless it is fused or capturable.
            fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            value = value.to(parameter.device if fused else "cpu").clone()
        optimizer.state[parameter][entry] = value
