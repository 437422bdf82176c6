"""FLOPs of a training step: useful and executed operations. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from implicit_blocks.models.counting import count_flops, training_flops_per_token
from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from trainer.specs.training import CheckpointActivations


class TrainingFlops(NamedTuple):
    """Floating-point operations per token of one training step; a multiply-add counts 2.

    ``useful`` operations are those of the algorithm: each sequence's own iterations, and the forward and
    backward pass of the differentiated part. ``executed`` operations are those that the device performs:
    converged sequences stay in the batch until it finishes or is compacted, and checkpointed activations are
    computed twice. Utilization (MFU) counts useful operations; executed ones measure how busy the device is.
    """

    useful: float
    executed: float


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
        iterations: mean iterations of the search over sequences; None: the maximum of the stopping rule.
        iterations_executed: calls of the map in which a sequence was part of the batch, converged or not: if
            rows do not leave the batch, the largest number of iterations in its micro-batch. None: as
            ``iterations``.
        checkpoint_activations: as in the spec's `training` section.

    Returns:
        None if a component does not declare its cost.

    """
    useful = training_flops_per_token(model, length=length, iterations=iterations)
    once = count_flops(model, length=length)
    if useful is None or once is None or once.layers is None:
        return None
    again = 0.0
    if isinstance(model, ImplicitLMSpec):
        if getattr(model.gradient, "checkpointing", False):  # already included in the spec's own cost
            useful -= differentiated_passes(model) * once.layers
            again += differentiated_passes(model)
        if iterations is not None and iterations_executed is not None and _searches(model):
            again += iterations_executed - iterations
    if checkpoint_activations != "none":
        again += differentiated_passes(model)
    return TrainingFlops(useful, useful + again * once.layers)


def _searches(model: ImplicitLMSpec) -> bool:
    return model.gradient.forward_equivalents(1) != model.gradient.forward_equivalents(2)


def differentiated_passes(model: ModelSpec) -> int:
    """Return the number of differentiated passes through the layers."""
    return model.gradient.differentiated_calls if isinstance(model, ImplicitLMSpec) else 1
