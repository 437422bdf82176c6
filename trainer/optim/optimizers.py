"""Optimizers built from specs, and their state by parameter name.

State is kept by name and not by position, so that a checkpoint says what belongs to what, survives a change
of the order of parameters, and needs no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer.specs.training import AdamWSpec


def build_adamw(spec: AdamWSpec, *, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW for ``model``, with weight decay on the parameters its ``decay_groups()`` names first.

    On CUDA the fused kernel is used; on the CPU the plain one, whose sums have one fixed order.
    """
    with_decay, without_decay = model.decay_groups()  # type: ignore[operator]  # the contract of language models
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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's state as tensors named ``<parameter>/<entry>`` and the rest as JSON values."""
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
    """Put back what :func:`optimizer_state` returned.

    Raises:
        ValueError: the state names a parameter the model doesn't have, or a shape differs.

    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in [*tensors.items(), *values.items()]:
        name, _, entry = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(
                f"the optimizer state names the parameter {name!r}, which this model doesn't have"
            )
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != parameter.shape and entry.startswith("exp_avg"):
                raise ValueError(
                    f"the optimizer state of {name!r} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(parameter.shape)}"
                )
            value = value.to(parameter.device)
        elif isinstance(value, Tensor):
            # Step counters: AdamW keeps them on the CPU, except where its kernels are fused or capturable.
            fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            value = value.to(parameter.device if fused else "cpu").clone()
        optimizer.state[parameter][entry] = value
