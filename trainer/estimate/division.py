"""What ranks save, and send, where they divide heads and sequences of a run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from implicit_blocks.models.counting import count_parameters
from implicit_blocks.models.specs import Stack
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, MixerSpec, MLPSpec
from implicit_blocks.specs.families import is_weight_normed
from implicit_blocks.specs.tensor_plan import TensorPlan, rows
from trainer.estimate.flops import most_loops
from trainer.specs.distributed import ResolvedLayout
from trainer.specs.run import Phase

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Base of estimates whose fields are parts of a total, in bytes."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the nonzero parts, in bytes."""
        every = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        return {name: size for name, size in every.items() if size}


@dataclass(frozen=True, kw_only=True)
class Communication(Parts):
    """Bytes that a rank sends in a step, at most: with ring algorithms, and all iterations of the search.

    ``gradients``: of the weights, and with sharded layouts the weights; ``heads``: outputs of layers that
    ranks compute together, and their gradients; ``sequences``: keys and values, and states of scans.
    """

    gradients: int
    heads: int
    sequences: int


def saved_parameters(model: LanguageModelSpec, ranks: int) -> int:
    """Return the number of parameters that a rank lacks if ``ranks`` divide the model."""
    if ranks == 1:
        return 0
    saved = 0
    for stack in model.stacks.values():
        for part in stack.parts:
            plan = part.tensor_plan(stack.d_model)
            shapes = part.parameter_shapes(stack.d_model)
            if plan is not None and shapes is not None:
                saved += _saved(plan, shapes, ranks, weight_norm=model.weight_norm)
    if isinstance(model, ImplicitLMSpec) and (projected := model.injection_table_width):
        shapes = model.injection.parameter_shapes(model.d_model, model.core_width, projected)
        first = model.core.layers[0].mixer.tensor_plan(model.core_width)
        if shapes is not None and first is not None:
            plan = TensorPlan(rows("proj", *first.injected, bias=True), ("proj",), ())
            saved += _saved(plan, shapes, ranks, weight_norm=model.weight_norm)
    return saved


def saved_weights(part: MixerSpec | MLPSpec, d_model: int, ranks: int) -> int:
    """Return the number of weights of a layer that a rank does not store because the layer is divided."""
    plan, shapes = part.tensor_plan(d_model), part.parameter_shapes(d_model)
    if ranks == 1 or plan is None or shapes is None:
        return 0
    return _saved(plan, shapes, ranks, weight_norm=False)


def _saved(plan: TensorPlan, shapes: dict[str, tuple[int, ...]], ranks: int, *, weight_norm: bool) -> int:
    saved = 0
    for name, divided in plan.parameters.items():
        shape = shapes[name]
        missing = shape[divided.dim] - divided.local_size(ranks)
        saved += missing * math.prod(shape) // shape[divided.dim]
        if weight_norm and divided.dim == 0 and is_weight_normed(name, shape):
            saved += missing  # the gains of the rows
    return saved


def passed_per_token(part: MixerSpec | MLPSpec, d_model: int, resolved: ResolvedLayout, width: int) -> float:
    """Return the bytes per token that a mixer passes to the ranks with later tokens, such as keys and values.

    ``width``: bytes per value.
    """
    if resolved.context == 1 or not isinstance(part, MixerSpec):
        return 0.0
    states = [part.state_bytes(d_model, tokens=tokens, itemsize=width) for tokens in (0, 1)]
    if states[0] is None or states[1] is None:
        return 0.0
    return (states[1] - states[0]) / resolved.tensor


def estimate_communication(phase: Phase, resolved: ResolvedLayout, *, ranks: int) -> Communication | None:
    """Return the bytes that a rank sends in a step of ``phase``; None if the model's size is unknown."""
    model, counts = phase.model, count_parameters(phase.model)
    if counts is None or counts.total is None or not isinstance(model, LanguageModelSpec):
        return None
    sequences = phase.training.share(phase.training.distributed.batch_shares(ranks))
    tokens = sequences * phase.data.seq_len / resolved.context
    width = 2 if phase.training.precision == "bfloat16" else _FLOAT32
    heads = between = 0.0
    for stack, forward, backward in _calls(phase, model):
        heads += tokens * _of_heads(stack, resolved, width, forward, backward)
        for part in stack.parts:
            passed = tokens * passed_per_token(part, stack.d_model, resolved, width)
            if resolved.context > 1 and isinstance(part, MixerSpec):
                fixed = part.state_bytes(stack.d_model, tokens=0, itemsize=width)
                passed += sequences * (fixed or 0) / resolved.tensor
            between += (resolved.context - 1) * passed * (forward + backward)
    own = counts.total - saved_parameters(model, resolved.tensor)
    return Communication(
        gradients=round(_of_gradients(own, resolved, ranks)), heads=round(heads), sequences=round(between)
    )


def _of_heads(stack: Stack, resolved: ResolvedLayout, width: int, forward: float, backward: float) -> float:
    """Return the bytes per token of the sums over ranks that divide heads."""
    if resolved.tensor == 1:
        return 0.0
    plans = [plan for part in stack.parts if (plan := part.tensor_plan(stack.d_model)) is not None]
    outputs = sum(len(plan.writes) for plan in plans) * width * forward
    inputs = sum(len(plan.reads) for plan in plans) * _FLOAT32 * backward
    return 2 * (resolved.tensor - 1) / resolved.tensor * stack.d_model * (outputs + inputs)


def _of_gradients(parameters: int, resolved: ResolvedLayout, ranks: int) -> float:
    """Return the bytes of gradients, and of weights that are gathered, over the ranks with other tokens."""
    replicas = ranks // resolved.tensor
    size, shards = _FLOAT32 * parameters, resolved.shards
    within = 2 * (shards - 1) / shards * size
    groups = replicas // shards
    return within + 2 * (groups - 1) / groups * size / shards


def _calls(phase: Phase, model: LanguageModelSpec) -> Iterator[tuple[Stack, float, float]]:
    """Yield each stack with its forward and backward calls in a step; recomputations are forward calls."""
    again = phase.training.checkpoint_activations != "none"
    for name, stack in model.stacks.items():
        forward = backward = 1.0
        if name == "core" and isinstance(model, ImplicitLMSpec):
            loops = most_loops(model)
            backward = float(model.gradient.differentiated_calls_of(loops))
            forward = loops + backward if model.gradient.searches else max(float(loops), backward)
        yield stack, forward + (backward if again else 0.0), backward
