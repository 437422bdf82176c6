"""Optimizers built from specs, and their state by parameter name.

State is stored by parameter name, not by position: a checkpoint is readable, does not depend on the order of
the parameters, and needs no pickle. Quantized state, such as torchao's, is a tensor subclass made of plain
tensors, its *parts*, which are stored one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.run.trainable_model import TrainableModel

if TYPE_CHECKING:
    from trainer.specs.optimizers import AdamWSpec


def decay_groups(
    model: nn.Module, weight_decay: float, *, leave_out: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay on the first of ``model.decay_groups()``, without empty ones.

    Args:
        model: the model to train.
        weight_decay: of the first group; that of the second is 0.
        leave_out: ``id`` of parameters that belong to no group.

    Raises:
        ValueError: the model has no ``decay_groups``.

    """
    if not isinstance(model, TrainableModel):
        raise ValueError(
            f"{type(model).__name__} has no decay_groups(), which the optimizer needs; "
            "implement it, or choose another optimizer"
        )
    groups = [
        {"params": [p for p in parameters if id(p) not in leave_out], "weight_decay": decay}
        for parameters, decay in zip(model.decay_groups(), (weight_decay, 0.0), strict=True)
    ]
    return [group for group in groups if group["params"]]


def uses_fused_kernel(model: nn.Module) -> bool:
    """Whether AdamW uses its fused kernel: on CUDA. On the CPU the plain one has a fixed summation order."""
    return all(parameter.is_cuda for parameter in model.parameters())


def build_adamw(spec: AdamWSpec, *, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW for ``model``, with weight decay on the first of its ``decay_groups()``.

    On CUDA the fused kernel is used, on the CPU the plain one, whose order of summation is fixed.

    Raises:
        ValueError: the model has no ``decay_groups``.

    """
    beta1, beta2 = spec.betas
    return torch.optim.AdamW(
        decay_groups(model, spec.weight_decay),
        lr=spec.learning_rate,
        betas=(beta1, beta2),
        eps=spec.eps,
        fused=True if uses_fused_kernel(model) else None,
    )


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state: tensors named ``<parameter>/<entry>``, and the other entries as JSON values.

    The parts of a tensor subclass are named ``<parameter>/<entry>.<part>``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for entry, value in entries.items():
            if _has_parts(value):
                parts, _ = value.__tensor_flatten__()
                tensors |= {f"{name}/{entry}.{part}": getattr(value, part) for part in parts}
            elif isinstance(value, Tensor):
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
    if any("." in key.rpartition("/")[2] for key in tensors):
        _initialize_state(optimizer)
    for key, value in [*tensors.items(), *values.items()]:
        name, _, entry = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"the optimizer state names the parameter {name!r}, which this model lacks")
        entry, _, part = entry.partition(".")
        if part:
            whole = optimizer.state[parameter].get(entry)
            if not _has_parts(whole):
                raise ValueError(
                    f"the optimizer state of {name!r} has a quantized {entry!r}, which "
                    f"{type(optimizer).__name__} does not have; resume with the optimizer of the checkpoint"
                )
            getattr(whole, part).copy_(value)
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != parameter.shape and entry.startswith("exp_avg"):
                raise ValueError(
                    f"the optimizer state of {name!r} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(parameter.shape)}"
                )
            value = value.to(parameter.device)
        elif isinstance(value, Tensor):
            # As in `Optimizer.load_state_dict`: step counters are kept on the CPU, unless the optimizer is
            # fused or capturable; other scalars are on the parameter's device.
            fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            value = value.to("cpu" if entry == "step" and not fused else parameter.device).clone()
        optimizer.state[parameter][entry] = value


def _has_parts(value: Any) -> bool:
    return is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor)


@torch.no_grad()
def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of all parameters by a step with gradients and a learning rate of 0.

    torch's DCP does the same. Parameters, gradients and learning rates do not change.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [(parameter, parameter.clone(), parameter.grad) for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, weight, gradient in before:
        parameter.copy_(weight)
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
