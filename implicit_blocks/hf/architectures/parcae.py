"""Parcae (2604.12946): prelude, a core looped a random number of times with a stable injection, and coda.

Format of https://github.com/sandyresearch/parcae, parcae_lm/models/parcae.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from implicit_blocks.hf.architectures.attractor import write_common
from implicit_blocks.hf.architectures.base import Architecture, Reading
from implicit_blocks.hf.architectures.blocks import Blocks, Common, read_common
from implicit_blocks.hf.architectures.fields import PublishedFields
from implicit_blocks.hf.architectures.tensor_map import Rule, TensorMap, Unused, rename, zeros
from implicit_blocks.specs import ImplicitLMSpec

GATE_CHANNELS = 32
_INJECTIONS = {"diagonal": "diagonal", "linear": "concat", "add": "add"}
_PARTS = ("prelude", "core", "coda")


class ParcaeFormat(Architecture):
    """``z ← core(inject(z, e))`` with a core that may have another width, then ``C z`` and the coda."""

    name = "parcae"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Recognize the class, or the fields that only this format has."""
        named = config.get("model_class_name", config.get("architecture_class_name"))
        return named == "Parcae" or (
            "injection_type" in config and "num_attention_heads" in config and "n_heads" not in config
        )

    def read(self, config: Mapping[str, Any]) -> Reading:
        """Return the spec; evaluation takes ``mean_recurrence`` loops, instead of a random number."""
        fields = PublishedFields(config, name="Parcae")
        common = read_common(fields, tied=False)
        fields.ignore(dict.fromkeys(("lockstep_n", "lockstep_k"), "seeds of the published sampler"))
        fields.ignore({"_is_recurrent_block_config": "marks the derived configuration of the core"})
        counts = {
            "prelude": fields.layers("n_layers_in_prelude", 1, minimum=0),
            "core": fields.layers("n_layers_in_recurrent_block", 4),
            "coda": fields.layers("n_layers_in_coda", 1, minimum=0),
        }
        core = _core_blocks(fields, common)
        injection = _INJECTIONS[fields.choice("injection_type", "diagonal", *_INJECTIONS)]
        if injection == "add" and core.width != common.blocks.width:
            fields.complain(
                "injection_type", f"the core's width {core.width} must be n_embd {common.blocks.width}"
            )
        prelude_norm = fields.flag("prelude_norm", False)
        mean, backprop = fields.integer("mean_recurrence", 32), fields.integer("mean_backprop_depth", 8)
        slots = ValueSlots(counts["prelude"], counts["core"], counts["coda"], mean, backprop)
        if (
            any(slots.live("core"))
            and core.kv_heads * core.head_dim != common.blocks.kv_heads * common.blocks.head_dim
        ):
            fields.complain(
                "recurrent_embedding_dimension",
                "layers of the core read value embeddings of another width; the published code fails",
            )
        start = _start(fields, common)
        training, remarks = _training(fields, mean, backprop)
        fields.check()
        rows = common.padded_vocab_size
        spec = common.spec_fields() | {
            "n_layers": counts["core"],
            "mixer": core.mixer(),
            "mlp": core.mlp(),
            "layers": _pattern(core, slots.live("core"), rows),
            "prelude": _stack(common.blocks, slots.live("prelude"), rows),
            "coda": _stack(common.blocks, slots.live("coda"), rows),
            "core_d_model": None if core.width == common.blocks.width else core.width,
            "core_projection": True,
            "core_projection_bias": common.blocks.bias,
            "prelude_norm": prelude_norm,
            "injection": {"kind": injection}
            | ({"bias": common.blocks.bias} if injection == "concat" else {}),
            "z_init": start,
            "state_policy": "per_loop",
            "at_evaluation": {
                "exit": {"kind": "fixed", "loops": mean},
                "solver": {"kind": "picard", "damping": 1.0},
            },
            **training,
        }
        tensors = _tensors(common, core, counts, slots, injection, prelude_norm=prelude_norm)
        extra = {"max_position_embeddings": common.block_size}
        return Reading(spec, tensors, (*remarks, *tensors.remarks), extra)

    def describes(self, spec: ImplicitLMSpec) -> bool:
        """Return whether a linear map follows a core without norm, with one of the format's injections."""
        return spec.core_projection and spec.injection.kind in _INJECTIONS.values()

    def write(self, spec: ImplicitLMSpec) -> dict[str, Any]:
        """Return the configuration; which layers have value embeddings must follow the published rule."""
        config = write_common(spec, "Parcae")
        if config.pop("causal") is False:
            raise ValueError("the mixer is bidirectional")
        core = spec.core.layers[0]
        names = {ours: theirs for theirs, ours in _INJECTIONS.items()}
        depth, exit_ = spec.depth.model_dump(), spec.at_evaluation.exit.model_dump()
        mean = int(depth.get("mean", depth.get("loops", exit_.get("loops", 8))))
        start = _written_start(spec)
        return config | {
            "injection_type": names[spec.injection.kind],
            "n_layers_in_prelude": 0 if spec.prelude is None else spec.prelude.n_layers,
            "n_layers_in_recurrent_block": spec.n_layers,
            "n_layers_in_coda": 0 if spec.coda is None else spec.coda.n_layers,
            "state_init": start,
            "recurrent_embedding_dimension": spec.core_width,
            "recurrent_intermediation_embedding_dimension": 0
            if core.mlp is None
            else core.mlp.model_dump()["d_ff"],
            "recurrent_num_attention_heads": core.mixer.model_dump()["n_heads"],
            "prelude_norm": spec.prelude_norm,
            "sampling_scheme": "fixed" if depth["kind"] == "fixed" else "poisson-truncated-full",
            "mean_recurrence": mean,
            "mean_backprop_depth": spec.gradient.model_dump().get("loops") or mean,
            "recurrent_iteration_method": f"per-{depth.get('per', 'batch')}",
        }


