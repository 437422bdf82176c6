"""The program that compares golden cases: it passes on the published ones, and reports what it should."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("golden")


@pytest.fixture
def case(reference: Path, tmp_path: Path) -> Path:
    """Return a copy of a case with few expected tensors."""
    folder = tmp_path / "case"
    shutil.copytree(reference / "ouro_tiny", folder)
    keep = ("input_ids", "labels", "prelude", "logits", "loss", "exit_step_0.6", "grad/model.norm.weight")
    change(folder, lambda expected: {name: expected[name] for name in keep})
    return folder


def change(folder: Path, changed: Any) -> None:
    path = folder / "expected.safetensors"
    tensors = changed(load_file(path))
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize("name", ["attractor_tiny", "parcae_tiny", "huginn_tiny", "ouro_tiny", "llama_tiny"])
def test_every_tensor_and_gradient_of_a_published_case_is_reproduced(name, golden, reference, capsys):
    assert golden.main([str(reference / name)]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    expected = load_file(reference / name / "expected.safetensors")
    gradients = [key for key in expected if "grad/" in key]
    assert gradients
    assert all(key in printed for key in gradients)


def test_an_expected_tensor_beyond_its_bar_fails(golden, case, capsys):
    assert golden.main([str(case)]) == 0
    change(case, lambda expected: expected | {"logits": expected["logits"] * 1.0001})
    assert golden.main(["--quiet", str(case)]) == 1
    printed = capsys.readouterr().out
    assert "logits" in printed.splitlines()[-3]
    assert "ABOVE" in printed


def test_whole_numbers_must_be_equal(golden, case):
    def moved(expected: Any) -> Any:
        steps = expected["exit_step_0.6"].clone()
        steps[0, 0] = (steps[0, 0] + 1) % 4
        return expected | {"exit_step_0.6": steps}

    change(case, moved)
    assert golden.main([str(case)]) == 1


def test_an_expected_tensor_that_is_not_compared_fails(golden, case, capsys):
    change(case, lambda expected: expected | {"unheard_of": torch.zeros(2)})
    assert golden.main(["--quiet", str(case)]) == 1
    assert "unheard_of" in capsys.readouterr().out


def test_nan_in_a_weight_is_above_every_bar(golden, case):
    weights = load_file(case / "weights.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, case / "weights.safetensors")
    assert golden.main([str(case)]) == 1


def test_other_cases_are_compared_after_one_that_cannot_be_read(golden, case, tmp_path, capsys):
    assert golden.main([str(tmp_path / "nowhere"), str(case)]) == 1
    captured = capsys.readouterr()
    assert "nowhere" in captured.err
    assert "passed" in captured.out


def test_an_unknown_architecture_is_named(golden, case, capsys):
    config = json.loads((case / "config.json").read_text())
    (case / "config.json").write_text(json.dumps(config | {"architecture": "perceptron"}))
    assert golden.main([str(case)]) == 1
    assert "perceptron" in capsys.readouterr().err
