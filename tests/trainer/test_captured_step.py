"""Training steps that are captured on a GPU: on the CPU they equal those of the training loop."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from implicit_blocks.specs.base import validate
from trainer.data.token_files import write_tokens
from trainer.experiments.equal_compute.recipes import Recipe, spec_of
from trainer.reporting.metrics import read_metrics
from trainer.run import captured_step, side_by_side
from trainer.run.build import build
from trainer.run.captured_step import CapturedStep, refuse_unsupported, why_not_captured
from trainer.run.side_by_side import Planned, Trained, begin, train_side_by_side
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder

CPU = torch.device("cpu")
SMALL = {
    "family": "llama", "width": 32, "learning_rate": 1e-2, "weight_decay": 1.5, "petaflops": 2e-7,
    "batch_size": 2, "length": 16, "vocab_size": 64, "precision": "float32",
}  # fmt: skip
EXPLICIT = Recipe(**SMALL, layers=(0, 2, 0))
LOOPED = Recipe(**SMALL, layers=(1, 1, 1), loops=3)
LATE = Recipe(**SMALL, layers=(1, 1, 1), loops=3, gradient_loops=2, loops_from=0.5)
END = Recipe(**SMALL, layers=(1, 1, 1), loops=2, end_loops=4, end_from=0.6, gate=0.5)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a file of 20 samples, so that the runs see several epochs."""
    path = tmp_path / "tokens.bin"
    write_tokens(path, np.random.default_rng(0).integers(0, 64, 321), vocab_size=64)
    return path


def trained(recipe: Recipe, tokens: Path, *, at_once: int = 4) -> Trained:
    spec = spec_of(recipe, tokens)
    one = begin(Planned(recipe.name, spec, 1.0), CPU, at_once=at_once)
    while not one.finished:
        assert one.ready()
        one.advance()
    return one


def losses_of_the_loop(recipe: Recipe, tokens: Path, folder: Path) -> list[float]:
    build(spec_of(recipe, tokens), output=folder, device="cpu").train()
    return [row["loss"] for row in read_metrics(RunFolder(folder).metrics.path)]


MUON = replace(LOOPED, optimizer="muon", petaflops=6e-7)
RANDOM = replace(LOOPED, changes=("model.depth={kind: uniform, low: 1, high: 3}",), petaflops=6e-7)
RECIPES = [EXPLICIT, LOOPED, LATE, END, MUON, RANDOM]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.shape}, {recipe.optimizer}")
def test_losses_equal_those_of_the_training_loop(recipe, tokens, tmp_path):
    expected = losses_of_the_loop(recipe, tokens, tmp_path / "run")
    one = trained(recipe, tokens)
    assert len(expected) > 6
    torch.testing.assert_close(one.step.losses(), torch.tensor(expected), rtol=1e-5, atol=0)


def test_runs_side_by_side_equal_runs_alone(tokens):
    recipes = [EXPLICIT, LOOPED, replace(LOOPED, seed=1)]
    found: dict[str, list[float]] = {}
    missing = train_side_by_side(
        [Planned(one.name, spec_of(one, tokens), 1.0) for one in recipes],
        device=CPU,
        on_end=lambda one: found.update({one.planned.name: one.step.losses().tolist()}),
        side_by_side=2,
        at_once=3,
    )
    assert missing == []
    assert found == {one.name: trained(one, tokens).step.losses().tolist() for one in recipes}


def test_runs_train_while_another_is_evaluated(tokens):
    recipes = [EXPLICIT, LOOPED]
    progress: dict[str, int] = {}
    running: list[Trained] = []

    def end(one: Trained) -> None:
        running.append(one)
        with torch.no_grad():
            one.meanwhile()
        progress[one.planned.name] = one.step.done

    queue = [Planned(one.name, spec_of(one, tokens), 1.0) for one in recipes]
    assert train_side_by_side(queue, device=CPU, on_end=end, at_once=3) == []
    for recipe, one in zip(recipes, sorted(running, key=lambda one: one.planned.name), strict=True):
        assert progress[recipe.name] == one.total
        assert one.step.losses().tolist() == trained(recipe, tokens).step.losses().tolist()


