"""Exports during training contain the trained model and do not change the training."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint import export as exporting
from trainer.errors import FailedSaveError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_pretrained_folders_are_exported_every_few_steps(
    small: Small, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    import implicit_blocks.hf  # noqa: F401  # registers the classes

    changes = {"training.export_every": 2, "training.max_steps": 5, "model.dropout": 0.1}
    run = build(small(changes), output=tmp_path / "run", device="cpu")
    run.train()
    names = sorted(path.name for path in (tmp_path / "run" / "exports").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
    assert "Writing model" not in capfd.readouterr().err  # a bar among the training's own lines
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "exports" / names[-1])
    tokens = torch.arange(6)[None]
    run.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, run.model(tokens).logits)
    assert (loaded.config.training_length, loaded.config.max_position_embeddings) == (12, 2048)
    card = (tmp_path / "run" / "exports" / names[0] / "README.md").read_text()
    assert "| steps | 2 of 5 |" in card

    build(small({**changes, "training.export_every": None}), output=tmp_path / "other", device="cpu").train()
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_without_transformers_safetensors_and_the_spec_are_exported(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    run = build(small({"training.export_every": 4}), output=tmp_path / "run", device="cpu")
    run.train()
    folder = tmp_path / "run" / "exports" / "step-00000004"
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "model.yaml"]
    stored = load_file(folder / "model.safetensors")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(stored[name], tensor), name


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_leaves_no_incomplete_export(
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    def full(*args: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "_write_for_transformers", full)
    changes = {"training.export_every": 2, "training.on_failed_save": policy}
    run = build(small(changes), output=tmp_path / "run", device="cpu")
    if policy == "stop":
        with pytest.raises(FailedSaveError, match=r"export of step 2 could not be saved .*No space left"):
            run.train()
    else:
        assert run.train() is not None
        assert "export of step 4 could not be saved" in capsys.readouterr().out
    assert list((tmp_path / "run" / "exports").iterdir()) == []
