"""Operations of a training step, those that are the model's and those the machine makes. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from implicit_blocks.models.counting import count_flops, training_flops_per_token
from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from trainer.specs.training import CheckpointActivations


class TrainingFlops(NamedTuple):
    """Floating-point operations of one training step, a token; a multiply-add counts 2.

    ``useful`` is what the mathematics asks for: each sequence's own iterations, the forward and the backward
    pass of what is differentiated. ``executed`` is what the machine is given: sequences that are done stand
    in the batch until it is finished or compacted, and checkpointed activations are computed twice. A
    utilization counts the useful ones; the executed ones tell how busy the machine is.
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
    """Operations of one training step, a token.

    Args:
        model: the model of the phase.
        length: tokens in a sequence.
        iterations: of the search, the mean over sequences; None: as many as the stopping rule allows.
        iterations_executed: calls of the map a sequence was part of, done or not: where rows do not leave
            the batch, the largest number of iterations in its micro-batch. None: as ``iterations``.
        checkpoint_activations: as the spec's `training` section says.

    Returns:
        None where a component doesn't tell its cost.

    """
    useful = training_flops_per_token(model, length=length, iterations=iterations)
    once = count_flops(model, length=length)
    if useful is None or once is None or once.layers is None:
        return None
    again = 0.0
    if isinstance(model, ImplicitLMSpec):
        if getattr(model.gradient, "checkpointing", False):  # the spec's own cost has what it computes twice
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
    """Return how many passes through the layers are differentiated."""
    return model.gradient.differentiated_calls if isinstance(model, ImplicitLMSpec) else 1