@dataclass(frozen=True)
class ValueSlots:
    """Which layers read value embeddings: those for which the format has both a table and a gate.

    A table exists by the parity of a layer's place, a gate by the parity of a layer number that also depends
    on ``mean_recurrence`` and ``mean_backprop_depth``. A table without gate, or a gate without table, is
    stored but never read.

    Args:
        prelude: number of its layers.
        core: number of its layers.
        coda: number of its layers.
        mean_recurrence: mean number of loops.
        mean_backprop_depth: number of differentiated loops.

    """

    prelude: int
    core: int
    coda: int
    mean_recurrence: int
    mean_backprop_depth: int

    def places(self, part: str) -> range:
        """Return the places of a part's layers, which number the tables."""
        first = {"prelude": 0, "core": self.prelude, "coda": self.prelude + self.core}[part]
        return range(first, first + {"prelude": self.prelude, "core": self.core, "coda": self.coda}[part])

    def has_table(self, place: int) -> bool:
        """Return whether a table is stored for a place."""
        return place % 2 == (self.prelude + self.core + self.coda - 1) % 2

    def has_gate(self, part: str, layer: int) -> bool:
        """Return whether a layer of a part has a gate."""
        skipped = self.core * (self.mean_recurrence - 1) if part == "coda" else 0
        number = self.places(part)[layer] + skipped
        return number % 2 == (self.core * self.mean_backprop_depth - 1) % 2

    def live(self, part: str) -> list[bool]:
        """Return for each layer of a part whether it reads value embeddings."""
        places = self.places(part)
        return [self.has_table(place) and self.has_gate(part, layer) for layer, place in enumerate(places)]


def _core_blocks(fields: PublishedFields, common: Common) -> Blocks:
    blocks = common.blocks
    width = fields.integer("recurrent_embedding_dimension", 1024)
    heads = fields.integer("recurrent_num_attention_heads", blocks.heads)
    d_ff = fields.integer("recurrent_intermediation_embedding_dimension", 3520)
    if width % heads or width // heads != blocks.head_dim:
        fields.complain(
            "recurrent_embedding_dimension",
            f"its {heads} heads must have width {blocks.head_dim}, as the others, whose rotations they share",
        )
    return blocks.of_core(width=width, heads=heads, d_ff=d_ff)


def _start(fields: PublishedFields, common: Common) -> dict[str, Any]:
    """Return the initial state, which the published code draws anew in every call."""
    kind = fields.choice("state_init", "like-init", "like-init", "normal", "embed", "zero")
    scales = common.scales
    normal: dict[str, dict[str, Any]] = {
        "like-init": {"std": scales.embedding_std * scales.embedding_scale, "truncation": 3.0},
        "normal": {"std": 1.0},
        "embed": {"std": 1 / sqrt(common.blocks.width)},
    }
    return {"kind": "zeros"} if kind == "zero" else {"kind": "normal", **normal[kind]}


def _written_start(spec: ImplicitLMSpec) -> str:
    start = spec.start.model_dump()
    if start["kind"] == "zeros":
        return "zero"
    if start["kind"] != "normal":
        raise ValueError(f"z_init is {start['kind']!r}; the format has 'zeros' and 'normal'")
    if start["truncation"] is not None:
        return "like-init"
    return "normal" if start["std"] == 1 else "embed"


