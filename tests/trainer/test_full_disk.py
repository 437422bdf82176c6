"""A disk that fills up during a save: earlier checkpoints stay intact, and the run reports it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks.checkpoints.find import list_checkpoints
from trainer.checkpoint.folder import verify_checkpoint
from trainer.reporting.metrics import MetricsFile, read_metrics

SETTINGS = [
    "model.d_model=16", "model.mixer.d_state=8", "model.mixer.head_dim=8", "model.dropout=0.1",
    "training.batch_size=4", "training.threads=1", "training.checkpoint_every=2", "training.max_steps=12",
    "data.seq_len=12", "evaluation.lengths=[12]", "evaluation.sequences=4", "evaluation.batch_size=4",
    "model.stopping.max_iterations=5", "model.at_evaluation.stopping.max_iterations=4",
]  # fmt: skip


def arguments(folder: Path, *options: str) -> list[str]:
    return ["--spec", "word_problem_s3", *SETTINGS, "--device", "cpu", "--output", str(folder), *options]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("whole") / "run"
    assert forks.run(arguments(folder), log=folder.parent / "log") == 0
    return folder


def test_the_run_stops_with_a_message(tmp_path: Path, forks: Any, whole: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    assert forks.run(arguments(folder), log=log, full_at=330) == 4, log.read_text()
    there = list_checkpoints(folder / "checkpoints")
    assert "could not be saved ([Errno 28] No space left on device); the last checkpoint" in log.read_text()
    assert f"{there[-1]}, is intact" in log.read_text()
    for path in there:
        verify_checkpoint(path)
    assert not list((folder / "checkpoints").glob("*.tmp-*"))
    assert 0 < len(losses(folder)) < 12
    assert forks.run(arguments(folder, "--resume"), log=log) == 0, log.read_text()
    assert losses(folder) == losses(whole)


def test_the_run_continues_if_its_spec_says_so(tmp_path: Path, forks: Any, whole: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    options = ["training.on_failed_save=continue", "training.keep_checkpoints=9"]
    assert forks.run(arguments(folder, *options), log=log, full_at=330, full_for=6) == 0, log.read_text()
    assert log.read_text().count("could not be saved ([Errno 28] No space left on device)") == 1
    assert "; the run continues" in log.read_text()
    names = [path.name for path in list_checkpoints(folder / "checkpoints")]
    assert len(names) == 5
    assert names[-1] == "step-00000012"
    assert losses(folder) == losses(whole)


def test_a_full_disk_of_one_rank_is_reported_by_all(tmp_path: Path, forks: Any) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    codes = forks.run_ranks(2, arguments(folder), log=log, orders={1: {"full_at": 170}})
    assert codes == [4, 4], log.read_text()
    assert "could not be saved (rank 1: [Errno 28] No space left on device)" in log.read_text()
    for path in list_checkpoints(folder / "checkpoints"):
        verify_checkpoint(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Mount a disk of one megabyte and return a function that enlarges it, or skip the test."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    ) if os.name == "posix" else None  # fmt: skip
    if mounted is None or mounted.returncode != 0:
        pytest.skip("a small disk can't be mounted here (not root)")

    def enlarge(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)

    yield place, enlarge
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_real_disk_that_fills_up(
    tmp_path: Path, forks: Any, whole: Path, small_disk: tuple[Path, Callable[[str], None]], policy: str
) -> None:
    place, enlarge = small_disk
    folder, log = place / "run", tmp_path / "log"
    options = [f"training.on_failed_save={policy}", "training.keep_checkpoints=99"]
    code = forks.run(arguments(folder, *options), log=log)
    message = log.read_text()
    assert "Traceback" not in message
    # On a full disk the message is that of the system, or torch's "unexpected pos 704 vs 598".
    failed = [line for line in message.splitlines() if "the checkpoint of step" in line]
    assert all(re.search(r"the disk has 0\.0\d MB free, but a checkpoint takes [\d.]+ MB", x) for x in failed)
    assert failed or policy == "stop"
    there = list_checkpoints(folder / "checkpoints")
    assert 0 < len(there) < 6
    for path in there:
        verify_checkpoint(path)
    assert code == 4
    if policy == "continue":
        assert all(line.endswith("; the run continues") and "set training" not in line for line in failed)
        assert "error: the weights of step 12 could not be saved and are lost; free disk space" in message
    enlarge("64m")
    assert forks.run(arguments(folder, *options, "--resume"), log=log) == 0, log.read_text()
    assert losses(folder) == losses(whole)


def test_unwritten_lines_are_kept_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    real = file._file
    assert real is not None

    class Full:
        room = 5

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(28, "No space left on device")
            written = real.write(data[: self.room])
            self.room -= written
            return written

        def close(self) -> None:
            real.close()

    full = Full()
    file._file = full  # type: ignore[assignment]  # as much of a file as is needed
    file.write({"step": 2})
    assert file.trouble is not None
    file.write({"step": 3})
    full.room = 10**6
    file.write({"step": 4})
    assert file.trouble is None
    full.room = 0
    file.write({"step": 5})
    full.room = 10**6
    file.close()  # writes the rows that are pending
    assert [row["step"] for row in read_metrics(file.path)] == [1, 2, 3, 4, 5]
