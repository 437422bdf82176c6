"""Windows, parameters and states that ranks cannot divide are refused with the place and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from implicit_blocks.layers import Linear
from implicit_blocks.parallel.sequence import SequencePart
from implicit_blocks.parallel.tensor import divide, local_part
from implicit_blocks.search.agreement import DividedRows
from implicit_blocks.specs.tensor_plan import Divided, Section, TensorPlan, rows
from implicit_blocks.windows import Window
from trainer.distributed.grid import Grid
from trainer.distributed.ranks import Ranks
from trainer.distributed.tensor_parts import TensorParts


class FirstOfTwo:
    """Replaces a process group; it only has sizes."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


GROUP: Any = FirstOfTwo()


def window(valid: torch.Tensor | None = None) -> Window:
    return Window(batch_size=1, start=0, length=2, positions_BL=torch.arange(2)[None], valid_BT=valid)


def test_parts_of_padded_sequences_are_refused() -> None:
    part = SequencePart(GROUP, DividedRows())
    with pytest.raises(ValueError, match=r"padding.*training\.distributed\.context=1"):
        part.check(window(torch.ones(1, 2, dtype=torch.bool)))


def test_parts_shorter_than_a_convolution_are_refused() -> None:
    part = SequencePart(GROUP, DividedRows())
    part.check(window(), taps=3)
    with pytest.raises(ValueError, match=r"part of 2 tokens is shorter than the 3 inputs.*context"):
        part.check(window(), taps=4)


def test_weights_with_other_parametrizations_are_refused() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = nn.Sequential(Linear(4, 4))
    parametrize.register_parametrization(layer[0], "weight", Doubled())
    plan = TensorPlan(rows("0", Section(4, 2), bias=False), reads=(), writes=())
    with pytest.raises(ValueError, match=r"Linear\.weight has parametrizations.*tensor=1"):
        divide(layer, plan, GROUP)


def test_optimizer_state_of_another_shape_than_its_parameter_is_refused() -> None:
    part = local_part(torch.Size((4, 3)), Divided(0, (Section(4, 2),)), rank=0, ranks=2)
    parts = TensorParts(Grid.undivided(Ranks(torch.device("cpu"))), {"w": part})
    assert parts.named("optimizer/w/exp_avg", torch.zeros(2, 3)) is part
    assert parts.named("optimizer/w/step", torch.zeros(())) is None
    with pytest.raises(ValueError, match=r"optimizer/w/row has shape \(2,\).*adamw"):
        parts.named("optimizer/w/row", torch.zeros(2))
