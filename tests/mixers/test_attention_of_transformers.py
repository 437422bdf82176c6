"""Attention with the options of published families equals transformers' classes on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import Qwen2Config, Qwen3Config  # after the check that it is installed
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

D_MODEL, HEADS, KV_HEADS, WIDTH, LENGTH = 24, 4, 2, 8, 7
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2Attention, Qwen2RotaryEmbedding, {"bias": "qkv"}),
    "qwen3": (
        Qwen3Config,
        Qwen3Attention,
        Qwen3RotaryEmbedding,
        {"qk_norm": "weighted", "qk_norm_eps": 1e-5},
    ),
    "qwen3-biased": (
        Qwen3Config,
        Qwen3Attention,
        Qwen3RotaryEmbedding,
        {"qk_norm": "weighted", "qk_norm_eps": 1e-5, "bias": True},
    ),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_that_of_transformers(family, causal):
    config_class, attention_class, rotary_class, options = FAMILIES[family]
    more: dict[str, Any] = {} if family == "qwen2" else {"attention_bias": options.get("bias", False)}
    config = config_class(
        hidden_size=D_MODEL,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=1,
        head_dim=WIDTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attn_implementation="eager",
        **more,
    )
    theirs = attention_class(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    spec = ib.AttentionSpec(
        n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=WIDTH, rope_theta=1000.0, causal=causal, **options
    )
    ours = ib.build(spec, d_model=D_MODEL).double()
    weights = theirs.state_dict()
    given = {name: value for name, value in weights.items() if name.startswith(("q_norm", "k_norm"))}
    for kind in {name.rpartition(".")[2] for name in weights if name.startswith("q_proj")}:
        given[f"in_proj.{kind}"] = torch.cat([weights[f"{name}_proj.{kind}"] for name in "qkv"])
    given |= {
        name.replace("o_proj", "out_proj"): value for name, value in weights.items() if "o_proj" in name
    }
    ours.load_state_dict(given)

    z = torch.randn(2, LENGTH, D_MODEL, dtype=torch.float64)
    positions = torch.arange(LENGTH)[None]
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    mask = mask.masked_fill(~seen.tril(), -torch.inf) if causal else mask
    with torch.no_grad():
        expected, _ = theirs(z, rotary_class(config)(z, positions), mask[None, None])
        window = ib.Window(batch_size=2, start=0, length=LENGTH, positions_BL=positions, dtype=torch.float64)
        state = ours.initial_state(2, device=z.device, dtype=z.dtype)
        found = ours(z, None, state, ours.prepare(window))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # their rotations are in float32
