"""What Attractor and Parcae share: their transformer blocks, embedding and head, as fields and tensors.

Both codes descend from one (https://github.com/sandyresearch/parcae, parcae_lm/modules and models/config.py):
pre-norm blocks, rotations of adjacent channels, then an RMS norm of q and k without weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from implicit_blocks.hf.architectures.fields import PublishedFields
from implicit_blocks.hf.architectures.scales import STRATEGIES, Scales, scales_of
from implicit_blocks.hf.architectures.tensor_map import (
    Heads,
    Rule,
    Unused,
    rename,
    rotation_table,
    split_rows,
)

FLOAT32_EPS = 2.0**-23
"""Added to the mean square of q and k: the published norm adds the machine epsilon of its type."""

ACTIVATIONS = {"ReLU2": "half_relu2", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
"""Published names of activations, and ours. Their ReLU2 is half of the squared ReLU."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one width.

    Args:
        width: width of the stream.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        d_ff: hidden width of the MLP.
        gated: whether the MLP is gated.
        activation: our name of its activation.
        bias: whether the linear layers have biases.
        qk_bias: whether q and k have one more bias.
        rope_theta: base of the rotation.
        rope_condense: factor by which positions are divided.
        qk_norm: whether q and k are normed.
        clip_qkv: bound of q, k and v.
        causal: whether attention is causal.

    """

    width: int
    heads: int
    kv_heads: int
    d_ff: int
    gated: bool
    activation: str
    bias: bool
    qk_bias: bool
    rope_theta: float
    rope_condense: float
    qk_norm: bool
    clip_qkv: float | None
    causal: bool = True

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    def of_core(self, *, width: int, heads: int, d_ff: int) -> Blocks:
        """Return the blocks of a core of another width, which has as many key as query heads."""
        return replace(self, width=width, heads=heads, kv_heads=heads, d_ff=d_ff)

    def mixer(self, value_embeddings: int | None = None) -> dict[str, Any]:
        """Return the fields of the mixer; ``value_embeddings`` is the number of rows of its table."""
        condensed = None
        if self.rope_condense != 1:
            condensed = {"rope_type": "linear", "factor": self.rope_condense}
        return {
            "kind": "attention",
            "n_heads": self.heads,
            "n_kv_heads": None if self.kv_heads == self.heads else self.kv_heads,
            "rope_theta": self.rope_theta,
            "rope_scaling": condensed,
            "bias": True if self.bias else ("qk" if self.qk_bias else False),
            "qk_norm": "unweighted" if self.qk_norm else "none",
            "qk_norm_eps": FLOAT32_EPS if self.qk_norm else 1e-6,
            "clip_qkv": self.clip_qkv,
            "causal": self.causal,
            "value_embeddings": value_embeddings,
        }

    def mlp(self) -> dict[str, Any]:
        """Return the fields of the MLP."""
        if self.gated and self.activation == "silu":
            return {"kind": "swiglu", "d_ff": self.d_ff, "bias": self.bias}
        shape = {"d_ff": self.d_ff, "gated": self.gated, "bias": self.bias}
        return {"kind": "mlp", "activation": self.activation, **shape}

    def rules(self, ours: str, theirs: str) -> list[Rule]:
        """Return the rules of one block, without the gate of value embeddings and scalings."""
        heads = Heads(self.heads, self.kv_heads, self.head_dim)
        rules = [
            rename(f"{ours}.mixer_norm.weight", f"{theirs}.norm_1.weight"),
            rename(f"{ours}.mlp_norm.weight", f"{theirs}.norm_2.weight"),
        ]
        mixer, attn = f"{ours}.mixer", f"{theirs}.attn"
        projections = [f"{attn}.c_{part}" for part in "qkv"]
        for kind in ("weight", "bias") if self.bias else ("weight",):
            parts = [f"{projection}.{kind}" for projection in projections]
            if kind == "bias" and self.qk_bias:
                rules.append(heads.all_biases(f"{mixer}.in_proj.bias", parts, f"{attn}.qk_bias"))
            else:
                rules.append(heads.joined(f"{mixer}.in_proj.{kind}", parts))
            rules.append(rename(f"{mixer}.out_proj.{kind}", f"{attn}.c_proj.{kind}"))
            rules.append(rename(f"{ours}.mlp.out_proj.{kind}", f"{theirs}.mlp.proj.{kind}"))
            if self.gated:
                halves = [f"{ours}.mlp.gate_proj.{kind}", f"{ours}.mlp.up_proj.{kind}"]
                rules.append(split_rows(halves, f"{theirs}.mlp.fc.{kind}"))
            else:
                rules.append(rename(f"{ours}.mlp.in_proj.{kind}", f"{theirs}.mlp.fc.{kind}"))
        if self.qk_bias and not self.bias:
            rules.append(heads.qk_bias(f"{mixer}.qk_bias", f"{attn}.qk_bias"))
        return rules


@dataclass(frozen=True)
class Common:
    """Fields that both architectures read alike.

    Args:
        blocks: the blocks of the model's width.
        block_size: number of positions.
        vocab_size: number of tokens.
        padded_vocab_size: rows of the embedding.
        pad_vocab_to: a number whose multiples they are.
        norm_eps: added to mean squares.
        tied: whether the head is the embedding.
        scales: constants of the initialization.
        strategy: its name.
        softcap: bound of the logits.

    """

    blocks: Blocks
    block_size: int
    vocab_size: int
    padded_vocab_size: int
    pad_vocab_to: int
    norm_eps: float
    tied: bool
    scales: Scales
    strategy: str
    softcap: float | None

    def spec_fields(self) -> dict[str, Any]:
        """Return the fields of the spec."""
        return {
            "vocab_size": self.vocab_size,
            "pad_vocab_to": self.pad_vocab_to,
            "d_model": self.blocks.width,
            "norm_eps": self.norm_eps,
            "tie_embeddings": self.tied,
            "embedding_std": self.scales.embedding_std,
            "embedding_scale": self.scales.embedding_scale,
            "logit_scale": self.scales.logit_scale,
            "logit_softcap": self.softcap,
            "weight_norm": False,
            "norm_placement": "pre",
            "core_norm": False,
        }

    def rules(self) -> list[Rule]:
        """Return the rules of the embedding, the head and the final norm."""
        rules = [
            rename("embedding.weight", "transformer.wte.weight"),
            rename("norm.weight", "transformer.ln_f.weight"),
        ]
        return rules if self.tied else [*rules, rename("head.weight", "lm_head.weight")]

    @property
    def copies(self) -> dict[str, str]:
        """Published names of second copies."""
        return {"lm_head.weight": "transformer.wte.weight"} if self.tied else {}

    @property
    def rotations(self) -> Unused:
        """The table of rotations, which is stored with the weights."""
        table = rotation_table(
            self.block_size,
            width=self.blocks.head_dim,
            base=self.blocks.rope_theta,
            condense=self.blocks.rope_condense,
        )
        return Unused("freqs_cis", table)


WITHOUT_EFFECT = {
    **dict.fromkeys(("name", "hf_config"), "a label"),
    "attn_impl": "selects a kernel for the same values",
    "init_orthogonal": "used for new weights only",
    "skip_initialization": "used for new weights only",
    **dict.fromkeys(
        ("debias_attention", "center_attention"), "read by the code that monitors attention, not by the model"
    ),
    "activation_checkpoint_impl": "recomputes the same values",
    "simple_ops": "selects a slower implementation of the same operations",
    "strategy": "a choice of distributed training",
    "_class_name": "names the class that reads the file",
    "architecture_class_name": "names the class that reads the file",
    "model_class_name": "names the class that reads the file",
}


def read_common(fields: PublishedFields, *, tied: bool) -> Common:
    """Read the fields that both architectures share; missing ones have the defaults of the published code.

    Args:
        fields: the configuration.
        tied: whether the head is tied where the configuration does not say so.

    """
    fields.ignore(WITHOUT_EFFECT)
    fields.require("use_abacus", False, reason="positions by digit are not supported")
    fields.require("randomize_positions_from", None, reason="random positions are not supported")
    fields.require("mup_model_scaling_factor", 1, reason="widths are not scaled; give the final ones")
    fields.choice("block_class_name", "TransformerPreNormBlock", "TransformerPreNormBlock")
    fields.choice("norm_class_name", "LayerNorm", "RMSNorm", "RMSNorm_llama")
    if isinstance(fields.take("name"), str) and "Gemma" in fields.config["name"]:
        fields.complain("name", "models of this name add 1 to the weights of norms, which is not supported")
    if fields.take("attn_impl") == "debug-skip":
        fields.complain("attn_impl", "it skips attention")
    width, heads = fields.integer("n_embd", 4096), fields.integer("num_attention_heads", 32)
    kv_heads = fields.integer("num_key_value_heads", heads)
    if width % heads or width // heads % 2:
        fields.complain(
            "num_attention_heads", f"n_embd {width} must be a multiple, with heads of an even width"
        )
    if heads % kv_heads:
        fields.complain("num_key_value_heads", f"expected a divisor of num_attention_heads {heads}")
    rope = _rope(fields)
    d_ff = fields.integer("intermediate_size", 4 * width)
    activation = fields.choice("nonlin_name", "GELU", *ACTIVATIONS)
    clip, bias, qk_bias = (
        fields.optional_number("clip_qkv"),
        fields.flag("bias", False),
        fields.flag("qk_bias", False),
    )
    if qk_bias and kv_heads != heads:
        fields.complain("qk_bias", "the published code fails with fewer key than query heads")
    if qk_bias and bias and clip is not None:
        fields.complain("qk_bias", "with bias and clip_qkv it is added after the clipping; not supported")
    blocks = Blocks(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        gated=fields.choice("mlp_class_name", "BaseMLP", "BaseMLP", "GatedMLP") == "GatedMLP",
        activation=ACTIVATIONS[activation],
        bias=bias,
        qk_bias=qk_bias,
        rope_theta=rope[0],
        rope_condense=rope[1],
        qk_norm=fields.flag("qk_norm", False),
        clip_qkv=clip,
        causal=fields.flag("causal", True),
    )
    vocab, padded, multiple = _vocabulary(fields)
    strategy = fields.choice("init_strategy", "scaled", *STRATEGIES)
    tied = fields.flag("tie_embeddings", tied)
    head = fields.choice("use_fused_head", "pytorch", "pytorch", "cce", "full-triton")
    if head == "full-triton" and not tied:
        fields.complain("use_fused_head", "its untied head is stored transposed; not supported")
    return Common(
        blocks=blocks,
        block_size=fields.integer("block_size", 4096),
        vocab_size=vocab,
        padded_vocab_size=padded,
        pad_vocab_to=multiple,
        norm_eps=fields.number("norm_eps", 1e-5),
        tied=tied,
        scales=scales_of(strategy, width),
        strategy=strategy,
        softcap=fields.optional_number("logit_softcap"),
    )


def _rope(fields: PublishedFields) -> tuple[float, float]:
    """Return the base and the condensation of the rotation."""
    settings = fields.take("rope_settings")
    if settings is not None and not isinstance(settings, dict):
        fields.complain("rope_settings", "expected a mapping")
        settings = None
    inner = PublishedFields(settings or {}, name="rope_settings")
    if not inner.flag("use_rope", True):
        inner.complain("use_rope", "models without rotary positions are not supported")
    condense, base = inner.number("rope_condense_ratio", 1.0), inner.number("rope_base", 50_000.0)
    if condense < 1:
        inner.complain("rope_condense_ratio", "expected at least 1")
    try:
        inner.check()
    except ValueError as error:
        fields.complaints += [f"rope_settings: {line.strip()}" for line in str(error).splitlines()[1:]]
    return base, max(condense, 1.0)


def _vocabulary(fields: PublishedFields) -> tuple[int, int, int]:
    """Return the number of tokens, of rows, and a number whose multiples the rows are."""
    vocab, multiple = fields.integer("vocab_size", 50254), fields.integer("padding_multiple", 512)
    padded = fields.integer("padded_vocab_size", -(-vocab // multiple) * multiple)
    vocab = min(vocab, padded)
    if -(-vocab // multiple) * multiple != padded:
        multiple = padded  # the vocabulary rounded up to a multiple of the rows is the rows
    return vocab, padded, multiple


def mlp_fields(mlp: Any) -> dict[str, Any]:
    """Return the published fields of an MLP's spec.

    Raises:
        ValueError: another kind of MLP.

    """
    if mlp is None or mlp.kind not in ("swiglu", "mlp"):
        raise ValueError(
            f"the MLP is {None if mlp is None else mlp.kind!r}; the format has 'swiglu' and 'mlp'"
        )
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    activation = "silu" if mlp.kind == "swiglu" else mlp.activation
    if activation not in names:
        raise ValueError(f"the MLP's activation is {activation!r}; the format has {', '.join(sorted(names))}")
    gated = mlp.kind == "swiglu" or mlp.gated
    return {
        "intermediate_size": mlp.d_ff,
        "mlp_class_name": "GatedMLP" if gated else "BaseMLP",
        "nonlin_name": names[activation],
    }


__all__ = ["ACTIVATIONS", "FLOAT32_EPS", "WITHOUT_EFFECT", "Blocks", "Common", "mlp_fields", "read_common"]
