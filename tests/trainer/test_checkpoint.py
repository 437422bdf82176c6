"""Checkpoints of a small model are exact and atomic, and damaged ones are refused."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.folder import (
    TrainingProgress,
    newest_sound_checkpoint,
    prune,
    set_aside,
    step_name,
    verify_checkpoint,
)
from trainer.checkpoint.load import _restore_random, load_checkpoint, read_model_tensors
from trainer.checkpoint.rng import random_state, restore_random_state, seed_everything
from trainer.checkpoint.writer import Checkpointer
from trainer.distributed import Ranks
from trainer.errors import CheckpointError, FailedSaveError
from trainer.storage.files import digest


class Tied(nn.Module):
    """A model with one weight under two names, as tied embeddings may be."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, width)
        self.head = nn.Linear(width, 3, bias=True)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(torch.randint(3, (5,))) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    keep: int = 2,
    keep_every: int | None = None,
) -> Path:
    writer = Checkpointer(
        folder, model=model, optimizer=optimizer, spec_digest="d", keep=keep, keep_every=keep_every
    )
    writer.save(TrainingProgress(step=step))
    writer.wait()
    return folder / step_name(step)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    seed_everything(0)
    model = Tied()
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    return save(tmp_path / "checkpoints", model, optimizer, 3), model, optimizer


