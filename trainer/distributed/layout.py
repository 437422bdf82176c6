"""How a model is laid out over the ranks: whole on each, or sharded with PyTorch's FSDP2.

A rank's gradient is that of its own sequences; both DDP and FSDP average over the ranks, so a rank scales its
loss by their number and the average becomes the sum (`Layout.gradient_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from implicit_blocks.models.backbone import Backbone
from implicit_blocks.search.agreement import RankAgreement, fixed_budget
from implicit_blocks.specs import ModelSpec
from implicit_blocks.weights.cache import WEIGHTS_COME_AND_GO
from trainer.distributed.ranks import Ranks
from trainer.specs.distributed import DistributedSpec, Kind, ResolvedLayout

BUCKET_MEGABYTES = 100
"""Of gradients that DDP exchanges at once: messages long enough for a fast link's full speed, and so many
that they go while backward computes."""


@dataclass(frozen=True)
class Layout:
    """A model over the ranks.

    ``model`` is the module whose parameters are trained and stored, ``forward`` what is called in training
    (the same, or its DDP wrapper).
    """

    kind: Kind
    ranks: Ranks
    model: nn.Module
    forward: nn.Module
    communicates_in_the_loop: bool = False
    """Whether every call of a layer talks to the other ranks, which must call it equally often."""

    @property
    def gradient_scale(self) -> float:
        """What a rank multiplies its loss by, so that the ranks' average is their sum."""
        return float(self.ranks.world_size)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Go through one micro-batch, forward and backward; gradients are exchanged with the last one only.

        Sharded weights are gathered for the first one and stay until the last. Layers that are gathered one
        by one exchange theirs with every micro-batch: what waits would be as large as the whole model.
        """
        context: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.forward, DistributedDataParallel) and not last:
            context = self.forward.no_sync()
        if isinstance(self.model, FSDPModule) and not self.communicates_in_the_loop:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            self.model.set_reshard_after_backward(last)
        with context:
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the weights for a time without gradients, in which ranks may call the model differently often.

        Where layers communicate one by one they go on doing so.
        """
        if not isinstance(self.model, FSDPModule) or self.communicates_in_the_loop:
            yield
            return
        self.model.unshard()
        try:
            yield
        finally:
            self.model.reshard()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``limit``; return what it was."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def alone(model: nn.Module, device: torch.device) -> Layout:
    """Return the layout of a process without others."""
    return Layout("none", Ranks(device), model, model)


def lay_out(
    model: nn.Module, spec: DistributedSpec, ranks: Ranks, *, phases: Iterable[ModelSpec] = ()
) -> Layout:
    """Lay ``model``, built on the CPU with the same weights on every rank, out over the ranks and devices.

    Args:
        model: the model; what `unit: layer` shards one by one its ``sharding_units()`` tells.
        spec: the run's `training.distributed` section.
        ranks: the processes.
        phases: the models' specs in the run's phases.

    Raises:
        ValueError: a layout that these ranks or this model can't have.

    """
    if ranks.is_single:
        model = model.to(ranks.device)
        return Layout("none", ranks, model, model)
    on_cuda = ranks.device.type == "cuda"
    resolved = spec.resolve(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ranks=ranks.world_size,
        ranks_per_machine=ranks.local_world_size,
        memory=torch.cuda.get_device_properties(ranks.device).total_memory if on_cuda else None,
    )
    if resolved.kind == "ddp":
        model = model.to(ranks.device)
        for module in model.modules():
            if isinstance(module, Backbone):
                module.gradients_by_layer = True
        device_ids = [ranks.device.index] if on_cuda else None
        # No initial exchange: the ranks' weights are equal as they are built.
        wrapped = DistributedDataParallel(
            model,
            device_ids=device_ids,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MEGABYTES,
        )
        return Layout("ddp", ranks, model, wrapped)
    mesh = _mesh(resolved, ranks)
    by_layer = spec.unit == "layer"
    model.register_forward_hook(_let_fsdp_see)
    if by_layer:
        for unit in _units(model, phases):
            setattr(unit, WEIGHTS_COME_AND_GO, True)
            fully_shard(unit, mesh=mesh)
            if hasattr(unit, "advance"):
                register_fsdp_forward_method(unit, "advance")
        model.agree = fixed_budget if spec.stopping == "fixed_budget" else RankAgreement()  # type: ignore[assignment]  # no part of the module
    # The loop goes over these weights any number of times, so they stay from the forward to the backward
    # pass; in float32, as they are kept: bfloat16 copies are made from them once a pass (autocast), while
    # norms and an SSM's A, dt and D are used in float32.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Layout(resolved.kind, ranks, model, model, communicates_in_the_loop=by_layer)


def _mesh(resolved: ResolvedLayout, ranks: Ranks) -> DeviceMesh:
    if resolved.kind == "fsdp":
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    shape = (ranks.world_size // resolved.shards, resolved.shards)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _units(model: nn.Module, phases: Iterable[ModelSpec]) -> list[nn.Module]:
    units: Callable[[], list[nn.Module]] | None = getattr(model, "sharding_units", None)
    if units is None:
        raise ValueError(
            f"{type(model).__name__} has no layers to shard one by one (sharding_units); "
            "set training.distributed.unit=model"
        )
    for phase in phases:
        gradient = getattr(phase, "gradient", None)
        if gradient is not None and gradient.kind == "implicit_function":
            raise ValueError(
                "gradient 'implicit_function' goes backwards through the layers as often as each rank needs; "
                "set training.distributed.unit=model, or choose gradient 'phantom'"
            )
    return units()


def _let_fsdp_see(module: nn.Module, arguments: Any, output: Any) -> None:
    """Register the class of a model's output, so that FSDP finds the loss in it and hooks its backward."""
    kind = type(output)
    if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(kind)
