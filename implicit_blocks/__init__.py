"""Implicit sequence models: fixed points of state-space and attention layers, made of interchangeable parts.

Names are imported when first used, so that specs can be read and checked without importing torch.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from implicit_blocks.checkpoints.load_model import load_model
    from implicit_blocks.decoding import Generated, Scored, generate, score, stream
    from implicit_blocks.fixed_point import FixedPoint, solve_fixed_point
    from implicit_blocks.gradients import ImplicitFunction, JacobianPenalty, Phantom, Unrolled, jacobian_free
    from implicit_blocks.interfaces import (
        GradientEstimator,
        Map,
        Mixer,
        RowMap,
        SearchLike,
        SequenceMap,
        Solver,
        SteppingMap,
        Window,
    )
    from implicit_blocks.mixers import Attention, Hybrid, Mamba2
    from implicit_blocks.models.explicit import ExplicitLM
    from implicit_blocks.models.implicit import ImplicitLM
    from implicit_blocks.models.outputs import LMOutput
    from implicit_blocks.registry import build
    from implicit_blocks.registry.hooks import hookimpl
    from implicit_blocks.search.convergence_watch import ConvergenceWarning
    from implicit_blocks.search.search import Search
    from implicit_blocks.solution import Adjoint, Solution
    from implicit_blocks.solvers import Anderson, Broyden, PatientPicard, Picard
    from implicit_blocks.specs import (
        AndersonSpec,
        AtEvaluation,
        AttentionSpec,
        BroydenSpec,
        ComponentSpec,
        ExplicitLMSpec,
        GradientSpec,
        HybridSpec,
        ImplicitFunctionSpec,
        ImplicitLMSpec,
        JacobianPenaltySpec,
        Mamba2Spec,
        MixerSpec,
        MLPSpec,
        ModelSpec,
        PatientPicardSpec,
        PhantomSpec,
        PicardSpec,
        SolverSpec,
        Stopping,
        StoppingOverrides,
        SwiGLUSpec,
        UnrolledSpec,
        load_spec,
    )

_HOMES = {
    "search.convergence_watch": ["ConvergenceWarning"],
    "decoding": ["Generated", "Scored", "generate", "score", "stream"],
    "search.search": ["Search"],
    "fixed_point": ["FixedPoint", "solve_fixed_point"],
    "gradients": ["ImplicitFunction", "JacobianPenalty", "Phantom", "Unrolled", "jacobian_free"],
    "registry.hooks": ["hookimpl"],
    "interfaces": [
        "GradientEstimator",
        "Map",
        "Mixer",
        "RowMap",
        "SearchLike",
        "SequenceMap",
        "Solver",
        "SteppingMap",
        "Window",
    ],
    "mixers": ["Attention", "Mamba2", "Hybrid"],
    "models.explicit": ["ExplicitLM"],
    "models.implicit": ["ImplicitLM"],
    "models.outputs": ["LMOutput"],
    "registry": ["build"],
    "checkpoints.load_model": ["load_model"],
    "solution": ["Adjoint", "Solution"],
    "solvers": ["Anderson", "Broyden", "PatientPicard", "Picard"],
    "specs": [
        "AndersonSpec",
        "AtEvaluation",
        "AttentionSpec",
        "BroydenSpec",
        "ComponentSpec",
        "ExplicitLMSpec",
        "GradientSpec",
        "ImplicitFunctionSpec",
        "ImplicitLMSpec",
        "JacobianPenaltySpec",
        "MLPSpec",
        "Mamba2Spec",
        "MixerSpec",
        "ModelSpec",
        "HybridSpec",
        "PatientPicardSpec",
        "PhantomSpec",
        "PicardSpec",
        "SolverSpec",
        "Stopping",
        "StoppingOverrides",
        "SwiGLUSpec",
        "UnrolledSpec",
        "load_spec",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adjoint",
    "Anderson",
    "AndersonSpec",
    "AtEvaluation",
    "Attention",
    "AttentionSpec",
    "Broyden",
    "BroydenSpec",
    "ComponentSpec",
    "ConvergenceWarning",
    "ExplicitLM",
    "ExplicitLMSpec",
    "FixedPoint",
    "Generated",
    "GradientEstimator",
    "GradientSpec",
    "Hybrid",
    "HybridSpec",
    "ImplicitFunction",
    "ImplicitFunctionSpec",
    "ImplicitLM",
    "ImplicitLMSpec",
    "JacobianPenalty",
    "JacobianPenaltySpec",
    "LMOutput",
    "MLPSpec",
    "Mamba2",
    "Mamba2Spec",
    "Map",
    "Mixer",
    "MixerSpec",
    "ModelSpec",
    "PatientPicard",
    "PatientPicardSpec",
    "Phantom",
    "PhantomSpec",
    "Picard",
    "PicardSpec",
    "RowMap",
    "Scored",
    "Search",
    "SearchLike",
    "SequenceMap",
    "Solution",
    "Solver",
    "SolverSpec",
    "SteppingMap",
    "Stopping",
    "StoppingOverrides",
    "SwiGLUSpec",
    "Unrolled",
    "UnrolledSpec",
    "Window",
    "build",
    "generate",
    "hookimpl",
    "jacobian_free",
    "load_model",
    "load_spec",
    "score",
    "solve_fixed_point",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME_OF:
        # By name and obj Python finds the nearest of the names that there are, and says so.
        raise AttributeError(
            f"module 'implicit_blocks' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(import_module(f"implicit_blocks.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def _version() -> str:
    """Return the version of the distribution; of files that were never installed it is not known."""
    try:
        return metadata.version("implicit_blocks")
    except metadata.PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
