"""The metrics of a run contain FLOP/s, utilization and percentiles, and the summary has them by phase."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.estimate.flops import training_flops
from trainer.estimate.peak_flops import peak_flops
from trainer.reporting.metrics import read_metrics
from trainer.reporting.recorder import ThroughputMeter
from trainer.reporting.summary import by_phase
from trainer.run.build import build
from trainer.run.step import StepResult, _executed, search_statistics
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


def test_peak_flops_of_known_and_unknown_devices() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H200", "float32") == 67e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("", "bfloat16") is None


def test_percentiles_are_values_of_sequences_and_survive_divergence() -> None:
    residual = torch.cat([torch.arange(1.0, 100.0), torch.tensor([torch.inf])])
    found = search_statistics(residual.long().clamp(0, 100), residual, residual < 50, residual > 1e9)
    assert found.residual_percentiles[:2] == (50.0 + 1, 90.0)
    assert found.residual_percentiles[2] == 99.0
    assert found.residual_max == torch.inf
    assert len(found.iterations_percentiles) == 3


@pytest.mark.parametrize(
    ("iterations", "calls"),
    [
        # alone: its own iterations; together: all rows, until half are done; then the finished ones leave
        ([[3.0]], 3.0),
        ([[2.0, 2.0, 2.0, 2.0]], 2.0),
        ([[1.0, 8.0, 8.0, 8.0]], 8.0),
        ([[1.0, 1.0, 8.0, 8.0]], (4 * 1 + 2 * 7) / 4),
        ([[1.0, 2.0, 4.0, 8.0]], (4 * 2 + 2 * 2 + 1 * 4) / 4),
    ],
)
def test_converged_rows_in_the_batch_count_as_executed(iterations: list[list[float]], calls: float) -> None:
    assert _executed(torch.tensor(iterations), len(iterations[0])) == calls


def test_rows_with_fewer_loops_stay_in_the_batch() -> None:
    loops = torch.tensor([[1.0, 1.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    assert _executed(loops, 2, compacts=False) == (1 + 5 + 2 + 2) / 4
    assert _executed(loops, 2) < _executed(loops, 2, compacts=False)


def test_executed_iterations_equal_the_calls_of_the_map(small: Small, tmp_path: Path) -> None:
    """The expected iterations are counted in the model, one sequence at a time."""
    run = build(small({"model.stopping.max_iterations": 16}), output=tmp_path / "run", device="cpu")
    rows = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        nonlocal rows
        rows += inputs[0].shape[0]

    mixer = next(module for name, module in run.model.named_modules() if name.endswith("layers.0.mixer"))
    mixer.register_forward_hook(count)
    results = []
    from trainer.run import loop

    original = loop.training_step
    try:
        loop.training_step = lambda *args, **kwargs: results.append(original(*args, **kwargs)) or results[-1]  # type: ignore[assignment, func-returns-value]  # remembers
        run.loop.run(stop_at=1)
    finally:
        loop.training_step = original
    (result,) = results
    assert result.iterations_executed == pytest.approx(rows / 8 - 1)  # one phantom step comes on top


def test_rows_and_summary_have_utilization_by_phase(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small(
        {
            "training.peak_flops": 1e12,
            "phases": [{"name": "first", "until": 2}, {"name": "second"}],
        }
    )
    summary = build(spec, output=tmp_path / "run", device="cpu").train()
    assert summary is not None
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert 0 < row["mfu"] <= row["hfu"] < 1
        assert row["tflops"] == pytest.approx(row["mfu"], rel=1e-2)
        assert 0 < row["tflops"] <= row["tflops_executed"]
        assert row["memory_gb"] > 0
        assert row["residual_p50"] <= row["residual_p90"] <= row["residual_p99"] <= row["residual_max"]
        assert row["iterations_p50"] <= row["iterations_max"]
    first, second = (phase["measured"] for phase in summary["phases"])
    assert (first["steps"], second["steps"]) == (2, 2)
    assert (first["tokens"], second["tokens"]) == (2 * 8 * 12, 2 * 8 * 12)
    assert second["mfu"] > 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("phase second: 2 ")]
    assert all(part in line for part in ("tok/s", "mfu", "GB", "iter", "res p50/90/99", "unconverged", "|g|"))
    json.dumps(summary, allow_nan=False)


def test_an_explicit_model_has_no_search_but_a_utilization(small: Small, tmp_path: Path) -> None:
    spec = small({"training.peak_flops": 1e12})
    explicit = spec.model_dump()
    explicit["model"] = {
        key: value
        for key, value in explicit["model"].items()
        if key in ("d_model", "n_layers", "mixer", "mlp", "vocab_size")
    } | {"kind": "explicit_lm"}
    build(RunSpec.model_validate(explicit), output=tmp_path / "run", device="cpu").train()
    (row, *_) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["iterations"] is None
    assert row["residual_p99"] is None
    assert row["mfu"] == row["hfu"] > 0


def test_utilization_is_that_of_all_devices_together(small: Small) -> None:
    result = StepResult(loss=1.0, accuracy=0.0, accuracy_last=0.0, gradient_norm=1.0, search=None)
    phase = small().phase_specs()[0]
    rows = []
    for devices in (1, 4):
        meter = ThroughputMeter(devices=devices, device=torch.device("cpu"), peak=1e9)
        meter.enter_phase(phase)
        rows.append(meter.row(result, tokens=96, seconds=0.5))
    one, four = rows
    for name in ("tflops", "tflops_executed", "mfu", "hfu"):
        assert four[name] == pytest.approx(one[name] / 4, rel=1e-3)
        assert four[name] > 0


def test_unmeasured_quantities_are_none() -> None:
    (phase,) = by_phase(
        [{"step": 2, "phase": "p", "step_seconds": 0.5, "tokens_per_second": 10.0, "loss": 1.0, "mfu": None}]
    ).values()
    assert phase["mfu"] is None
    assert phase["tokens_per_second"] == 10.0


def test_a_phase_is_averaged_over_steps_and_its_rate_over_time() -> None:
    rows = [
        {"step": 2, "phase": "p", "step_seconds": seconds, "tokens_per_second": rate, "loss": loss,
         "mfu": share, "iterations_max": most, "skipped": skipped, "save_stall_seconds": seconds / 8}
        for seconds, rate, loss, share, most, skipped in (
            (3.0, 10.0, 4.0, 0.1, 9, None), (1.0, 50.0, None, 0.3, 5, "loss")
        )
    ]  # fmt: skip
    (phase,) = by_phase(rows).values()
    assert (phase["tokens"], phase["seconds"], phase["tokens_per_second"]) == (80, 4.0, 20.0)
    assert (phase["mfu"], phase["iterations_max"], phase["skipped"]) == (0.2, 9, 1)
    assert (phase["loss_first"], phase["loss_last"], phase["save_stall_seconds"]) == (4.0, None, 0.5)


def test_the_tokens_of_phases_are_those_of_the_run() -> None:
    """Rates and durations are rounded; where rows are missing, they give the tokens of the next step."""
    rows = [
        {"step": step, "phase": phase, "tokens": tokens, "step_seconds": 3.3333, "tokens_per_second": 300.3,
         "loss": 1.0}
        for step, phase, tokens in ((1, "a", 1000), (2, "a", 2000), (3, "b", 3000), (9, "b", 9000))
    ]  # fmt: skip
    phases = by_phase(rows)
    assert (phases["a"]["tokens"], phases["b"]["tokens"]) == (2000, 2001)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.gradient": {"kind": "unrolled", "steps": 3, "checkpointing": True}},
        {"model.gradient": {"kind": "implicit_function"}},
        {"training.checkpoint_activations": "layers"},
    ],
    ids=["phantom", "unrolled", "implicit_function", "checkpointed"],
)
def test_the_meter_counts_the_flops_of_the_spec(small: Small, changes: dict[str, Any]) -> None:
    phase = small(changes).phase_specs()[0]
    meter = ThroughputMeter(devices=1, device=torch.device("cpu"), peak=1e9)
    meter.enter_phase(phase)
    search = search_statistics(torch.tensor([3, 6]), torch.ones(2), torch.ones(2), torch.zeros(2))
    result = StepResult(
        loss=1.0, accuracy=0.0, accuracy_last=0.0, gradient_norm=1.0, search=search, iterations_executed=5.5
    )
    expected = training_flops(
        phase.model,
        length=phase.data.seq_len,
        iterations=4.5,
        iterations_executed=5.5,
        checkpoint_activations=phase.training.checkpoint_activations,
    )
    assert expected is not None
    row = meter.row(result, tokens=100, seconds=0.5)
    assert row["mfu"] == pytest.approx(expected.useful * 200 / 1e9, rel=1e-3)
    assert row["hfu"] == pytest.approx(expected.executed * 200 / 1e9, rel=1e-3)
