"""Optimizer classes of torch and torchao by their import path."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from implicit_blocks._utils.hints import did_you_mean
from trainer.optim.optimizers import decay_groups

if TYPE_CHECKING:
    from trainer.specs.optimizers import TorchClassSpec

_PLACE = "training.optimizer"


def build_torch_optimizer(spec: TorchClassSpec, *, model: nn.Module) -> torch.optim.Optimizer:
    """Build the class at ``spec.path`` with weight decay on the first of ``model.decay_groups()``.

    Raises:
        ValueError: the class does not exist, is not an optimizer that the trainer can use, does not accept an
            option, or refuses a value; names the entry of the spec.

    """
    found = _class_at(spec.path)
    parameters = inspect.signature(found).parameters
    known = [name for name in parameters if name not in ("params", "lr", "weight_decay")]
    accepts_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option, value in spec.options.items():
        if option not in known and not accepts_any:
            raise ValueError(
                f"{_PLACE}.options.{option}={value!r}: {spec.path} has no option {option!r}; "
                f"{did_you_mean(option, known)}"
            )
    if spec.path.startswith("torchao.") and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{_PLACE}.class={spec.path} does not support sharded weights, since its state cannot be saved; "
            "set training.distributed.kind=ddp, or choose a class of torch.optim"
        )
    groups = decay_groups(model, spec.weight_decay)
    if "weight_decay" not in parameters and not accepts_any:
        if spec.weight_decay:
            raise ValueError(
                f"{_PLACE}.weight_decay={spec.weight_decay:g}: {spec.path} has no weight decay; set it to 0"
            )
        groups = [{"params": group["params"]} for group in groups]
    try:
        built: torch.optim.Optimizer = found(groups, lr=spec.learning_rate, **spec.options)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        remedy = "; kind: muon combines it with AdamW" if spec.path == "torch.optim.Muon" else ""
        raise ValueError(
            f"{_PLACE}: {spec.path} cannot be built with options {spec.options}: {error}{remedy}"
        ) from error
    return built


def _class_at(path: str) -> Any:
    """Return the optimizer class at an import path."""
    module_name, _, name = path.rpartition(".")
    package = path.partition(".")[0]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ValueError(
                f"{_PLACE}.class={path}: {package} is not installed; pip install {package}"
            ) from error
        raise ValueError(
            f"{_PLACE}.class={path}: there is no module {error.name!r}; correct the path"
        ) from error
    found = getattr(module, name, None)
    base = torch.optim.Optimizer
    usable = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    ]
    if not (inspect.isclass(found) and issubclass(found, base) and found is not base):
        what = "does not exist" if found is None else "is not an optimizer class"
        raise ValueError(f"{_PLACE}.class={path} {what}; {did_you_mean(name, usable)}")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{_PLACE}.class={path} evaluates the loss several times in a step, which the trainer does not "
            "support; choose another class"
        )
    return found