def test_the_next_run_begins_before_the_ended_one_is_evaluated(tokens):
    first, second = (Planned(one.name, spec_of(one, tokens), 1.0) for one in (EXPLICIT, LOOPED))
    lines: list[str] = []

    def end(one: Trained) -> None:
        lines.append(f"{one.planned.name}: ended")

    train_side_by_side([first, second], device=CPU, on_end=end, side_by_side=1, log=lines.append)
    found = [line.partition(": ")[2].split()[0] for line in lines]
    assert found == ["started", "started", "ended", "ended"]
    assert lines[2:] == [f"{first.name}: ended", f"{second.name}: ended"]


def test_a_step_that_is_not_finite_changes_no_weight(tokens):
    one = begin(Planned("run", spec_of(EXPLICIT, tokens), 1.0), CPU)
    with torch.no_grad():
        next(one.model.parameters()).fill_(math.inf)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.advance()
    torch.testing.assert_close(one.model.state_dict(), before, equal_nan=True)


def test_a_run_whose_loss_is_not_finite_ends_early(tokens):
    one = begin(Planned("run", spec_of(replace(EXPLICIT, petaflops=4e-7), tokens), 1.0), CPU, at_once=2)
    with torch.no_grad():
        next(one.model.parameters()).fill_(math.inf)
    while not one.finished:
        one.advance()
        one.ready()
    assert one.ended is not None
    assert one.step.done < one.total


def test_runs_that_do_not_end_in_time_are_named(tokens):
    names = [EXPLICIT.name, LOOPED.name]
    queue = [Planned(one.name, spec_of(one, tokens), 1.0) for one in (EXPLICIT, LOOPED)]
    ended: list[Trained] = []
    assert train_side_by_side(queue, device=CPU, on_end=ended.append, seconds=0.0) == names
    assert ended == []


@pytest.fixture
def now(monkeypatch):
    """Return the time, in a list, that the clock of runs side by side reads."""
    now = [0.0]
    monkeypatch.setattr(
        side_by_side, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    )
    return now


def evaluated_for_100_seconds(now: list[float], ended: list[str]) -> Callable[[Trained], None]:
    """Return a function that ends a run while all others launch the rest of their steps."""

    def end(one: Trained) -> None:
        for _ in range(100):
            one.meanwhile()
        now[0] += 100.0
        ended.append(one.planned.name)

    return end


def test_a_run_whose_last_step_is_launched_ends_after_the_time_is_over(tokens, now):
    queue = [Planned(one.name, spec_of(one, tokens), 1.0) for one in (EXPLICIT, LOOPED)]
    ended: list[str] = []
    end = evaluated_for_100_seconds(now, ended)
    assert train_side_by_side(queue, device=CPU, on_end=end, at_once=3, seconds=50.0) == []
    assert sorted(ended) == sorted(one.name for one in queue)


def test_the_rate_is_known_after_a_long_evaluation(tokens, now):
    recipes = (EXPLICIT, LOOPED, replace(LOOPED, seed=1))
    queue = [Planned(one.name, spec_of(one, tokens), 1.0) for one in recipes]
    lines: list[str] = []
    end = evaluated_for_100_seconds(now, [])
    limits: dict[str, Any] = {"side_by_side": 1, "seconds": 110.0}
    missing = train_side_by_side(queue, device=CPU, on_end=end, log=lines.append, **limits)
    assert missing == [queue[2].name]
    assert lines[-1] == f"{queue[2].name}: not started: needs 111 s, 10 s remain"


def test_progress_is_reported_after_each_minute(tokens, now, monkeypatch):
    launch, total, lines = Trained.advance, spec_of(EXPLICIT, tokens).total_steps, list[str]()

    def advance(one: Trained) -> None:
        launch(one)
        now[0] += 35.0

    monkeypatch.setattr(Trained, "advance", advance)
    queue = [Planned("run", spec_of(EXPLICIT, tokens), total * 70e12)]
    train_side_by_side(queue, device=CPU, on_end=lambda one: None, at_once=1, log=lines.append)
    expected = [f"run: {done} of {total} steps; 2 TFLOP/s together" for done in range(2, total, 2)]
    assert lines[1:] == expected


def test_averaged_weights_are_those_of_a_moving_average(tokens):
    decays = (0.5, 0.9)
    one = begin(Planned("run", spec_of(EXPLICIT, tokens), 1.0, averages=decays), CPU, at_once=1)
    weight = one.model.embedding.weight
    expected = {decay: weight.detach().clone() for decay in decays}
    for _ in range(3):
        one.advance()
        for decay in decays:
            expected[decay].lerp_(weight.detach(), 1 - decay)
    last = weight.detach().clone()
    for decay in decays:
        with one.step.averaged(decay):
            torch.testing.assert_close(weight.detach(), expected[decay])
        torch.testing.assert_close(weight.detach(), last, rtol=0, atol=0)


