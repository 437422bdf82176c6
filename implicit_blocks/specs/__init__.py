"""Specs: what to build, as data. Importing them imports no torch."""

from implicit_blocks.specs.base import ComponentSpec, Spec, refusal, together
from implicit_blocks.specs.gradients import GradientSpec, ImplicitFunctionSpec, PhantomSpec, UnrolledSpec
from implicit_blocks.specs.layers import AttentionSpec, Mamba2Spec, MixerSpec, MLPSpec, Parameters, SwiGLUSpec
from implicit_blocks.specs.merging import merge
from implicit_blocks.specs.model import (
    AtEvaluation,
    ExplicitLMSpec,
    ImplicitLMSpec,
    LanguageModelSpec,
    ModelSpec,
)
from implicit_blocks.specs.run import BaseRunSpec
from implicit_blocks.specs.solvers import AndersonSpec, PicardSpec, SolverSpec, Stopping, StoppingOverrides

__all__ = [
    "AndersonSpec",
    "AtEvaluation",
    "AttentionSpec",
    "BaseRunSpec",
    "ComponentSpec",
    "ExplicitLMSpec",
    "GradientSpec",
    "ImplicitFunctionSpec",
    "ImplicitLMSpec",
    "LanguageModelSpec",
    "MLPSpec",
    "Mamba2Spec",
    "MixerSpec",
    "ModelSpec",
    "Parameters",
    "PhantomSpec",
    "PicardSpec",
    "SolverSpec",
    "Spec",
    "Stopping",
    "StoppingOverrides",
    "SwiGLUSpec",
    "UnrolledSpec",
    "merge",
    "refusal",
    "together",
]
