"""Evaluation of a stub model whose answers and searches are known."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

import implicit_blocks as ib
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.distributed import Ranks
from trainer.evaluation.evaluate import _share, evaluate, table
from trainer.reporting.metrics import json_value

LENGTH, VOCABULARY = 6, 5


@dataclass
class Output:
    predictions: Tensor
    loss: Tensor | None
    solution: Any


@dataclass
class Searched:
    iterations: Tensor
    residual: Tensor
    converged: Tensor
    diverged: Tensor
    token_iterations: Tensor | None
    token_converged: Tensor | None
    token_residual: Tensor | None


class Echo(nn.Module):
    """Predicts each token itself; token t takes t iterations.

    The residual of the fifth token is 0.2, that of the others 0.01: neither it nor the last one converges.
    """

    def __init__(self, *, by_token: bool = True, implicit: bool = True) -> None:
        super().__init__()
        self.by_token, self.implicit = by_token, implicit
        self.windows: list[int | None] = []
        self.asked: list[tuple[tuple[int, ...], Tensor | None]] = []

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor,
        return_logits: bool,
        window_length: int | None = None,
        documents: Tensor | None = None,
        tolerance: float = 0.1,
    ) -> Output:
        assert not return_logits  # of a long set they would fill the memory
        assert not self.training
        assert not torch.is_grad_enabled()
        self.windows.append(window_length)
        self.asked.append((tuple(input_ids.shape), documents))
        batch, length = input_ids.shape
        logits = 3.0 * F.one_hot(input_ids, VOCABULARY).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        iterations = torch.arange(1, length + 1).expand(batch, length)
        rows = torch.ones(batch, dtype=torch.bool)
        searched = Searched(
            iterations=iterations.amax(1),
            residual=torch.linspace(0.1, 0.2, batch),
            converged=~rows,
            diverged=~rows,
            token_iterations=iterations if self.by_token else None,
            token_converged=iterations <= 4 if self.by_token else None,
            token_residual=torch.where(iterations == 5, 0.2, 0.01) if self.by_token else None,
        )
        return Output(logits.argmax(-1), loss, searched if self.implicit else None)


class Configured(Echo):
    """Has a tolerance of its own."""

    def search_config(self) -> tuple[None, ib.Stopping]:
        return None, ib.Stopping(tolerance=0.1)


class Fixed(DataSource):
    """Labels equal the inputs at even positions of the stream only; the first token is not scored."""

    vocab_size = VOCABULARY
    length = LENGTH
    samples = None

    def batch(self, position: int, count: int) -> Batch:
        inputs = torch.ones(count, LENGTH, dtype=torch.int64)
        labels = inputs.clone()
        labels[(torch.arange(position, position + count) % 2).bool()] = 2
        labels[:, 0] = -100
        return Batch(inputs=inputs, labels=labels)

    def evaluation_sets(self, evaluation: object) -> dict[str, EvaluationSet]:
        raise NotImplementedError


def results(model: nn.Module, batch_size: int = 3, **options: Any) -> Any:
    chosen = EvaluationSet(name="fixed", source=Fixed(), sequences=8, settings={"identity_probability": 0.5})
    (found,) = evaluate(
        model,
        [chosen],
        device=torch.device("cpu"),
        precision="float32",
        batch_size=batch_size,
        last_tokens=2,
        **options,
    )
    return found


def test_accuracy_loss_and_search_cover_the_whole_set() -> None:
    model = Echo().train()
    found = results(model)
    assert model.training  # returned as it was
    assert found.sequences == 8
    assert found.accuracy == found.accuracy_last == 0.5
    assert found.accuracy_by_position == (0.0, 0.5, 0.5, 0.5, 0.5, 0.5)  # the first position has no label
    right = -torch.log_softmax(torch.tensor([3.0, 0, 0, 0, 0]), 0)[0]
    assert found.loss == pytest.approx(float(right) + 1.5)  # half of the answers miss by 3 nats
    assert found.search.iterations == LENGTH
    assert found.search.non_converged == 1.0
    assert found.token_converged == pytest.approx(4 / 6, rel=1e-4)
    assert found.iterations_by_position == (1, 2, 3, 4, 5, 6)


def test_tokens_within_the_tolerance_may_follow_others_that_are_not() -> None:
    found = results(Echo(), search={"tolerance": 0.1})
    assert found.token_converged == pytest.approx(4 / 6, rel=1e-4)
    assert found.token_within == pytest.approx(5 / 6, rel=1e-4)
    assert found.as_row(by_position=False)["token_within"] == found.token_within
    assert results(Echo()).token_within is None  # the tolerance is not known
    assert results(Configured()).token_within == found.token_within
    assert results(Configured(), search={"tolerance": 0.3}).token_within == 1.0
    assert results(Echo(by_token=False), search={"tolerance": 0.1}).token_within is None


@pytest.mark.parametrize("batch_size", [1, 2, 8, 100])
def test_results_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    expected, found = results(Echo()), results(Echo(), batch_size=batch_size)
    assert found.loss == pytest.approx(expected.loss)
    assert found.accuracy_by_position == expected.accuracy_by_position


def test_iterations_by_position_need_counts_per_token() -> None:
    found = results(Echo(by_token=False))
    assert found.iterations_by_position is None
    assert found.token_converged is None
    assert found.search.iterations == LENGTH


def test_metrics_of_unscored_sets_are_nan() -> None:
    """An earlier version reported a loss of 0 and a perplexity of 1."""

    class Unscored(Fixed):
        def batch(self, position: int, count: int) -> Batch:
            batch = super().batch(position, count)
            return Batch(inputs=batch.inputs, labels=torch.full_like(batch.labels, -100))

    (found,) = evaluate(
        Echo(),
        [EvaluationSet(name="unscored", source=Unscored(), sequences=2)],
        device=torch.device("cpu"),
        precision="float32",
        batch_size=2,
        last_tokens=2,
    )
    row = json_value(found.as_row(by_position=True))
    assert [row[key] for key in ("loss", "perplexity", "accuracy", "accuracy_last")] == [None] * 4


def test_an_explicit_model_has_no_search() -> None:
    found = results(Echo(implicit=False))
    assert found.search is None
    assert found.as_row(by_position=True)["residual"] is None
    assert "converged" not in table([found], last_tokens=2, words=True)


def test_the_window_length_reaches_the_model() -> None:
    model = Echo()
    results(model, window_length=1)
    assert set(model.windows) == {1}


def test_longer_sets_go_through_the_model_in_smaller_batches_with_their_documents() -> None:
    class Packed(Fixed):
        def __init__(self, length: int) -> None:
            self.length = length

        def batch(self, position: int, count: int) -> Batch:
            ids = torch.ones(count, self.length, dtype=torch.int64)
            return Batch(inputs=ids, labels=ids, documents=ids.cumsum(1) // 3)

    model = Echo().eval()
    lengths = (12, 4, 40)
    sets = [EvaluationSet(name=str(n), source=Packed(n), sequences=7) for n in lengths]
    evaluate(model, sets, device=torch.device("cpu"), precision="float32", batch_size=6, last_tokens=1)
    assert not model.training  # left as it was
    assert [shape for shape, _ in model.asked] == [
        (2, 12), (2, 12), (2, 12), (1, 12), (6, 4), (1, 4), *[(1, 40)] * 7
    ]  # fmt: skip
    assert all(documents is not None and documents.shape == shape for shape, documents in model.asked)


def test_iterations_by_position_need_counts_per_token_on_every_rank() -> None:
    class Other(Ranks):
        def all(self, flag: bool) -> bool:
            return False

    found = results(Echo(), ranks=Other(torch.device("cpu")))
    assert (found.iterations_by_position, found.token_converged) == (None, None)


def test_the_table_states_convergence_beside_accuracy() -> None:
    shown = table([results(Echo())], last_tokens=2, words=True).splitlines()
    assert shown[0].split() == [
        "set", "last", "2", "all", "sequences", "loss", "iterations", "max", "residual", "max", "converged",
    ]  # fmt: skip
    assert shown[1].split() == [
        "fixed",
        "50.00%",
        "50.00%",
        "50.00%",
        "1.6816",
        "6.0",
        "6",
        "1.5e-01",
        "2.0e-01",
        "0.0%",
    ]


def test_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    from dataclasses import replace

    assert replace(results(Echo()), loss=1e4).perplexity == float("inf")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_every_rank_makes_the_same_number_of_calls(batch_size: int, world_size: int) -> None:
    """Otherwise a model that communicates in its calls would wait forever for the call of another rank."""

    class Numbers:
        length = 1

        def batch(self, position: int, count: int) -> Batch:
            numbers = torch.arange(position, position + count)[:, None]
            return Batch(inputs=numbers, labels=numbers)

    for sequences in range(1, 12):
        shared = EvaluationSet(name="set", source=cast(Any, Numbers()), sequences=sequences)
        turns = [
            list(_share(shared, batch_size, ranks, equal_calls=True))
            for ranks in (Ranks(torch.device("cpu"), rank, world_size) for rank in range(world_size))
        ]
        assert len({len(of_rank) for of_rank in turns}) == 1
        assert all(batch is not None for of_rank in turns for batch, _ in of_rank)
        counted = [
            cast(Any, batch).inputs[:, 0].tolist() for of_rank in turns for batch, counts in of_rank if counts
        ]
        assert list(chain.from_iterable(counted)) == list(range(sequences))
        last = Ranks(torch.device("cpu"), world_size - 1, world_size)
        silent = _share(shared, batch_size, last, equal_calls=False)
        assert all(counts == (batch is not None) for batch, counts in silent)


def test_a_sequence_is_correct_if_all_its_scored_tokens_are() -> None:
    class Mixed(Fixed):
        def batch(self, position: int, count: int) -> Batch:
            batch = super().batch(position, count)
            labels = batch.inputs.clone()
            labels[0, 0] = (labels[0, 0] + 1) % VOCABULARY  # one wrong answer
            labels[1, 2:] = -100  # the others are right
            labels[2] = -100  # nothing is scored
            return Batch(inputs=batch.inputs, labels=labels)

    (found,) = evaluate(
        Echo(),
        [EvaluationSet(name="mixed", source=Mixed(), sequences=4)],
        device=torch.device("cpu"),
        precision="float32",
        batch_size=4,
        last_tokens=2,
    )
    assert found.sequence_accuracy == 2 / 3
    assert found.as_row(by_position=False)["sequence_accuracy"] == pytest.approx(2 / 3, abs=1e-6)
