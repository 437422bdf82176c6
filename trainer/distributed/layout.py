"""The layout of a model over the ranks: replicated with DDP, or sharded with FSDP2.

DDP and FSDP average gradients over the ranks that have other tokens. Each rank multiplies its loss by their
number, so that the average becomes the sum (`Layout.gradient_scale`). Beside them ranks may divide heads
(tensor) and sequences (context) among them: `trainer.distributed.grid`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from implicit_blocks.models.parts import ModelParts
from implicit_blocks.models.stack import Stack
from implicit_blocks.models.tensor_parallel import divide_model
from implicit_blocks.search.agreement import DividedRows, all_ranks_done, fixed_budget
from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from implicit_blocks.weights.cache import WEIGHTS_COME_AND_GO
from trainer.distributed.grid import Grid
from trainer.distributed.ranks import Ranks
from trainer.distributed.sequence_shares import SequenceShares
from trainer.distributed.tensor_parts import TensorParts, parts_of
from trainer.run.trainable_model import AgreesOnStopping, ShardsLayers
from trainer.specs.distributed import DistributedSpec, ResolvedLayout

BUCKET_MEGABYTES = 100
"""Size of the gradient buckets of DDP: large enough for the full bandwidth of a fast link, small enough that
the exchange overlaps with backward."""


@dataclass(frozen=True)
class Layout:
    """A model laid out over the ranks.

    ``model`` is the module whose parameters are trained and saved. ``forward`` is the module that training
    calls: the same module, or its DDP wrapper.
    """

    resolved: ResolvedLayout
    grid: Grid
    """The processes, and which of them share sequences, parts of them, and heads."""
    model: nn.Module
    forward: nn.Module
    communicates_in_the_loop: bool = False
    """Whether each call of a layer communicates, so that all ranks must make the same number of calls."""
    sequences: SequenceShares | None = None
    """This rank's parts of training sequences; None: it has whole ones."""

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self.grid.ranks

    @property
    def gradient_scale(self) -> float:
        """Factor on a rank's loss that turns the average over the ranks into their sum."""
        return float(self.grid.data.world_size)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Context of one micro-batch, forward and backward; the last one exchanges the gradients.

        Sharded weights are gathered for the first micro-batch and kept until the last. Layers that are
        sharded one by one exchange gradients with every micro-batch: accumulated gradients would be as large
        as the whole model.
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
        """Gather the weights for passes without gradients; ranks may then make different numbers of calls.

        Layers that are sharded one by one still communicate in each call.
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
        """Clip the gradients to the norm ``limit`` over all ranks; return the norm before clipping.

        Gradients of which each rank has computed a part are completed first.
        """
        if self.grid.tensor is not None and (parts := parts_of(self.model)) is not None:
            parts.sum_copies(self.model)
            return parts.clip(self.model, limit)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def alone(model: nn.Module, device: torch.device) -> Layout:
    """Return the layout of a run with one process."""
    return Layout(ResolvedLayout("none", 1), Grid.undivided(Ranks(device)), model, model)


def lay_out(
    model: nn.Module, spec: DistributedSpec, ranks: Ranks, *, phases: Iterable[ModelSpec] = ()
) -> Layout:
    """Lay out ``model``, built on the CPU with the same weights on every rank, over the ranks and devices.

    Args:
        model: the model; ``unit: layer`` shards each of its ``sharding_units()``.
        spec: the run's `training.distributed` section.
        ranks: the processes.
        phases: the model specs of the run's phases.

    Raises:
        ValueError: these ranks or this model do not support the layout.

    """
    if ranks.is_single:
        model = model.to(ranks.device)
        return Layout(ResolvedLayout("none", 1), Grid.undivided(ranks), model, model)
    on_cuda = ranks.device.type == "cuda"
    resolved = spec.resolve(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ranks=ranks.world_size,
        ranks_per_machine=ranks.local_world_size,
        memory=torch.cuda.get_device_properties(ranks.device).total_memory if on_cuda else None,
    )
    grid = Grid.of(ranks, tensor=resolved.tensor, context=resolved.context)
    _divide(model, grid)
    sequences = SequenceShares.of(grid, model)
    if resolved.kind == "none":  # all ranks have the same sequences
        model = model.to(ranks.device)
        return Layout(resolved, grid, model, model)
    if resolved.kind == "ddp":
        model = model.to(ranks.device)
        for module in model.modules():
            if isinstance(module, Stack):
                module.gradients_by_layer = True
        device_ids = [ranks.device.index] if on_cuda else None
        specs = [*phases, *([model.spec] if isinstance(model, ModelParts) else [])]
        # No initial broadcast: every rank builds the same weights.
        wrapped = DistributedDataParallel(
            model,
            device_ids=device_ids,
            process_group=grid.data.group,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MEGABYTES,
            find_unused_parameters=any(map(_leaves_parameters_out, specs)),
        )
        return Layout(resolved, grid, model, wrapped, sequences=sequences)
    mesh = _mesh(resolved, grid)
    by_layer = spec.unit == "layer"
    model.register_forward_hook(_register_output)
    if by_layer:
        for unit in _units(model, phases):
            setattr(unit, WEIGHTS_COME_AND_GO, True)
            fully_shard(unit, mesh=mesh)
            if hasattr(unit, "advance"):
                register_fsdp_forward_method(unit, "advance")
        if isinstance(model, AgreesOnStopping):
            model.agree = fixed_budget if spec.stopping == "fixed_budget" else all_ranks_done
    # The search uses these weights many times, so they stay gathered from forward to backward. They stay in
    # float32: autocast makes bfloat16 copies once a pass, and norms and an SSM's A, dt and D use float32.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Layout(resolved, grid, model, model, communicates_in_the_loop=by_layer, sequences=sequences)


def _divide(model: nn.Module, grid: Grid) -> None:
    """Divide the heads of a model, and have its searches agree, where the grid's ranks divide them."""
    if grid.tensor is None and grid.context is None:
        return
    assert isinstance(model, ModelParts), "checked with the spec of the run"
    if grid.tensor is not None:
        TensorParts(grid, divide_model(model, grid.tensor)).attach(model)
        model.agree = DividedRows(heads=grid.tensor)


