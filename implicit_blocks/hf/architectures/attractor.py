"""Attractor (2605.12466): a prelude, and a small core iterated to a fixed point, with bounded residual gates.

Format of https://github.com/jacobfa/Attractor, attractor/models/attractor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks.hf.architectures.base import Architecture, Reading
from implicit_blocks.hf.architectures.blocks import FLOAT32_EPS, Common, mlp_fields, read_common
from implicit_blocks.hf.architectures.fields import PublishedFields
from implicit_blocks.hf.architectures.scales import strategy_of
from implicit_blocks.hf.architectures.tensor_map import TensorMap, rename
from implicit_blocks.specs import AttentionSpec, ImplicitLMSpec

_CLASSES = ("Attractor", "EQLM")


class AttractorFormat(Architecture):
    """``z ← core(z + e) − z`` from ``z = e``, the prelude's output; no coda."""

    name = "attractor"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Recognize the class, or the numbers of layers that only this format has."""
        named = config.get("model_class_name", config.get("architecture_class_name"))
        return named in _CLASSES or "n_fp_blocks" in config

    def read(self, config: Mapping[str, Any]) -> Reading:
        """Return the spec, with our causal search in place of the published one."""
        fields = PublishedFields(config, name="Attractor")
        common = read_common(fields, tied=True)
        prelude, core = fields.layers("n_backbone_layers", 6, minimum=0), fields.layers("n_fp_blocks", 1)
        fields.ignore(dict.fromkeys(("fp_lr_scale", "fp_wd"), "an option of the published optimizer"))
        width = fields.integer("recurrent_embedding_dimension", common.blocks.width)
        if width != common.blocks.width:
            fields.complain("recurrent_embedding_dimension", f"expected n_embd, {common.blocks.width}")
        gamma, maximum = fields.optional_number("layer_scale_init", 0.25), fields.number("gamma_max", 1.0)
        search = read_search(fields)
        fields.check()
        blocks = common.blocks
        scaling: dict[str, Any] = {"kind": "none"}
        if gamma is not None:  # the published code keeps the initial gate below its bound in the same way
            scaling = {"kind": "bounded_gate", "maximum": maximum, "init": min(gamma, maximum * (1 - 1e-6))}
        spec = {
            **common.spec_fields(),
            "n_layers": core,
            "mixer": blocks.mixer(),
            "mlp": blocks.mlp(),
            "prelude": {"n_layers": prelude, "residual_scaling": {"kind": "none"}} if prelude else None,
            "residual_scaling": scaling,
            "injection": {"kind": "attractor"},
            **search,
        }
        return Reading(
            spec, _tensors(common, prelude, core, gated=gamma is not None), _remarks(config), _extra(common)
        )

    def describes(self, spec: ImplicitLMSpec) -> bool:
        """Return whether the injection is Attractor's."""
        return spec.injection.kind == "attractor"

    def write(self, spec: ImplicitLMSpec) -> dict[str, Any]:
        """Return the configuration, with the published search."""
        config = write_common(spec, "Attractor")
        scaling = spec.residual_scaling.model_dump()
        config |= {
            "n_backbone_layers": 0 if spec.prelude is None else spec.prelude.n_layers,
            "n_fp_blocks": spec.n_layers,
            "layer_scale_init": scaling.get("init"),
            "gamma_max": scaling.get("maximum", 1.0),
        }
        return config | _written_search(spec)


def read_search(fields: PublishedFields) -> dict[str, Any]:
    """Return the fields of solver, stopping and gradient."""
    solver = _solver(fields, fields.choice("solver", "anderson", "anderson", "fpi"))
    tolerance, most = fields.number("tol", 1e-3, or_zero=True), fields.integer("max_iter", 12)
    stopping = {"tolerance": tolerance, "max_iterations": most, "norm": "relative", "scope": "sequence"}
    fields.integer("min_iter", 0, minimum=0)
    backward = fields.choice("backward_type", "onestep", "onestep", "picard", "anderson")
    adjoint = {
        "tolerance": fields.number("backward_tol", tolerance, or_zero=True),
        "max_iterations": fields.integer("backward_max_iter", most),
    }
    fields.integer("backward_min_iter", 0, minimum=0)
    clip = fields.optional_number("adjoint_grad_clip", 1.0)
    gradient: dict[str, Any] = {"kind": "one_step_adjoint", "max_norm_ratio": clip}
    if backward != "onestep":
        name = "fpi" if backward == "picard" else "anderson"
        gradient = {"kind": "implicit_function", "solver": _solver(fields, name), "stopping": adjoint}
    return {
        "solver": solver,
        "stopping": stopping,
        "gradient": gradient,
        "at_evaluation": {"solver": solver, "stopping": {"max_iterations": most, "scope": "prefix"}},
    }


def _solver(fields: PublishedFields, name: str) -> dict[str, Any]:
    memory, beta = fields.integer("anderson_m", 5), fields.number("anderson_beta", 1.0)
    if beta > 1:
        fields.complain("anderson_beta", "expected at most 1")
    if name == "fpi":
        return {"kind": "picard", "damping": 1.0}
    return {"kind": "anderson", "memory": memory, "damping": min(beta, 1.0)}


