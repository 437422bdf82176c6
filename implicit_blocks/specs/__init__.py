"""Specs: what to build, as data. Importing them imports no torch."""

from implicit_blocks.specs.base import ComponentSpec, Spec
from implicit_blocks.specs.errors import field_error, merge_errors
from implicit_blocks.specs.gradients import (
    GradientSpec,
    ImplicitFunctionSpec,
    JacobianPenaltySpec,
    PhantomSpec,
    UnrolledSpec,
)
from implicit_blocks.specs.hybrid import HybridSpec
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
    "HybridSpec",
    "ImplicitFunctionSpec",
    "ImplicitLMSpec",
    "JacobianPenaltySpec",
    "LanguageModelSpec",
    "MLPSpec",
    "Mamba2Spec",
    "MixerSpec",
    "ModelSpec",
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
    "field_error",
    "load_spec",
    "merge",
    "merge_errors",
    "resolve",
    "spec_name",
    "zoo_names",
]
