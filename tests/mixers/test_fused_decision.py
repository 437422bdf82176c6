"""Decoding fuses plain attention and SwiGLU; layers with further options run through their modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding.slots import fused_map
from implicit_blocks.weights.cache import WeightCache

SWIGLU = ib.SwiGLUSpec(d_ff=16)


def fused(mlp: ib.MLPSpec | None, **options: Any) -> object:
    """Return the fused map of a model in two slots, or None."""
    mixer = ib.AttentionSpec(n_heads=4, **options)
    spec = ib.ExplicitLMSpec(vocab_size=11, d_model=32, n_layers=1, mixer=mixer, mlp=mlp)
    model = ib.build(spec).eval()
    states = [
        block.mixer.slots(2, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=4)
        for block in model.backbone.blocks()
    ]
    with torch.no_grad():
        return fused_map.fused_map(model, states, WeightCache(model.backbone), max_seq_len=4)


@pytest.fixture(autouse=True)
def as_if_triton_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_map, "available", lambda name: True)


@pytest.mark.parametrize("qk_norm", ["none", "weighted", "unweighted"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mlp", [None, SWIGLU], ids=["no-mlp", "swiglu"])
def test_plain_attention_is_fused(mlp, bias, qk_norm):
    assert isinstance(fused(mlp, bias=bias, qk_norm=qk_norm), fused_map.FusedMap)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "qkv"},
        {"bias": "qk"},
        {"qk_norm": "weighted", "clip_qkv": 1.0},
        {"clip_qkv": 1.0},
        {"value_embeddings": 11},
    ],
    ids=str,
)
def test_attention_with_an_option_is_not_fused(options):
    assert fused(SWIGLU, **options) is None


@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_of_another_kind_is_not_fused(gated):
    assert fused(ib.FeedForwardSpec(d_ff=16, activation="silu", gated=gated)) is None
