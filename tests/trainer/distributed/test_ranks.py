"""Communication between ranks, common refusals, and the end of a run on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.cli.train import main
from trainer.data.tokens import write_tokens
from trainer.distributed import Ranks, join
from trainer.errors import DeviceError
from trainer.reporting.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plain(small: Any) -> Any:
    """Return a function that makes small run specs as plain dictionaries."""
    return lambda changes=None: small(changes).model_dump(mode="json")


def test_a_single_rank_needs_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = join("cpu")
    assert (ranks.rank, ranks.world_size, ranks.is_main, ranks.is_single) == (0, 1, True, True)
    assert ranks == Ranks(torch.device("cpu"))
    assert ranks.sum([1, 2]) == ranks.max([1, 2]) == [1.0, 2.0]
    assert ranks.gather([3.0]) == [[3.0]]
    assert ranks.broadcast("x") == ranks.run_on_rank0(lambda: "x") == ranks.run_all(lambda: "x") == "x"
    ranks.barrier()


def test_ranks_exchange_values(processes: Any) -> None:
    first, second = processes("talk")
    assert first.pop("run_all") == 0
    assert second.pop("run_all") == 1
    assert first == second
    assert first["sum"] == [2.0, 1.0]
    assert first["max"] == [1.0, 0.0]
    assert (first["any"], first["all"]) == (True, False)
    assert first["gather"] == [[0.0, 0.5], [1.0, 0.5]]
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["broadcast"] == first["run_on_rank0"] == "of rank 0"


def test_an_error_of_rank_0_is_raised_on_all(processes: Any) -> None:
    first, second = processes("fail_on_rank0")
    assert first == ("ValueError", "the folder is taken")
    assert second == ("ValueError", "rank 0: the folder is taken")


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(DeviceError, match="'cuda:1' is a single device, but there are 2 processes"):
        join("cuda:1")


def test_ranks_that_disagree_on_the_spec_are_refused(plain: Any, processes: Any, tmp_path: Path) -> None:
    specs = [plain(), plain({"training.seed": 3, "data.seq_len": 16})]
    for kind, words in processes("build_it", specs=specs, folder=str(tmp_path / "run")):
        assert kind == "ValueError"
        assert "not started with the same spec" in words
        assert "training.seed: 0 → 3" in words
        assert "data.seq_len: 12 → 16" in words
    assert not (tmp_path / "run").exists()


def test_ranks_that_find_other_data_are_refused(plain: Any, processes: Any, tmp_path: Path) -> None:
    spec = plain({"model.vocab_size": 9})
    spec["data"] = {"kind": "tokens", "path": "tokens", "seq_len": 12}
    spec["phases"], spec["evaluation"] = [], {"sequences": 2}
    for rank, tokens in enumerate((200, 200, 300)):
        folder = tmp_path / str(rank) / "tokens"
        folder.mkdir(parents=True)
        write_tokens(folder / "part.bin", [token % 9 for token in range(tokens)], vocab_size=9)
    run = str(tmp_path / "run")
    folders = [str(tmp_path / str(rank)) for rank in range(3)]
    assert processes("build_in_own_folder", spec=spec, folders=folders[:2], folder=run) == [None, None]
    found = processes("build_in_own_folder", spec=spec, folders=folders[1:], folder=f"{run}2")
    for kind, words in found:
        assert kind == "ValueError"
        assert "rank 1 reads other data than rank 0; copy them to every machine again" in words
    assert not Path(f"{run}2").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.batch_size": 7}, "batch_size 7 is not divisible by 2 processes"),
        ({"training.distributed.kind": "none"}, "kind is none, but there are 2 processes"),
        ({"training.distributed": {"kind": "hsdp", "shard_size": 3}}, "shard_size 3 does not divide the 2"),
        (
            {
                "training.distributed": {"kind": "fsdp", "unit": "layer"},
                "model.gradient": {"kind": "implicit_function"},
            },
            "set training.distributed.unit=model",
        ),
    ],
)
def test_unsupported_layouts_are_refused(
    plain: Any, processes: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    for kind, message in processes("build_it", specs=[plain(changes)], folder=str(tmp_path / "run")):
        assert kind == "ValueError"
        assert words in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("data", ("DataError", "rank 1: no token at 4"), ("DataError", "no token at 4")),
        ("callback", ("PeerError", "no room"), ("CallbackError", "no room")),
    ],
)
def test_a_failure_on_one_rank_ends_all(
    plain: Any, processes: Any, tmp_path: Path, what: str, first: Any, second: Any
) -> None:
    found = processes("fail_on_one_rank", spec=plain(), folder=str(tmp_path / "run"), what=what)
    for (kind, message), (expected, words) in zip(found, (first, second), strict=True):
        assert kind == expected
        assert words in message


@pytest.mark.parametrize("distributed", [{"kind": "ddp"}, {"kind": "fsdp", "unit": "layer"}])
def test_no_rank_waits_for_one_that_crashed(
    plain: Any, processes: Any, tmp_path: Path, distributed: dict[str, Any]
) -> None:
    spec = plain({"training.distributed": distributed})
    (waited, _), broken = processes("fail_on_one_rank", spec=spec, folder=str(tmp_path / "run"), what="crash")
    assert broken == ("RuntimeError", "a broken layer")
    assert waited.endswith("Error")


def test_a_signal_to_one_rank_stops_all_at_the_same_step(plain: Any, processes: Any, tmp_path: Path) -> None:
    spec = plain({"training.max_steps": 9})
    # The other rank returns the step at which it stopped, since the run has no summary.
    _, step = processes("fail_on_one_rank", spec=spec, folder=str(tmp_path / "run"), what="signal")
    assert step == 2
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_the_same_command_runs_under_torchrun(plain: Any, python: Any, tmp_path: Path) -> None:
    import yaml

    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(plain()))
    options = ["--spec", str(spec), "--device", "cpu", "--output"]
    assert main([*options, str(tmp_path / "one")]) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # A launcher that has imported torch forks its workers: two more imports would take most of the time.
    launcher += ["--start-method", "fork", "--run-path", str(ROOT / "trainer" / "__main__.py")]
    done = python.run([*launcher, *options, str(tmp_path / "two")], cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done in") == 1  # only one process prints
    one, two = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")
    )
    assert two == pytest.approx(one, abs=1e-6)
