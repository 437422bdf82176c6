"""Optimizers built from specs, and their state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks import registry
from trainer.optim.optimizers import build_adamw, load_optimizer_state, optimizer_state
from trainer.run.step import set_learning_rate
from trainer.specs.run import AdamWSpec


@pytest.mark.parametrize(
    "mixer",
    [{"kind": "mamba2", "d_state": 8, "head_dim": 8}, {"kind": "attention", "n_heads": 2}],
    ids=["mamba2", "attention"],
)
def test_weight_decay_applies_to_matrices_only(mixer: dict[str, object]) -> None:
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


def test_adamw_has_the_settings_of_its_spec() -> None:
    class Model(nn.Linear):
        def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
            return [self.weight], [self.bias]

    spec = AdamWSpec(learning_rate=0.5, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.2)
    matrices, others = build_adamw(spec, model=Model(2, 2)).param_groups
    for group, decay in ((matrices, 0.2), (others, 0.0)):
        kept = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        assert kept == (0.5, (0.8, 0.7), 1e-3, decay)


def test_the_optimizer_state_is_restored_exactly() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": torch.ones(2, 2), "count": 3}
    tensors, values = optimizer_state(optimizer, model)
    assert (list(tensors), values) == (["weight/momentum_buffer"], {"weight/count": 3})
    optimizer.state.clear()
    optimizer.state[model.bias] = {"momentum_buffer": torch.ones(2)}  # of steps that are left behind
    load_optimizer_state(optimizer, model, tensors, values)
    assert list(optimizer.state) == [model.weight]
    assert optimizer.state[model.weight]["count"] == 3
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.ones(2, 2))


def test_the_learning_rate_is_set_in_every_group() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": torch.tensor(1.0)}]
    optimizer = torch.optim.SGD(groups)
    set_learning_rate(optimizer, 0.25)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)  # in place: graphs may have recorded it