def _training(fields: PublishedFields, mean: int, backprop: int) -> tuple[dict[str, Any], list[str]]:
    """Return the depth and the gradient, and the published settings that they do not express."""
    scheme = fields.take("sampling_scheme", "poisson-truncated-full")
    method = fields.choice(
        "recurrent_iteration_method", "per-batch", "per-batch", "per-sequence", "per-token"
    )
    fields.choice("curriculum_target", "forward", "forward", "backward", "both")
    known = re.fullmatch(
        r"(poisson-(?:unbounded|fill|truncated-full|full|bounded)|fixed)(-curriculum-(?:sqrt-)?\d+)?",
        str(scheme),
    )
    if known is None:
        fields.complain("sampling_scheme", "unknown scheme")
        return {}, []
    base, curriculum = known.groups()
    remarks = []
    if curriculum is not None:
        remarks.append(f"the curriculum of sampling_scheme {scheme!r} is not part of the spec")
    if method == "per-token":
        remarks.append("depths per token are drawn per sequence")
    per = "batch" if method == "per-batch" else "sequence"
    last: int | None = backprop
    depth: dict[str, Any] = {"kind": "poisson", "mean": float(mean), "minimum": 1, "per": per}
    if base == "fixed":
        depth = {"kind": "fixed", "loops": max(mean, backprop)}
    elif base == "poisson-full":
        last = None
    elif base != "poisson-truncated-full":
        remarks.append(f"sampling_scheme {scheme!r} is approximated by a Poisson number of loops in total")
        depth["minimum"] = backprop
    return {"depth": depth, "gradient": {"kind": "last_loops", "loops": last}}, remarks


def _pattern(blocks: Blocks, live: list[bool], rows: int) -> list[dict[str, Any]]:
    """Return a pattern with one entry per layer where layers differ; else an empty one."""
    if not any(live):
        return []
    return [{"mixer": blocks.mixer(rows if reads else None)} for reads in live]


def _stack(blocks: Blocks, live: list[bool], rows: int) -> dict[str, Any] | None:
    if not live:
        return None
    stack = {"n_layers": len(live), "mixer": blocks.mixer(), "mlp": blocks.mlp()}
    return stack | {"layers": _pattern(blocks, live, rows)}


def _tensors(
    common: Common,
    core: Blocks,
    counts: Mapping[str, int],
    slots: ValueSlots,
    injection: str,
    *,
    prelude_norm: bool,
) -> TensorMap:
    rules, unused = common.rules(), [common.rotations]
    bias = ("weight", "bias") if common.blocks.bias else ("weight",)
    rules += [rename(f"core_projection.{kind}", f"transformer.C.{kind}") for kind in bias]
    if prelude_norm:
        rules.append(rename("prelude_norm.weight", "transformer.ln_prelude.weight"))
    if injection == "diagonal":
        rules += [rename(f"injection.{name}", f"transformer.adapter.{name}") for name in ("A_log", "dt_bias")]
        rules.append(rename("injection.proj.weight", "transformer.adapter.B"))
    elif injection == "concat":
        rules += [rename(f"injection.proj.{kind}", f"transformer.adapter.adapter.{kind}") for kind in bias]
    parts = {"prelude": "prelude", "core": "core_block", "coda": "coda"}
    for part in _PARTS:
        blocks = core if part == "core" else common.blocks
        for layer, place in enumerate(slots.places(part)):
            ours = f"{'backbone' if part == 'core' else part}.layers.{layer}"
            theirs = f"transformer.{parts[part]}.{layer}"
            rules += blocks.rules(ours, theirs)
            more, dead = _value_embedding(common, blocks, slots, part, layer, place, ours, theirs)
            rules += more
            unused += dead
    return TensorMap(tuple(rules), common.copies, tuple(unused))


def _value_embedding(
    common: Common,
    blocks: Blocks,
    slots: ValueSlots,
    part: str,
    layer: int,
    place: int,
    ours: str,
    theirs: str,
) -> tuple[list[Rule], list[Unused]]:
    """Return the rules of a layer's table and gate, and those of the two that are stored but not read."""
    table, gate = f"value_embeds.{place}.weight", f"{theirs}.attn.ve_gate.weight"
    has_table, has_gate = slots.has_table(place), slots.has_gate(part, layer)
    if has_table and has_gate:
        mixer = f"{ours}.mixer"
        return [
            rename(f"{mixer}.value_embedding.weight", table),
            rename(f"{mixer}.value_gate.weight", gate),
        ], []
    if has_table:
        shape = common.padded_vocab_size, common.blocks.kv_heads * common.blocks.head_dim
        return [], [Unused(table, zeros(*shape), f"layer {layer} of the {part} has no gate for it")]
    if has_gate:
        shape = blocks.kv_heads, GATE_CHANNELS
        return [], [
            Unused(
                gate, zeros(*shape), f"there is no table of value embeddings for layer {layer} of the {part}"
            )
        ]
    return [], []
