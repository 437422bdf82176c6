"""Specs: what to build, as data. Importing them imports no torch."""

from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.errors import refusal, together
from implicit_blocks.specs.gradients import (
    GradientSpec,
    ImplicitFunctionSpec,
    JacobianPenaltySpec,
    PhantomSpec,
    UnrolledSpec,
)
from implicit_blocks.specs.hybrid import ParallelSpec
from implicit_blocks.specs.layers import (
    AttentionSpec,
    Mamba2Spec,
    MixerSpec,
    MLPSpec,
    Parameters,
    RopeScaling,
    SwiGLUSpec,
)
from implicit_blocks.specs.loading import load_spec, resolve, spec_name, zoo_names
from implicit_blocks.specs.merging import merge
from implicit_blocks.specs.model import (
    AtEvaluation,
    ExplicitLMSpec,
    ImplicitLMSpec,
    LanguageModelSpec,
    ModelSpec,
)
from implicit_blocks.specs.run import BaseRunSpec
from implicit_blocks.specs.solvers import (
    AndersonSpec,
    BroydenSpec,
    PatientPicardSpec,
    PicardSpec,
    SolverSpec,
    Stopping,
    StoppingOverrides,
)
from implicit_blocks.specs.tree import SpecError

__all__ = [
    "AndersonSpec",
    "AtEvaluation",
    "AttentionSpec",
    "BaseRunSpec",
    "BroydenSpec",
    "ComponentSpec",
    "ExplicitLMSpec",
    "GradientSpec",
    "ImplicitFunctionSpec",
    "ImplicitLMSpec",
    "JacobianPenaltySpec",
    "LanguageModelSpec",
    "MLPSpec",
    "Mamba2Spec",
    "MixerSpec",
    "ModelSpec",
    "ParallelSpec",
    "Parameters",
    "PatientPicardSpec",
    "PhantomSpec",
    "PicardSpec",
    "RopeScaling",
    "SolverSpec",
    "Spec",
    "SpecError",
    "Stopping",
    "StoppingOverrides",
    "SwiGLUSpec",
    "UnrolledSpec",
    "load_spec",
    "merge",
    "refusal",
    "resolve",
    "spec_name",
    "together",
    "zoo_names",
]