def _leaves_parameters_out(spec: object) -> bool:
    """Whether a step may leave parameters without a gradient: those of a gate, or what only the start reads.

    The search, and loops before the differentiated ones, detach the start.
    """
    if not isinstance(spec, ImplicitLMSpec):
        return False
    start = spec.start.parameter_count(spec.core_width) > 0
    return spec.exit_gate or start or not spec.injection.injects


def _mesh(resolved: ResolvedLayout, grid: Grid) -> DeviceMesh:
    """Return the mesh of the ranks that have other tokens."""
    kind = grid.ranks.device.type
    sizes = {"replicate": grid.data.world_size // resolved.shards, "shard": resolved.shards}
    if resolved.kind == "fsdp":
        del sizes["replicate"]
    if grid.tensor is None:
        return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    every = {**sizes, "tensor": grid.tensor.size()}
    whole = init_device_mesh(kind, tuple(every.values()), mesh_dim_names=tuple(every))
    return whole[tuple(sizes)]


def _units(model: nn.Module, phases: Iterable[ModelSpec]) -> list[nn.Module]:
    if not isinstance(model, ShardsLayers):
        raise ValueError(
            f"{type(model).__name__} has no layers to shard one by one (sharding_units); "
            "set training.distributed.unit=model"
        )
    for phase in phases:
        gradient = getattr(phase, "gradient", None)
        if gradient is not None and gradient.kind == "implicit_function":
            raise ValueError(
                "gradient 'implicit_function' runs backward through the layers a different number of times "
                "on each rank; set training.distributed.unit=model, or choose gradient 'phantom'"
            )
    return model.sharding_units()


def _register_output(module: nn.Module, arguments: Any, output: Any) -> None:
    """Register the class of a model's output as a pytree, so that FSDP finds the loss and hooks backward."""
    kind = type(output)
    if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(kind)