def test_without_an_average_there_are_no_averaged_weights(tokens):
    one = begin(Planned("run", spec_of(EXPLICIT, tokens), 1.0), CPU)
    with pytest.raises(ValueError, match="average"), one.step.averaged(0.5):
        pass


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("training", {"micro_batch_size": 1}, "micro_batch_size"),
        ("data", {"documents": "reset"}, "documents"),
        (
            None,
            {
                "data": {
                    "kind": "mixture",
                    "seq_len": 16,
                    "sources": [{"weight": 1, "data": {"kind": "tokens", "path": "a", "documents": "reset"}}],
                }
            },
            "documents",
        ),
        (
            None,
            {"phases": [{"name": "a", "until": 0.5, "training": {"batch_size": 1}}, {"name": "b"}]},
            "phases",
        ),
    ],
)
def test_runs_with_unequal_steps_are_refused(tokens, section, change, named):
    tree = spec_of(EXPLICIT, tokens).model_dump(mode="json")
    tree = {**tree, **change} if section is None else {**tree, section: {**tree[section], **change}}
    with pytest.raises(ValueError, match=named):
        refuse_unsupported(validate(RunSpec, tree))


def test_the_reason_against_a_capture_names_what_is_in_the_way(tokens):
    spec, cuda = spec_of(LOOPED, tokens), torch.device("cuda")
    model = spec.model
    free = validate(type(model), {**model.model_dump(), "depth": {"kind": "until_converged"}})
    searching = validate(type(model), {**model.model_dump(), "gradient": {"kind": "phantom"}})
    dropped = model.model_copy(update={"dropout": 0.1})
    assert why_not_captured(spec, model, cuda) is None
    assert why_not_captured(spec_of(replace(LOOPED, optimizer="muon"), tokens), model, cuda) is None
    assert "cpu" in str(why_not_captured(spec, model, CPU))
    assert "until_converged" in str(why_not_captured(spec, free, cuda))
    assert "phantom" in str(why_not_captured(spec, searching, cuda))
    assert "dropout" in str(why_not_captured(spec, dropped, cuda))
    noise = validate(type(model), {**model.model_dump(), "z_init": {"kind": "normal", "std": 0.1}})
    assert "z_init" in str(why_not_captured(spec, noise, cuda))
    random = spec_of(RANDOM, tokens).model
    assert why_not_captured(spec, random, cuda) is None
    each = random.model_copy(update={"depth": random.depth.model_copy(update={"per": "sequence"})})
    assert "per batch" in str(why_not_captured(spec, each, cuda))


class Graph:
    """In the place of a CUDA graph: remembers the number of loops, and makes the step when it is replayed."""

    body: Callable[[int], None]

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.body(self.loops)


@contextmanager
def recorded(graph: Graph, pool: None, *, step: CapturedStep) -> Iterator[None]:
    """Record the loops of a step without its effects."""
    body = step._body
    step._body = lambda loops: setattr(graph, "loops", loops)  # type: ignore[method-assign]
    yield
    step._body, graph.body = body, body  # type: ignore[method-assign]


def test_each_number_of_random_loops_has_a_graph(tokens, monkeypatch):
    expected = trained(RANDOM, tokens)
    one = begin(Planned(RANDOM.name, spec_of(RANDOM, tokens), 1.0), CPU, at_once=4)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(captured_step, "capture", partial(recorded, step=one.step))
    one.step.not_captured = None
    while not one.finished:
        assert one.ready()
        one.advance()
    assert one.step.losses().tolist() == expected.step.losses().tolist()
    assert set(one.step.graphs) == {1, 2, 3}
    assert int(one.model.depth.draws) == int(expected.model.depth.draws) == one.total


def test_numbers_of_loops_beyond_the_largest_number_of_graphs_run_eagerly(tokens, monkeypatch):
    one = begin(Planned(RANDOM.name, spec_of(RANDOM, tokens), 1.0), CPU, at_once=4)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(captured_step, "capture", partial(recorded, step=one.step))
    monkeypatch.setattr(captured_step, "MOST_GRAPHS", 1)
    one.step.not_captured = None
    while not one.finished:
        one.advance()
        assert one.ready()
    assert len(one.step.graphs) == 1
    assert one.step.losses().tolist() == trained(RANDOM, tokens).step.losses().tolist()
