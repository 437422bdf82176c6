"""Optimizer classes by their import path: groups, exact resuming, and invalid classes and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from implicit_blocks import registry
from implicit_blocks.specs import SpecError
from trainer.optim.optimizers import load_optimizer_state, optimizer_state
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import OptimizerSpec, RunSpec, TorchOptimizerSpec

Small = Callable[..., RunSpec]


class Layer(nn.Linear):
    """A matrix with weight decay and a bias without."""

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [self.weight], [self.bias]


def spec_of(path: str, **fields: Any) -> OptimizerSpec:
    return TorchOptimizerSpec.model_validate({"class": path, "learning_rate": 0.1, **fields})


def test_a_class_gets_its_options_and_the_groups_of_weight_decay() -> None:
    spec = spec_of("torch.optim.SGD", weight_decay=0.3, options={"momentum": 0.8, "nesterov": True})
    optimizer = registry.build(spec, model=Layer(2, 2))
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["momentum"] == 0.8 and group["nesterov"] for group in optimizer.param_groups)
    assert all(group["lr"] == 0.1 for group in optimizer.param_groups)


def test_the_default_weight_decay_of_a_class_does_not_apply() -> None:
    assert torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"] > 0
    optimizer = registry.build(spec_of("torch.optim.AdamW"), model=Layer(2, 2))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]


def test_a_class_without_weight_decay_takes_none() -> None:
    assert registry.build(spec_of("torch.optim.Rprop"), model=Layer(2, 2)).param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match=r"weight_decay=0\.5: torch\.optim\.Rprop has no weight decay; set"):
        registry.build(spec_of("torch.optim.Rprop", weight_decay=0.5), model=Layer(2, 2))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon"},
    "nadam": {"kind": "torch", "class": "torch.optim.NAdam", "weight_decay": 0.1},
    "adafactor": {"kind": "torch", "class": "torch.optim.Adafactor"},
    "asgd": {"kind": "torch", "class": "torch.optim.ASGD"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one(small: Small, tmp_path: Path, name: str) -> None:
    changes = {"training.optimizer": {"learning_rate": 1e-2, **OPTIMIZERS[name]}}
    spec = small({**changes, "evaluation.sequences": 2, "evaluation.lengths": [12]})
    build(spec, output=tmp_path / "whole", device="cpu").train()
    build(spec, output=tmp_path / "parts", device="cpu").train(stop_at=2)
    build(spec, output=tmp_path / "parts", device="cpu", resume=True).train()
    rows = [list(read_metrics(tmp_path / part / "metrics.jsonl")) for part in ("whole", "parts")]
    losses, norms = ([[row[key] for row in each] for each in rows] for key in ("loss", "gradient_norm"))
    assert losses[0] == losses[1]
    assert norms[0] == norms[1]
    assert losses[0][0] != losses[0][-1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"class": "torch.optim.NAdm"}, r"class=torch\.optim\.NAdm does not exist; did you mean 'NAdam'"),
        ({"class": "torch.optim.Optimizer"}, "is not an optimizer class"),
        ({"class": "torch.optim.lr_scheduler.StepLR"}, "is not an optimizer class"),
        ({"class": "torch.optim.missing.Adam"}, r"there is no module 'torch\.optim\.missing'"),
        ({"class": "torch.optim.LBFGS"}, "evaluates the loss several times"),
        ({"options": {"momentun": 0.9}}, r"options\.momentun=0\.9: .* did you mean 'momentum'"),
        ({"options": {"momentum": -1.0}}, r"torch\.optim\.SGD cannot be built with options .*-1\.0"),
        ({"class": "torch.optim.Muon"}, "kind: muon"),
        ({"class": "torchao.optim.Absent8bit"}, "pip install torchao|does not exist"),
    ],
    ids=["class", "base", "other", "module", "closure", "option", "value", "muon", "torchao"],
)
def test_an_invalid_class_or_option_is_refused_before_the_run(
    small: Small, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    optimizer = {"kind": "torch", "class": "torch.optim.SGD", "learning_rate": 0.1, **fields}
    with pytest.raises(ValueError, match=words) as caught:
        build(small({"training.optimizer": optimizer}), output=tmp_path / "run", device="cpu")
    assert "training.optimizer" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"class": "os.system"}, "optimizer.class", "torch.optim.NAdam, got 'os.system'"),
        ({"class": "NAdam"}, "optimizer.class", "got 'NAdam'; register an optimizer"),
        ({"options": {"lr": 1.0}}, "optimizer.options.lr", "set training.optimizer.learning_rate"),
        ({"options": {"weight_decay": 1.0}}, "optimizer.options.weight_decay", "weight_decay instead"),
        ({"clas": "torch.optim.SGD"}, "optimizer.clas", "did you mean 'class'"),
    ],
    ids=["package", "bare", "lr", "decay", "key"],
)
def test_an_entry_that_the_trainer_sets_or_does_not_know_is_refused_with_its_place(
    small: Small, fields: dict[str, Any], place: str, words: str
) -> None:
    optimizer = {"kind": "torch", "class": "torch.optim.SGD", "learning_rate": 0.1, **fields}
    with pytest.raises(SpecError) as caught:
        small({"training.optimizer": optimizer})
    assert place in str(caught.value)
    assert words in str(caught.value)


class Quantized(torch.optim.Optimizer):
    """Keeps its state in a tensor subclass, as torchao's optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
                state["step"] += 1
                moment = state["exp_avg"]
                moment.a.mul_(0.9).add_(p.grad)
                moment.b.add_(p.grad.square())
                p.sub_(group["lr"] * moment.a / (1 + moment.b))


def test_state_in_a_tensor_subclass_is_restored_exactly() -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, other = Quantized(model.parameters()), Quantized(twin.parameters())
    inputs = torch.randn(4, 3)

    def step(net: nn.Module, of: torch.optim.Optimizer) -> None:
        of.zero_grad()
        net(inputs).square().sum().backward()
        of.step()

    step(model, optimizer)
    tensors, values = optimizer_state(optimizer, model)
    assert {"weight/exp_avg.a", "weight/exp_avg.b", "weight/step"} <= tensors.keys()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    twin.load_state_dict(model.state_dict())
    load_optimizer_state(other, twin, stored, values)
    assert torch.equal(twin.weight, model.weight)
    step(model, optimizer)
    step(twin, other)
    assert torch.equal(twin.weight, model.weight)
    assert float(other.state[twin.weight]["step"]) == 2.0
    with pytest.raises(ValueError, match="quantized 'exp_avg', which SGD does not have"):
        load_optimizer_state(torch.optim.SGD(twin.parameters(), lr=0.1), twin, stored, values)
