"""The trainer's kinds, registered through the library's plugin hook. Imports no torch."""

from __future__ import annotations

from implicit_blocks.hookspecs import Add, hookimpl
from trainer import spec


@hookimpl
def register_components(add: Add) -> None:
    """Register the run spec, models of transformers, data sources, optimizers, schedules and callbacks."""
    add("run", spec.RunSpec, "trainer.run:build")
    add("model", spec.TransformersSpec, "trainer.transformers_model:TransformersLM")
    add("data", spec.WordProblemSpec, "trainer.data.word_problem:build")
    add("data", spec.TokensSpec, "trainer.data.tokens:build")
    add("optimizer", spec.AdamWSpec, "trainer.optimizers:build_adamw")
    add("schedule", spec.WarmupConstantSqrtSpec, "trainer.schedule:build_warmup_constant_sqrt")
    add("schedule", spec.WarmupLinearSpec, "trainer.schedule:build_warmup_linear")
    add("callback", spec.StopWhenSpec, "trainer.callbacks.stop_when:StopWhen")
