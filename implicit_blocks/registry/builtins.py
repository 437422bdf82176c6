"""The library's own kinds, registered through the hook that third parties use.

Builders are import strings, so that knowing the kinds imports no torch.
"""

from __future__ import annotations

from implicit_blocks import specs
from implicit_blocks.registry.hooks import Add, hookimpl


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in kinds."""
    add("solver", specs.PicardSpec, "implicit_blocks.solvers.picard:Picard.from_spec")
    add("solver", specs.PatientPicardSpec, "implicit_blocks.solvers.patient_picard:PatientPicard.from_spec")
    add("solver", specs.AndersonSpec, "implicit_blocks.solvers.anderson:Anderson.from_spec")
    add("solver", specs.BroydenSpec, "implicit_blocks.solvers.broyden:Broyden.from_spec")

    add("gradient", specs.PhantomSpec, "implicit_blocks.gradients.phantom:Phantom.from_spec")
    add("gradient", specs.UnrolledSpec, "implicit_blocks.gradients.unrolled:Unrolled.from_spec")
    add(
        "gradient",
        specs.ImplicitFunctionSpec,
        "implicit_blocks.gradients.implicit_function:ImplicitFunction.from_spec",
    )
    add(
        "gradient",
        specs.JacobianPenaltySpec,
        "implicit_blocks.gradients.jacobian_penalty:JacobianPenalty.from_spec",
    )

    add("mixer", specs.Mamba2Spec, "implicit_blocks.mixers.mamba2.mixer:Mamba2")
    add("mixer", specs.AttentionSpec, "implicit_blocks.mixers.attention.mixer:Attention")
    add("mixer", specs.HybridSpec, "implicit_blocks.mixers.hybrid:Hybrid")
    add("mlp", specs.SwiGLUSpec, "implicit_blocks.layers:SwiGLU")

    add("model", specs.ImplicitLMSpec, "implicit_blocks.models.implicit:ImplicitLM")
    add("model", specs.ExplicitLMSpec, "implicit_blocks.models.explicit:ExplicitLM")