def published_solver(config: Mapping[str, Any], *, backward: bool = False) -> dict[str, Any]:
    """Return the solver that reproduces the published search, for ``at_evaluation.solver`` or ``solver``.

    With it a token depends on later tokens and on the other rows of the batch; it needs the scope
    ``sequence``.

    Args:
        config: the published configuration.
        backward: return the solver of the adjoint equation instead.

    """
    if backward:
        plain = config.get("backward_type") == "picard"
        minimum = config.get("backward_min_iter", config.get("min_iter", 0))
    else:
        plain, minimum = config.get("solver", "anderson") == "fpi", config.get("min_iter", 0)
    return {
        "kind": "attractor_anderson",
        "memory": 1 if plain else config.get("anderson_m", 5),
        "beta": 1.0 if plain else config.get("anderson_beta", 1.0),
        "min_iterations": minimum or 0,
    }


def _tensors(common: Common, prelude: int, core: int, *, gated: bool) -> TensorMap:
    rules = common.rules()
    for i in range(prelude):
        rules += common.blocks.rules(f"prelude.layers.{i}", f"transformer.prelude.{i}")
    for i in range(core):
        ours, theirs = f"backbone.layers.{i}", f"transformer.core_block.{i}"
        rules += common.blocks.rules(ours, theirs)
        if gated:
            rules.append(rename(f"{ours}.mixer_scaling.raw_gamma", f"{theirs}.raw_gamma_attn"))
            rules.append(rename(f"{ours}.mlp_scaling.raw_gamma", f"{theirs}.raw_gamma_mlp"))
    return TensorMap(tuple(rules), common.copies, (common.rotations,))


def _remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    remarks = []
    if config.get("solver", "anderson") == "anderson":
        remarks.append(
            "the published Anderson search depends on later tokens and on the batch; the spec has our causal "
            "one, and solver 'attractor_anderson' with scope 'sequence' is the published one"
        )
    if config.get("min_iter"):
        remarks.append(f"min_iter {config['min_iter']} is not part of the spec: a search may end earlier")
    return tuple(remarks)


def _extra(common: Common) -> dict[str, Any]:
    return {"max_position_embeddings": common.block_size}


# ------------------------------------------------------------------------------------ writing


def write_common(spec: ImplicitLMSpec, model_class: str) -> dict[str, Any]:
    """Return the fields that Attractor and Parcae share.

    Raises:
        ValueError: the mixer, the MLP or the scales are not those of the format.

    """
    mixer = spec.stacks["prelude" if spec.prelude is not None else "core"].layers[0].mixer
    mlp = spec.stacks["prelude" if spec.prelude is not None else "core"].layers[0].mlp
    if not isinstance(mixer, AttentionSpec):
        raise ValueError(f"the mixer is {mixer.kind!r}; the format has attention only")
    if mixer.head_dim is not None and mixer.head_dim * mixer.n_heads != spec.d_model:
        raise ValueError(f"head_dim {mixer.head_dim} is not d_model / n_heads")
    if mixer.qk_norm == "weighted" or (mixer.qk_norm != "none" and mixer.qk_norm_eps != FLOAT32_EPS):
        raise ValueError("the format has a norm of q and k without weights, with the machine epsilon")
    scaling = mixer.rope_scaling
    if scaling is not None and scaling.rope_type != "linear":
        raise ValueError(f"rope_scaling is {scaling.rope_type!r}; the format has 'linear'")
    condense: float = 1 if scaling is None else scaling.factor
    return {
        "model_class_name": model_class,
        "block_size": 4096,
        "n_embd": spec.d_model,
        "num_attention_heads": mixer.n_heads,
        "num_key_value_heads": mixer.n_kv_heads or mixer.n_heads,
        **mlp_fields(mlp),
        "vocab_size": spec.vocab_size,
        "padding_multiple": spec.pad_vocab_to,
        "padded_vocab_size": spec.padded_vocab_size,
        "rope_settings": {
            "use_rope": True,
            "rope_condense_ratio": int(condense) if condense == int(condense) else condense,
            "rope_base": mixer.rope_theta,
        },
        "block_class_name": "TransformerPreNormBlock",
        "norm_class_name": "RMSNorm",
        "norm_eps": spec.norm_eps,
        "bias": mixer.bias is True,
        "qk_bias": mixer.bias == "qk",
        "clip_qkv": mixer.clip_qkv,
        "qk_norm": mixer.qk_norm == "unweighted",
        "causal": mixer.causal,
        "logit_softcap": spec.logit_softcap,
        "init_strategy": strategy_of(spec.embedding_scale, spec.logit_scale, spec.d_model),
        "use_fused_head": "pytorch",
        "tie_embeddings": spec.tie_embeddings,
    }


def _written_search(spec: ImplicitLMSpec) -> dict[str, Any]:
    """Return the fields of the search, as far as the format has them."""
    solver, gradient = spec.solver.model_dump(), spec.gradient.model_dump()
    found: dict[str, Any] = {
        "solver": "fpi" if solver["kind"] == "picard" else "anderson",
        "max_iter": spec.stopping.max_iterations,
        "min_iter": solver.get("min_iterations", 0),
        "tol": spec.stopping.tolerance,
        "anderson_m": solver.get("memory", 5),
        "anderson_beta": solver.get("beta", solver.get("damping", 1.0)),
        "backward_type": "onestep",
        "adjoint_grad_clip": gradient.get("max_norm_ratio"),
    }
    if gradient["kind"] == "implicit_function":
        stopping = gradient["stopping"]
        found["backward_type"] = "picard" if gradient["solver"]["kind"] == "picard" else "anderson"
        found |= {"backward_tol": stopping["tolerance"], "backward_max_iter": stopping["max_iterations"]}
    return found
