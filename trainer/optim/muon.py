"""Muon and AdamW as one optimizer, each for its own parameters.

Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) replaces the momentum
of a matrix by an approximation of the nearest orthogonal matrix, computed by a Newton–Schulz iteration: all
singular directions get equal updates. The update is that of ``torch.optim.Muon``; its scaling by shape is
that of J. Liu et al., "Muon is Scalable for LLM Training", 2025.

Under weight norm (``g v / ‖v‖`` row by row) Muon moves the direction ``v`` and AdamW the gain ``g``. The
gradient of ``v`` is orthogonal to ``v``, so that without weight decay ``‖v‖`` only grows and the rotation of
the rows slows down.

Do not use it to fine-tune a model that was trained with AdamW (Liu et al. found no gain), or for small or
thin matrices, where AdamW is as good and cheaper. Sharded matrices cannot be orthogonalized alone and are
refused. A fused projection, such as queries, keys and values, is orthogonalized as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainer.optim.optimizers import decay_groups, uses_fused_kernel

if TYPE_CHECKING:
    from trainer.specs.optimizers import MuonSpec


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers behind the interface of one: one list of groups, one state, one step.

    Args:
        muon: torch's Muon, over the matrices.
        adamw: torch's AdamW, over all other parameters.

    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        self._muon_groups = len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    @property
    def muon(self) -> torch.optim.Muon:
        """The part that moves the matrices."""
        self._share()
        found = self._parts[0]
        assert isinstance(found, torch.optim.Muon)
        return found

    @property
    def adamw(self) -> torch.optim.AdamW:
        """The part that moves all other parameters."""
        self._share()
        found = self._parts[1]
        assert isinstance(found, torch.optim.AdamW)
        return found

    def _share(self) -> None:
        """Share this optimizer's groups and state with the parts, since loading replaces both."""
        muon, adamw = self._parts
        muon.param_groups = self.param_groups[: self._muon_groups]
        adamw.param_groups = self.param_groups[self._muon_groups :]
        muon.state = adamw.state = self.state

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; ``closure``, if given, first recomputes the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for part in self._parts:
            part.step()
        return loss


def build_muon(spec: MuonSpec, *, model: nn.Module) -> MuonAndAdamW:
    """Build the optimizer for ``model``: Muon for its matrices, AdamW for all other parameters.

    AdamW applies weight decay to the parameters in the first group of ``model.decay_groups()``. On CUDA it
    uses the fused kernel; on the CPU the plain implementation, whose summation order is fixed.

    Raises:
        ValueError: the model has no matrix for Muon, or a matrix is sharded.

    """
    matrices = matrices_of(model)
    for name, parameter in matrices.items():
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"{name} is sharded over devices, but Muon requires whole matrices; replicate the model "
                "or choose optimizer adamw"
            )
    if not matrices:
        raise ValueError(f"{type(model).__name__} has no linear layers for Muon; choose optimizer adamw")
    taken = {id(parameter) for parameter in matrices.values()}
    muon = torch.optim.Muon(
        matrices.values(),
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        ns_steps=spec.newton_schulz_steps,
        adjust_lr_fn=spec.shape_scaling,
    )
    adamw = torch.optim.AdamW(
        decay_groups(model, spec.weight_decay, leave_out=taken),
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        fused=True if uses_fused_kernel(model) else None,
    )
    return MuonAndAdamW(muon, adamw)


def matrices_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are linear maps between hidden spaces, by name.

    These are the weights of all linear layers except the head; with weight norm, their directions ``v``. The
    embedding is not one, since its rows are looked up one by one; nor are depthwise convolutions and gains,
    which have two dimensions but are not matrices.
    """
    heads = {id(head) for head in _heads(model)}
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or id(layer) in heads:
            continue
        if parametrize.is_parametrized(layer, "weight"):
            chain: Any = layer.parametrizations["weight"]  # type: ignore[index]  # a ModuleDict, once parametrized
            direction = getattr(chain, "original1", None)  # of weight norm; AdamW updates others
            if direction is not None and direction.ndim == 2:
                found[f"{name}.parametrizations.weight.original1"] = direction
        elif layer.weight.requires_grad:
            found[f"{name}.weight"] = layer.weight
    shared = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    return {name: parameter for name, parameter in found.items() if id(parameter) not in shared}


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Find the layers that compute logits: this library's ``head``, the output embeddings of transformers."""
    for part in model.modules():
        head = getattr(part, "head", None)
        if isinstance(head, nn.Module):
            yield head
        outputs = getattr(part, "get_output_embeddings", None)
        if callable(outputs) and isinstance(outputs(), nn.Module):
            yield outputs()
