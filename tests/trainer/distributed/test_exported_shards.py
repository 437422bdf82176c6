"""The export of a model of which ranks have parts is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint import export as exporting
from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


@pytest.mark.parametrize("distributed", [{"kind": "fsdp"}, {"tensor": 2}], ids=["fsdp", "tensor"])
def test_divided_weights_are_gathered_for_export(
    distributed: dict[str, Any], small: Small, tmp_path: Path, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_write_for_transformers", lambda *args: False)
    changes = {"training.max_steps": 2, "training.export_every": 2, "evaluation.lengths": [12]}
    build(small(changes), output=tmp_path / "one", device="cpu").train()
    spec = small({**changes, "training.distributed": distributed}).model_dump(mode="json")
    processes("export_plainly", spec=spec, folder=str(tmp_path / "two"))
    one, two = (
        load_file(tmp_path / name / "exports" / "step-00000002" / "model.safetensors")
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-5, rtol=0)