def test_a_loaded_checkpoint_continues_bit_by_bit(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    path, model, optimizer = trained
    expected = train(model, optimizer, 4)

    seed_everything(99)
    again = Tied()
    optimizer_again = optimizer_of(again)
    progress = load_checkpoint(path, model=again, optimizer=optimizer_again, restore_random=True)
    assert progress == TrainingProgress(step=3)
    assert train(again, optimizer_again, 4) == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert again.head.weight is again.embedding.weight


def test_random_number_generators_are_restored() -> None:
    import random

    import numpy as np

    seed_everything(5)
    random.gauss(0, 1)
    np.random.standard_normal()  # one of two, as random.gauss: the other is kept for the next call
    state = json.loads(json.dumps(random_state()))

    def draw() -> list[float]:
        of_numpy = [np.random.standard_normal(), np.random.rand()]
        return [random.random(), random.gauss(0, 1), *of_numpy, float(torch.rand(()))]

    expected = draw()
    restore_random_state(state)
    assert draw() == expected


def test_ranks_of_another_world_size_get_different_random_numbers(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    path, *_ = trained
    state = verify_checkpoint(path)

    def drawn(rank: int) -> list[float]:
        _restore_random(path, state, Ranks(torch.device("cpu"), rank=rank, world_size=2), tensor=1)
        return torch.rand(3).tolist()

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_old_checkpoints_are_removed_and_incomplete_ones_ignored(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    path, model, optimizer = trained
    folder = path.parent
    half = folder / "step-00000009.tmp-4711"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert newest_sound_checkpoint(folder) == (path, [])
    for step in (4, 5, 6):
        save(folder, model, optimizer, step)
    assert [found.name for found in list_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    assert not half.exists()


def test_a_crash_during_a_save_leaves_the_previous_checkpoint(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, optimizer = trained

    class PowerCutError(Exception):
        pass

    def cut(*args: object, **kwargs: object) -> None:
        raise PowerCutError

    # The save fails before the tensors, before the state, and before the rename.
    for target in (
        "torch.distributed.checkpoint.filesystem._write_item",
        "trainer.checkpoint.writer.write_json",
        "pathlib.Path.rename",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, cut)
            with pytest.raises(FailedSaveError, match=r"checkpoint of step 8 .*, is intact"):
                save(path.parent, model, optimizer, 8)
        assert newest_sound_checkpoint(path.parent) == (path, [])
    assert save(path.parent, model, optimizer, 8).name == "step-00000008"


def test_the_same_step_can_be_saved_again(trained: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    path, model, optimizer = trained
    train(model, optimizer, 1)
    assert save(path.parent, model, optimizer, 3) == path
    loaded = Tied()
    load_checkpoint(path, model=loaded)
    assert torch.equal(loaded.head.weight, model.state_dict()["head.weight"])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("__0_0.distcp", "cut", "__0_0.distcp is truncated"),
        ("__0_0.distcp", "flip", "__0_0.distcp has changed since it was written"),
        ("__0_0.distcp", "remove", "__0_0.distcp is missing"),
        ("tensors.json", "cut", "tensors.json is truncated"),
        ("tensors.json", "flip", "tensors.json has changed"),
        ("rank-00000.json", "flip", "rank-00000.json has changed"),
        ("rank-00000.json", "remove", "rank-00000.json is missing"),
        ("state.json", "cut", "state.json is truncated or not JSON"),
        ("state.json", "edit", "state.json was altered"),
        ("state.json", "remove", "state.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_found(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer], name: str, damage: str, complaint: str
) -> None:
    path, model, optimizer = trained
    newer = save(path.parent, model, optimizer, 7)
    file = newer / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-3] ^= 1
        file.write_bytes(content)
    elif damage == "edit":
        file.write_bytes(bytes(content).replace(b'"step": 7', b'"step": 6'))
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=complaint):
        verify_checkpoint(newer)
    found, complaints = newest_sound_checkpoint(path.parent)
    assert found == path
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_without_a_complete_checkpoint_resuming_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        newest_sound_checkpoint(tmp_path)
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint is complete; .*: .*state\.json is missing"):
        newest_sound_checkpoint(tmp_path)


def test_another_model_is_refused_before_anything_is_loaded(
    trained: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    path, *_ = trained
    wider = Tied(width=6)
    before = wider.embedding.weight.clone()
    with pytest.raises(CheckpointError, match=r"another model: it has embedding.weight of shape \(3, 4\)"):
        load_checkpoint(path, model=wider)
    assert torch.equal(wider.embedding.weight, before)
    with pytest.raises(CheckpointError, match=r"has embedding.weight, which the model lacks"):
        load_checkpoint(path, model=nn.Linear(2, 2))


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save writes the weights of the moment when it began; a second save waits for the first."""
    from torch.distributed.checkpoint import filesystem

    seed_everything(0)
    model = Tied()
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    checkpointer = Checkpointer(tmp_path, model=model, optimizer=optimizer, spec_digest="d", keep=5)
    at_save = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    may_write, write = threading.Event(), filesystem._write_item

    def slow(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    monkeypatch.setattr(filesystem, "_write_item", slow)
    checkpointer.save(TrainingProgress(step=1))
    train(model, optimizer, 3)
    assert list_checkpoints(tmp_path) == []
    assert not checkpointer.ended

    second = threading.Thread(target=lambda: checkpointer.save(TrainingProgress(step=4)))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # at most one save is in flight
    may_write.set()
    second.join(30)
    checkpointer.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000004"]
    stored = read_model_tensors(tmp_path / "step-00000001")
    for name, tensor in at_save.items():
        assert torch.equal(stored[name], tensor), name
    assert not torch.equal(stored["head.weight"], model.state_dict()["head.weight"])


def test_different_tied_weights_are_another_model(tmp_path: Path) -> None:
    def tied(name: str) -> nn.Module:
        model = nn.Module()
        for each in ("first", "second"):
            model.register_parameter(each, nn.Parameter(torch.zeros(2)))
        model.register_parameter("last", model.get_parameter(name))
        return model

    model = tied("first")
    path = save(tmp_path, model, optimizer_of(model), 1)
    load_checkpoint(path, model=model)
    with pytest.raises(CheckpointError, match="is of another model: it ties different weights to each other"):
        load_checkpoint(path, model=tied("second"))


def test_later_checkpoints_do_not_count_when_old_ones_are_removed(tmp_path: Path) -> None:
    for step in (2, 4, 8):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune(tmp_path, newest=tmp_path / "step-00000004", keep=2)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [2, 4, 8]
    prune(tmp_path, newest=tmp_path / "step-00000004", keep=1)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [4, 8]


def test_checkpoints_at_keep_every_are_kept(tmp_path: Path) -> None:
    model = Tied()
    optimizer = optimizer_of(model)
    for step in range(1, 9):
        save(tmp_path, model, optimizer, step, keep_every=3)
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [3, 6, 7, 8]


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_a_checkpoint_can_be_set_aside_again(tmp_path: Path) -> None:
    for attempt in (1, 2):
        (tmp_path / "step-00000003").mkdir()
        (tmp_path / "step-00000003" / "attempt").write_text(str(attempt))
        assert (set_aside(tmp_path / "step-00000003") / "attempt").read_text() == str(attempt)
    assert [path.name for path in tmp_path.iterdir()] == ["left-step-00000003"]


def test_a_seed_sets_every_generator() -> None:
    seed_everything(2**40)
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    seed_everything(3)
    assert len({*drawn, random.random(), np.random.rand(), float(torch.rand(()))}) == 6
    seed_everything(2**40)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == drawn


def test_the_ranks_of_a_run_with_the_largest_seed_have_seeds() -> None:
    """Rank r draws with the seed of the run plus r."""
    seed_everything(2**64 - 1 + 3)
    drawn = float(torch.rand(()))
    seed_everything(2)
    assert float(torch.rand(())) == drawn
