"""Models read from published configurations compute the published equations, written out in plain torch here.

Every case changes a few fields of a small configuration. Weights are random, in float64; logits after some
loops and the gradients of all published tensors are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

import implicit_blocks as ib
from implicit_blocks.hf.architectures import ARCHITECTURES

LOOPS = 3
P = Mapping[str, Tensor]


# ------------------------------------------------------------------------------------ shared equations


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def rotated(x: Tensor, base: float, *, condense: float = 1.0, adjacent: bool = True) -> Tensor:
    """Rotate (B, L, heads, P) by position, in pairs of adjacent channels or of the two halves."""
    width = x.shape[-1]
    frequencies = base ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = (torch.arange(x.shape[1], dtype=x.dtype) / condense)[:, None, None] * frequencies
    first, second = (x[..., 0::2], x[..., 1::2]) if adjacent else x.chunk(2, dim=-1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention (B, L, H · P) with key heads shared by consecutive query heads."""
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, dim=2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(mask, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def linear(p: P, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


# ------------------------------------------------------------------------------------ Attractor and Parcae

BASE: dict[str, Any] = {
    "n_embd": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 11,
    "padding_multiple": 4,
    "block_size": 16,
    "norm_class_name": "RMSNorm",
    "nonlin_name": "ReLU2",
    "init_strategy": "scaled-zero",
    "qk_norm": True,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU2": lambda x: F.relu(x) ** 2 / 2,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
}


def block(c: Mapping[str, Any], p: P, name: str, x: Tensor, heads: int, kv: int, ve: Tensor | None) -> Tensor:
    return _mlp(c, p, name, x + _mixed(c, p, name, x, heads, kv, ve))


def _mixed(
    c: Mapping[str, Any], p: P, name: str, x: Tensor, heads: int, kv: int, ve: Tensor | None
) -> Tensor:
    z, width = rms(x, p[f"{name}.norm_1.weight"], 1e-5), x.shape[-1] // heads
    q, k, v = (linear(p, f"{name}.attn.c_{part}", z).unflatten(-1, (-1, width)) for part in "qkv")
    if ve is not None:
        gate = 2 * torch.sigmoid(z[..., :32] @ p[f"{name}.attn.ve_gate.weight"].T)
        v = v + gate[..., None] * ve.unflatten(-1, (kv, width))
    if c.get("clip_qkv"):
        q, k, v = (each.clamp(-c["clip_qkv"], c["clip_qkv"]) for each in (q, k, v))
    if c.get("qk_bias"):
        q, k = q + p[f"{name}.attn.qk_bias"][0], k + p[f"{name}.attn.qk_bias"][1]
    rope = c.get("rope_settings", {})
    settings = {"base": rope.get("rope_base", 50_000), "condense": rope.get("rope_condense_ratio", 1)}
    q, k = rotated(q, **settings), rotated(k, **settings)
    if c["qk_norm"]:
        q, k = rms(q, None, 2.0**-23), rms(k, None, 2.0**-23)
    return linear(p, f"{name}.attn.c_proj", attended(q, k, v))


def _mlp(c: Mapping[str, Any], p: P, name: str, x: Tensor) -> Tensor:
    hidden, act = (
        linear(p, f"{name}.mlp.fc", rms(x, p[f"{name}.norm_2.weight"], 1e-5)),
        ACTIVATIONS[c["nonlin_name"]],
    )
    if c.get("mlp_class_name", "BaseMLP") == "GatedMLP":
        gate, up = hidden.chunk(2, dim=-1)
        hidden = act(gate) * up
    else:
        hidden = act(hidden)
    return x + linear(p, f"{name}.mlp.proj", hidden)


def embedded(c: Mapping[str, Any], p: P, tokens: Tensor) -> Tensor:
    scale = math.sqrt(c["n_embd"]) if c["init_strategy"].startswith("takase") else 1.0
    return scale * p["transformer.wte.weight"][tokens]


def read_out(c: Mapping[str, Any], p: P, h: Tensor) -> Tensor:
    h = rms(h, p["transformer.ln_f.weight"], 1e-5)
    scale = math.sqrt(2 / 5 / c["n_embd"]) if c["init_strategy"] == "takase-scaled" else 1.0
    weight = p["transformer.wte.weight" if c["tie_embeddings"] else "lm_head.weight"]
    logits, cap = scale * h @ weight.T, c.get("logit_softcap")
    return logits if cap is None else cap * torch.tanh(logits / cap)


def attractor(c: Mapping[str, Any], p: P, tokens: Tensor, z0: Tensor) -> Tensor:
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads", heads)
    e = embedded(c, p, tokens)
    for i in range(c["n_backbone_layers"]):
        e = block(c, p, f"transformer.prelude.{i}", e, heads, kv, None)
    y = e
    for _ in range(LOOPS):
        h = y + e
        for i in range(c["n_fp_blocks"]):
            name = f"transformer.core_block.{i}"
            gates = [1.0, 1.0]
            if c["layer_scale_init"] is not None:
                raw = (p[f"{name}.raw_gamma_{part}"] for part in ("attn", "mlp"))
                gates = [c["gamma_max"] * torch.sigmoid(each) for each in raw]
            h = h + gates[0] * _mixed(c, p, name, h, heads, kv, None)
            h = h + gates[1] * (_mlp(c, p, name, h) - h)
        y = h - y
    return read_out(c, p, y)


def parcae(c: Mapping[str, Any], p: P, tokens: Tensor, z0: Tensor) -> Tensor:
    heads = c["num_attention_heads"]
    kv = c.get("num_key_value_heads", heads)
    counts = [c["n_layers_in_prelude"], c["n_layers_in_recurrent_block"], c["n_layers_in_coda"]]
    layers = counts[1] * c["mean_backprop_depth"]

    def ve(slot: int, number: int) -> Tensor | None:
        if slot % 2 != (sum(counts) - 1) % 2 or number % 2 != (layers - 1) % 2:
            return None
        return p[f"value_embeds.{slot}.weight"][tokens]

    e = embedded(c, p, tokens)
    for i in range(counts[0]):
        e = block(c, p, f"transformer.prelude.{i}", e, heads, kv, ve(i, i))
    if c["prelude_norm"]:
        e = rms(e, p["transformer.ln_prelude.weight"], 1e-5)
    core_heads = c.get("recurrent_num_attention_heads") or heads
    h = z0
    for _ in range(LOOPS):
        if c["injection_type"] == "diagonal":
            dt = F.softplus(p["transformer.adapter.dt_bias"])
            decay = torch.exp(-dt * torch.exp(p["transformer.adapter.A_log"]))
            h = h * decay + dt * (e @ p["transformer.adapter.B"].T)
        elif c["injection_type"] == "linear":
            h = linear(p, "transformer.adapter.adapter", torch.cat((h, e), -1))
        else:
            h = h + e
        for j in range(counts[1]):
            slot = counts[0] + j
            h = block(c, p, f"transformer.core_block.{j}", h, core_heads, core_heads, ve(slot, slot))
    x = linear(p, "transformer.C", h)
    for j in range(counts[2]):
        number = counts[0] + counts[1] * c["mean_recurrence"] + j
        x = block(c, p, f"transformer.coda.{j}", x, heads, kv, ve(counts[0] + counts[1] + j, number))
    return read_out(c, p, x)


# ------------------------------------------------------------------------------------ Huginn and Ouro


def huginn(c: Mapping[str, Any], p: P, tokens: Tensor, z0: Tensor) -> Tensor:
    heads, eps = c["n_heads"], c["norm_eps"]

    def layer(name: str, x: Tensor) -> Tensor:
        norms = [p[f"transformer.{name}.norm_{i}.weight"] for i in (1, 2, 3, 4)]
        rows = rms(x, norms[0], eps) @ p[f"transformer.{name}.attn.Wqkv.weight"].T
        q, k, v = (each.unflatten(-1, (heads, -1)) for each in rows.chunk(3, dim=-1))
        if c["qk_bias"]:
            bias = p[f"transformer.{name}.attn.qk_bias"]
            q, k = q + bias[0], k + bias[1]
        q, k = rotated(q, c["rope_base"]), rotated(k, c["rope_base"])
        z = rms(x + linear(p, f"transformer.{name}.attn.proj", attended(q, k, v)), norms[1], eps)
        gate, up = (rms(z, norms[2], eps) @ p[f"transformer.{name}.mlp.fc.weight"].T).chunk(2, dim=-1)
        return rms(z + linear(p, f"transformer.{name}.mlp.proj", F.silu(gate) * up), norms[3], eps)

    e = math.sqrt(c["n_embd"]) * p["transformer.wte.weight"][tokens]
    for i in range(c["n_layers_in_prelude"]):
        e = layer(f"prelude.{i}", e)
    h = z0
    for _ in range(LOOPS):
        h = linear(p, "transformer.adapter", torch.cat((h, e), -1))
        for i in range(c["n_layers_in_recurrent_block"]):
            h = layer(f"core_block.{i}", h)
    h = rms(h, p["transformer.ln_f.weight"], eps)
    for i in range(c["n_layers_in_coda"]):
        h = layer(f"coda.{i}", h)
    h = rms(h, p["transformer.ln_f.weight"], eps)
    return h @ p["transformer.wte.weight" if c["tie_embeddings"] else "lm_head.weight"].T


def ouro(c: Mapping[str, Any], p: P, tokens: Tensor, z0: Tensor) -> Tensor:
    act = {"silu": F.silu, "gelu": F.gelu}[c["hidden_act"]]
    width, eps = c["head_dim"], c["rms_norm_eps"]
    h = p["model.embed_tokens.weight"][tokens]
    logits, remaining, mixture = h, torch.ones(tokens.shape, dtype=h.dtype), torch.zeros(())
    for loop in range(LOOPS):
        for i in range(c["num_hidden_layers"]):
            name = f"model.layers.{i}"
            z = rms(h, p[f"{name}.input_layernorm.weight"], eps)
            q, k, v = (linear(p, f"{name}.self_attn.{x}_proj", z).unflatten(-1, (-1, width)) for x in "qkv")
            q, k = (rotated(x, c["rope_theta"], adjacent=False) for x in (q, k))
            mixed = linear(p, f"{name}.self_attn.o_proj", attended(q, k, v))
            h = h + rms(mixed, p[f"{name}.input_layernorm_2.weight"], eps)
            z = rms(h, p[f"{name}.post_attention_layernorm.weight"], eps)
            hidden = act(linear(p, f"{name}.mlp.gate_proj", z)) * linear(p, f"{name}.mlp.up_proj", z)
            branch = linear(p, f"{name}.mlp.down_proj", hidden)
            h = h + rms(branch, p[f"{name}.post_attention_layernorm_2.weight"], eps)
        h = rms(h, p["model.norm.weight"], eps)
        tied = c.get("tie_word_embeddings", False)
        logits = h @ p["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        leaves = torch.sigmoid(linear(p, "model.early_exit_gate", h)[..., 0])
        share = remaining * leaves if loop < LOOPS - 1 else remaining
        mixture, remaining = mixture + share[..., None] * logits, remaining - share
    return mixture


# ------------------------------------------------------------------------------------ cases

ATTRACTOR = BASE | {
    "model_class_name": "Attractor",
    "n_backbone_layers": 2,
    "n_fp_blocks": 1,
    "tie_embeddings": True,
    "layer_scale_init": 0.5,
    "gamma_max": 0.75,
}
PARCAE = BASE | {
    "model_class_name": "Parcae",
    "tie_embeddings": True,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "recurrent_embedding_dimension": 32,
    "recurrent_intermediation_embedding_dimension": 20,
    "injection_type": "diagonal",
    "prelude_norm": True,
    "mean_recurrence": LOOPS,
    "mean_backprop_depth": 2,
}
HUGINN = {
    "n_embd": 32,
    "n_heads": 4,
    "vocab_size": 11,
    "intermediate_size": 24,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "mean_recurrence": LOOPS,
    "mean_backprop_depth": 2,
    "norm_eps": 1e-6,
    "rope_base": 50_000,
    "qk_bias": True,
    "tie_embeddings": True,
}
OURO = {
    "model_type": "ouro",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "vocab_size": 11,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "total_ut_steps": LOOPS,
    "hidden_act": "silu",
}
GATED = {"mlp_class_name": "GatedMLP"}
NARROW = {"recurrent_embedding_dimension": 16, "recurrent_num_attention_heads": 2, "mean_backprop_depth": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attractor": ("attractor", {}),
    "attractor-shared-keys-gelu": ("attractor", {"num_key_value_heads": 2, "nonlin_name": "GELU"}),
    "attractor-gated-silu-two-blocks": ("attractor", {**GATED, "nonlin_name": "SiLU", "n_fp_blocks": 2}),
    "attractor-gated-relu2-bias": ("attractor", {**GATED, "bias": True, "layer_scale_init": None}),
    "attractor-qk-bias": ("attractor", {"qk_bias": True, "qk_norm": False, "clip_qkv": 0.3}),
    "attractor-both-biases": ("attractor", {"qk_bias": True, "bias": True}),
    "attractor-untied-softcap": ("attractor", {"tie_embeddings": False, "logit_softcap": 0.5}),
    "attractor-scales": ("attractor", {"init_strategy": "takase-scaled", "nonlin_name": "ReLU"}),
    "attractor-condensed": (
        "attractor",
        {"rope_settings": {"rope_condense_ratio": 2, "rope_base": 100}, "n_backbone_layers": 0},
    ),
    "parcae": ("parcae", {}),
    "parcae-linear-bias": ("parcae", {"injection_type": "linear", "bias": True}),
    "parcae-linear-narrow": (
        "parcae",
        {"injection_type": "linear", "n_layers_in_recurrent_block": 1, "n_layers_in_prelude": 1, **NARROW},
    ),
    "parcae-narrow": ("parcae", {**NARROW, "n_layers_in_recurrent_block": 1, "n_layers_in_prelude": 1}),
    "parcae-add": ("parcae", {"injection_type": "add", "prelude_norm": False, "tie_embeddings": False}),
    "parcae-dead-value-embeddings": ("parcae", {"n_layers_in_prelude": 1}),
    "parcae-some-dead-gates": (
        "parcae",
        {"n_layers_in_recurrent_block": 1, "mean_recurrence": 2, "mean_backprop_depth": 1},
    ),
    "parcae-shared-keys": (
        "parcae",
        {
            "num_key_value_heads": 2,
            "n_layers_in_prelude": 1,
            "n_layers_in_recurrent_block": 1,
            "mean_recurrence": 2,
            "mean_backprop_depth": 3,
        },
    ),
    "parcae-clipped-values": ("parcae", {"clip_qkv": 0.3, "qk_norm": False, **GATED}),
    "parcae-no-coda": ("parcae", {"n_layers_in_coda": 0, "qk_bias": True}),
    "huginn": ("huginn", {}),
    "huginn-bias-untied": ("huginn", {"bias": True, "qk_bias": False, "tie_embeddings": False}),
    "huginn-deep": ("huginn", {"n_layers_in_prelude": 2, "n_layers_in_coda": 0}),
    "ouro": ("ouro", {}),
    "ouro-shared-keys": ("ouro", {"num_key_value_heads": 2, "head_dim": 6, "hidden_act": "gelu"}),
    "ouro-tied": ("ouro", {"tie_word_embeddings": True}),
}
MODELS = {"attractor": (ATTRACTOR, attractor), "parcae": (PARCAE, parcae)}
MODELS |= {"huginn": (HUGINN, huginn), "ouro": (OURO, ouro)}


def model_of(name: str) -> tuple[dict[str, Any], ib.ImplicitLM, dict[str, Tensor]]:
    """Return a configuration, the model, and random published tensors that require gradients."""
    architecture, changes = CASES[name]
    config = MODELS[architecture][0] | changes
    reading = ARCHITECTURES[architecture].read(config)
    model = ib.build(reading.spec).double().eval()
    state = {
        key: 0.3 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for key, tensor in model.state_dict().items()
    }
    published = reading.tensors.write(state)
    model.load_state_dict(reading.tensors.read(published, state, what=name))
    copies = reading.tensors.copies
    leaves = {
        key: tensor.detach().clone().requires_grad_()
        for key, tensor in published.items()
        if key not in copies
    }
    return config, model, leaves


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_published_equations(name):
    config, model, published = model_of(name)
    tokens, labels = torch.randint(11, (2, 2, 7))
    start = 0.5 * torch.randn(2, 7, model.spec.core_width).double()
    architecture = CASES[name][0]
    expected = MODELS[architecture][1](config, published, tokens, start)
    options = {} if architecture in ("ouro", "attractor") else {"start": start}
    out = model.train()(tokens, labels=labels, loops=(LOOPS, LOOPS), **options)
    if architecture != "ouro":  # whose loss is that of a mixture of the logits of all loops
        torch.testing.assert_close(out.logits, expected, rtol=1e-9, atol=1e-9)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-10)
    used = [key for key, tensor in published.items() if tensor.is_floating_point()]
    by_equation = torch.autograd.grad(loss, [published[key] for key in used], allow_unused=True)
    out.loss.backward()
    ours = {
        key: torch.zeros_like(value) if value.grad is None else value.grad
        for key, value in model.named_parameters()
    }
    found = ARCHITECTURES[architecture].read(config).tensors.write_gradients(ours)
    for key, gradient in zip(used, by_equation, strict=True):
        if key != "freqs_cis":
            wanted = torch.zeros_like(published[key]) if gradient is None else gradient
            torch.testing.assert_close(found[key], wanted, rtol=1e-8, atol=1e-9)
