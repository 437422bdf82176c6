"""One update: what is averaged over what, and what is clipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.data.source import IGNORED, Batch
from trainer.distributed import Layout, Ranks
from trainer.step import StepResult, _objective, training_step


class Table(nn.Module):
    """Logits by token; the loss is ten times the mean over what is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(5, 5)
        with torch.no_grad():
            self.logits.weight.copy_(torch.linspace(-2, 2, 25).view(5, 5).sin())

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor, return_logits: bool) -> Any:
        logits = self.logits(ids)
        loss = 10 * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, predictions=logits.argmax(-1), solution=None)


INPUTS = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]])
LABELS = torch.tensor([[1, 2, 3], [IGNORED, IGNORED, 4], [IGNORED] * 3, [0, IGNORED, 2]])


def step(**changes: Any) -> tuple[StepResult, torch.Tensor, torch.Tensor]:
    model = Table()
    before = model.logits.weight.detach().clone()
    options: dict[str, Any] = {
        "precision": "float32", "micro_batch_size": None, "clip_norm": None, "last_tokens": 1,
    }  # fmt: skip
    result = training_step(
        Layout("none", Ranks(torch.device("cpu")), model, model),
        torch.optim.SGD(model.parameters(), lr=1.0),
        Batch(inputs=INPUTS, labels=LABELS),
        **{**options, **changes},
    )
    return result, before, model.logits.weight.detach()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loss_is_the_mean_over_scored_tokens_however_the_batch_is_cut(size: int) -> None:
    whole, _, expected = step()
    cut, _, found = step(micro_batch_size=size)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)
    assert (cut.accuracy, cut.accuracy_last) == (whole.accuracy, whole.accuracy_last)
    torch.testing.assert_close(found, expected)


def test_the_norm_is_clipped_where_that_is_asked_for() -> None:
    free, before, after = step()
    length = float((after - before).norm())
    assert length == pytest.approx(free.gradient_norm, rel=1e-5)
    assert length > 2
    for limit in (length / 3, length * 3):
        clipped, before, after = step(clip_norm=limit)
        assert clipped.gradient_norm == pytest.approx(free.gradient_norm, rel=1e-6)  # told as it was
        assert float((after - before).norm()) == pytest.approx(min(limit, length), rel=1e-3)


def test_a_penalty_counts_by_its_mean_over_the_sequences() -> None:
    loss, penalty = torch.tensor(2.0), torch.tensor([1.0, 2.0, 6.0])
    assert _objective(SimpleNamespace(loss=loss, solution=SimpleNamespace(penalty=penalty))) == 5.0
    for solution in (None, SimpleNamespace(penalty=None)):
        assert _objective(SimpleNamespace(loss=loss, solution=solution)) is loss
