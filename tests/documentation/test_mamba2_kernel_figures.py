"""The speed of training with the kernels of Mamba2 equals that of benchmarks/results."""

from __future__ import annotations

import pytest

from tests.documentation.tables import results, words


def test_training_with_the_later_kernels_of_mamba2():
    found = results("gpu_training_compared_mamba2_h200")
    overview, notes = words("docs/results.md"), words("benchmarks/NOTES.md")
    rates = {
        (row["work"], row["commit"]): (row["tokens_per_second"], row["running_tokens_per_second"])
        for row in found["rows"]
    }
    before = []
    for work, name, target in (
        ("mamba2_130m_bounded", "Mamba2 130M (4+1), 8 \N{MULTIPLICATION SIGN} 2048", 145_000),
        ("state_tracking", "state tracking, 512 \N{MULTIPLICATION SIGN} 256, at 18 iterations", 2_400_000),
    ):
        waited, running = rates[work, "after"]
        assert f"| {name} | {waited:,}, {running:,} |" in overview
        assert f"| the same with later kernels | {waited:,} | {running:,} | | {target:,} |" in notes
        assert all(new > old for new, old in zip((waited, running), rates[work, "fe09da6d"], strict=True))
        before.insert(0, ", ".join(f"{rate:,}" for rate in rates[work, "fe09da6d"]))
    assert f"where the kernels before had {' and '.join(before)})" in overview
    assert min(rates["state_tracking", "after"]) > 2_400_000
    small, large = (
        f"{row['tokens_per_second']:,} and {row['running_tokens_per_second']:,}"
        for row in reversed(found["present"]["rows"])
    )
    assert f"another H200 has {small}, {large}" in notes
    assert f"{found['trainer']['tokens_per_second']:,} tokens/s" in notes
    tokens = 512 * 256 / found["trainer"]["median_step_seconds"]
    assert tokens == pytest.approx(found["trainer"]["tokens_per_second"], rel=1e-3)


def test_memory_with_expandable_segments():
    overview, notes = words("docs/results.md"), words("benchmarks/NOTES.md")
    found = results("gpu_training_h200")
    default, quantized = (row for row in found["rows"] if row["work"] == "mamba2_1.3b_bounded")
    less, less_quantized = found["expandable_segments"]["rows"]
    ((name, value),) = found["expandable_segments"]["environment"].items()
    trainer = found["expandable_segments"]["trainer"]
    ours, fixed = (f"{value:.1f}" for value in trainer["memory_gb"])
    assert float(ours) < 42 < float(fixed) == default["reserved_gb"]
    assert f"reserve less memory: {ours} instead of {fixed} GB for Mamba2 1.3B" in words("docs/training.md")
    assert f"with which it reserves {ours} GB and reaches the target" in notes
    assert "({} and {} s per step;".format(*trainer["median_step_seconds"]) in notes
    assert f"with `{name}={value}` has {less['reserved_gb']} GB" in notes
    assert f"#speed-and-precision): {ours} |" in overview
    assert (
        f"GB reserved | {default['reserved_gb']} (target 42 missed) | {quantized['reserved_gb']} | 42 |"
        in overview
    )
    assert (
        f"#speed-and-precision), as in the trainer | {less['reserved_gb']} |"
        f" {less_quantized['reserved_gb']} | 42 |" in overview
    )
    for key in ("tokens_per_second", "running_tokens_per_second"):  # at about the same speed
        assert less[key] == pytest.approx(default[key], rel=0.01)
    large, small, _ = found["expandable_segments"]["later"]["rows"]
    assert large["reserved_gb"] == less["reserved_gb"]
    large, small = (
        f"{row['tokens_per_second']:,} and {row['running_tokens_per_second']:,}" for row in (large, small)
    )
    assert f"it has as much memory and {large} tokens/s, Mamba2 130M {small} (one H200 of four" in notes
