"""torchrun restarts the processes of a run after one of them is lost: the run resumes by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.distributed.test_divided_layouts import assert_equal_rows, spec_of, train_alone
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import folder_of_job

ROOT = Path(__file__).resolve().parents[3]
DYING = """
import os, signal, sys
from trainer.cli.train import main
from trainer.run.phases import ActivePhase

load = ActivePhase.batch

def batch(self, step, first):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], step) == ("0", "1", 6):
        os.kill(os.getpid(), signal.SIGKILL)
    return load(self, step, first)

ActivePhase.batch = batch
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["with_output", "without_output"])
@pytest.mark.parametrize("distributed", [{}, {"tensor": 2}, {"context": 2}], ids=str)
def test_a_run_resumes_when_torchrun_restarts_it(
    distributed: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"max_steps": 10, "checkpoint_every": 4}
    alone = train_alone(spec_of("mamba2", **changes), tmp_path / "alone")
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump(spec_of("mamba2", distributed=distributed, **changes))
    )
    (tmp_path / "dying.py").write_text(DYING)
    output = ["--output", "run"] if named else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", "dying.py", "--spec", "small.yaml", "--device", "cpu", *output],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = [tmp_path / "run"] if named else list((tmp_path / "runs").iterdir())
    assert f"resumed {folder.relative_to(tmp_path)} after step 4" in done.stdout + done.stderr
    assert_equal_rows(list(read_metrics(folder / "metrics.jsonl")), alone)


def test_only_restarts_of_the_same_torchrun_job_resume_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "small-20260101-000000"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    build(RunSpec.model_validate(spec_of("mamba2", max_steps=1)), output=folder, device="cpu")
    for output in (folder, None):
        assert folder_of_job(output, "small", root=tmp_path / "runs") == folder
    assert folder_of_job(tmp_path / "other", "small", root=tmp_path / "runs") is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert folder_of_job(folder, "small") is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert folder_of_job(folder, "small") is None
