"""Optimizers as their specs say."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from trainer.spec import AdamWSpec


@pytest.mark.parametrize(
    "mixer",
    [{"kind": "mamba2", "d_state": 8, "head_dim": 8}, {"kind": "attention", "n_heads": 2}],
    ids=["mamba2", "attention"],
)
def test_weight_decay_is_of_matrices_alone(mixer: dict[str, object]) -> None:
    model = ib.build(
        ib.ImplicitLMSpec.model_validate({"vocab_size": 16, "d_model": 16, "n_layers": 1, "mixer": mixer})
    )
    spec = AdamWSpec(learning_rate=0.5, betas=(0.8, 0.9), weight_decay=0.25, eps=1e-6)
    optimizer = registry.build(spec, model=model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    kept = [name for name, parameter in model.named_parameters() if decay[id(parameter)] == 0.0]
    assert set(decay.values()) == {0.0, 0.25}
    assert all(parameter.dim() > 1 for name, parameter in model.named_parameters() if name not in kept)
    assert any("norm" in name for name in kept)
    if mixer["kind"] == "mamba2":
        assert {"A_log", "D", "dt_bias"} <= {name.rpartition(".")[2] for name in kept}
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert isinstance(optimizer, torch.optim.AdamW)
