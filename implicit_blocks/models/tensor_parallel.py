"""Dividing a language model's layers among ranks (``implicit_blocks.parallel.tensor``)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from implicit_blocks.injections.projection import Projection
from implicit_blocks.models.parts import ModelParts
from implicit_blocks.parallel.tensor import LocalPart, divide
from implicit_blocks.specs import ImplicitLMSpec
from implicit_blocks.specs.tensor_plan import TensorPlan, injection_plan


def divide_model(model: ModelParts, group: dist.ProcessGroup) -> dict[str, LocalPart]:
    """Divide the mixers and MLPs of a model, which has the same weights on all ranks of ``group``.

    Embedding, head, norms and what enters the core besides the mixers' injection are the same on all ranks.
    Components must have plans, and an injection into the mixers must be a projection with one division, which
    a run's spec checks. Returns the parts of the divided parameters, by name.
    """
    parts: dict[str, LocalPart] = {}
    names = {id(module): name for name, module in model.named_modules()}
    plans: list[TensorPlan] = []
    for stack, layout in zip(model.stacks(), model.spec.stacks.values(), strict=True):
        for block, layer in zip(stack.blocks(), layout.layers, strict=True):
            parts_of_layer: list[tuple[Any, Any]] = [(block.mixer, layer.mixer), (block.mlp, layer.mlp)]
            for component, part in parts_of_layer:
                if component is None or part is None:
                    continue
                plan = part.tensor_plan(layout.d_model)
                assert plan is not None, f"{part.family} {part.kind!r} has no tensor plan"
                found = divide(component, plan, group)
                parts |= {f"{names[id(component)]}.{name}": local for name, local in found.items()}
                if stack is model.backbone and component is block.mixer:
                    plans.append(plan)
    injection = model.injection
    spec = model.spec
    if injection is None or not isinstance(spec, ImplicitLMSpec) or not spec.injection.adds_to_projections:
        return parts
    assert isinstance(injection, Projection)
    found = divide(injection, injection_plan(plans[0].injected), group)
    return parts | {f"{names[id(injection)]}.{name}": part for name, part in found.items()}
