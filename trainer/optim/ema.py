"""The exponential moving average of a model's weights during training.

The average has the arithmetic of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``, which
is called here. The class itself copies the module, which sharded models do not support, and keeps a second
set of buffers; here the average is one more tensor per parameter, laid out like the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.distributed.tensor_parts import local_part


class WeightAverage:
    """Exponential moving average of the parameters of a model; buffers are not averaged.

    Every rank has one and calls it at the same steps. Under DDP each rank has the same average, under FSDP
    that of its shard. Parameters are averaged as they are stored: of a weight under weight norm, gain and
    direction.

    Args:
        model: the inner module, without a DDP wrapper; its parameters may be sharded.
        decay: share of the old average that an update keeps.
        start: steps before the averaging begins. The first update copies the weights.

    """

    def __init__(self, model: nn.Module, *, decay: float, start: int = 0) -> None:
        self._model = model
        self.start = start
        self.decay = decay
        """Share of the old average that an update keeps."""
        self._average = get_ema_multi_avg_fn(decay)
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self._parameters().items()
        }
        """The average by name of the parameter; meaningless before the first update."""
        self.updates = 0
        """Number of updates so far; with 0 there is no average."""

    @property
    def weights(self) -> str:
        """The weights that :meth:`applied` uses: ``average``, or ``training`` before the first update."""
        return "average" if self.updates else "training"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after ``step`` updates of the run."""
        if step <= self.start:
            return
        parameters = self._parameters()
        averages = [local_part(self.tensors[name]) for name in parameters]
        weights = [local_part(parameter) for parameter in parameters.values()]
        if self.updates == 0:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)
        else:
            self._average(averages, weights, self.updates)
        self.updates += 1

    @torch.no_grad()
    def capturable_update(self, step: Tensor, skip: Tensor, updates: Tensor) -> None:
        """Update the average as :meth:`update` does, without reading the device; :meth:`count` follows.

        Args:
            step: number of updates of the run, with this one, scalar on the device.
            skip: 1 where the step changed nothing, float32 scalar on the device.
            updates: number of updates of the average so far, float32 scalar on the device; counted on.

        """
        made = (step > self.start).float() * (1 - skip)
        share = made * (updates == 0).float().clamp(min=1 - self.decay)
        updates += made
        parameters = self._parameters()
        averages = [self.tensors[name] for name in parameters]
        moves = torch._foreach_sub(list(parameters.values()), averages)
        torch._foreach_add_(averages, torch._foreach_mul(moves, share))

    def count(self, step: int) -> None:
        """Count an update that was made on the device after ``step`` updates of the run."""
        self.updates += step > self.start

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; before the first update, its own."""
        if self.updates == 0:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place, one parameter at a time: captured graphs and shards keep their addresses, and the memory
        # of one parameter is enough.
        for name, parameter in self._parameters().items():
            weight, average = local_part(parameter), local_part(self.tensors[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name; those of FSDP as shards, without stale gathered copies."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return dict(self._model.named_parameters())


def averaged(average: WeightAverage | None) -> AbstractContextManager[None]:
    """Return the context in which the model has its averaged weights, if there is an average."""
    return nullcontext() if average is None else average.applied()
