"""FLOPs of a training step: useful and executed operations. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from implicit_blocks.models.counting import (
    FlopCounts,
    count_flops,
    expected_loops,
    reads_of_objective,
    step_flops,
)
from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from trainer.specs.training import CheckpointActivations


class TrainingFlops(NamedTuple):
    """Floating-point operations per token of one training step; a multiply-add counts 2.

    ``useful`` operations are those of the algorithm: each sequence's own iterations, with and without
    gradients, the backward pass of the differentiated ones, and the parts that run once. ``executed``
    operations are those that the device performs: converged sequences stay in the batch until it finishes or
    is compacted, and checkpointed activations are computed twice. Utilization (MFU) counts useful operations;
    executed ones measure how busy the device is.
    """

    useful: float
    executed: float


@dataclass(frozen=True)
class StepCost:
    """The operations of a training step of a model, as a function of its iterations."""

    model: ModelSpec
    once: FlopCounts
    checkpoint_activations: CheckpointActivations = "none"

    @classmethod
    def of(
        cls, model: ModelSpec, *, length: int, checkpoint_activations: CheckpointActivations = "none"
    ) -> StepCost | None:
        """Return the cost of steps with sequences of ``length`` tokens; None: a part of it is not known."""
        once = count_flops(model, length=length)
        if once is None or step_flops(model, once) is None:
            return None
        return cls(model, once, checkpoint_activations)

    def flops(
        self, iterations: float | None = None, iterations_executed: float | None = None
    ) -> TrainingFlops:
        """Return the operations per token; arguments as for ``training_flops``."""
        model, once = self.model, self.once
        useful = step_flops(model, once, iterations=iterations)
        assert useful is not None
        assert once.layers is not None
        again = 0.0
        if isinstance(model, ImplicitLMSpec):
            if getattr(model.gradient, "checkpointing", False):  # already included in the spec's own cost
                useful -= differentiated_passes(model) * once.layers
                again += differentiated_passes(model)
            if iterations is not None and iterations_executed is not None and _searches(model):
                again += iterations_executed - iterations
        executed = useful + again * once.layers
        if self.checkpoint_activations != "none":
            reads = reads_of_objective(model, loops_of(model, iterations))
            executed += differentiated_passes(model, iterations) * once.layers
            executed += (once.prelude or 0.0) + reads.backward * (once.coda or 0.0)
        return TrainingFlops(useful, executed)


def training_flops(
    model: ModelSpec,
    *,
    length: int,
    iterations: float | None = None,
    iterations_executed: float | None = None,
    checkpoint_activations: CheckpointActivations = "none",
) -> TrainingFlops | None:
    """Return the operations per token of one training step.

    Args:
        model: model of the phase.
        length: tokens per sequence.
        iterations: mean iterations of the search over sequences, or loops; None: the mean of the model's
            depth, or else the maximum of the stopping rule.
        iterations_executed: calls of the map in which a sequence was part of the batch, converged or not: if
            rows do not leave the batch, the largest number of iterations in its micro-batch. None: as
            ``iterations``.
        checkpoint_activations: as in the spec's `training` section.

    Returns:
        None if a component does not declare its cost.

    """
    cost = StepCost.of(model, length=length, checkpoint_activations=checkpoint_activations)
    return None if cost is None else cost.flops(iterations, iterations_executed)


def _searches(model: ImplicitLMSpec) -> bool:
    return model.gradient.forward_equivalents(1) != model.gradient.forward_equivalents(2)


def loops_of(model: ModelSpec, iterations: float | None = None) -> float:
    """Return the iterations of a step: those given, or the mean of the model's depth, or the maximum."""
    if iterations is not None:
        return iterations
    return expected_loops(model) if isinstance(model, ImplicitLMSpec) else 1


def differentiated_passes(model: ModelSpec, iterations: float | None = None) -> int:
    """Return the number of differentiated passes through the core.

    ``iterations``: of the search, or loops; None: the mean of the model's depth, or else the maximum of its
    stopping rule.
    """
    if not isinstance(model, ImplicitLMSpec):
        return 1
    return model.gradient.differentiated_calls_of(max(1, round(loops_of(model, iterations))))


def most_loops(model: ImplicitLMSpec) -> int:
    """Return the largest number of iterations of a step, which memory depends on.

    For a depth without an upper bound it is twice the mean, which few steps exceed.
    """
    mean, most = model.depth.expected_loops(), model.depth.maximum_loops()
    if mean is None:
        return model.stopping.max_iterations
    return math.ceil(2 * mean) if most is None else most
