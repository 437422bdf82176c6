"""Estimates of the dry run: several ranks, activation checkpointing, duration at a measured rate."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from implicit_blocks.specs import load_spec
from trainer.__main__ import main
from trainer.estimate.dry_run import dry_run_report
from trainer.estimate.memory import Memory, estimate_memory, resolve_layout
from trainer.specs.distributed import DistributedSpec
from trainer.specs.run import RunSpec

PARAMETERS = 1_324_083_184
"""Of llama_1.3b."""


def memory_of(*changes: str, ranks: int = 1, phase: int = 1) -> Memory:
    spec: Any = load_spec("llama_1.3b", list(changes))
    memory = estimate_memory(spec, spec.phase_specs()[phase], ranks=ranks)
    assert memory is not None
    return memory


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["--spec", "llama_1.3b", "--dry-run", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_dry_run_names_the_evaluation_search_if_it_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = "picard, damping 0.8, to a residual of 0.05 (relative), at most 128 iterations"
    _, out, _ = run(["model.solver.kind=anderson"], capsys)
    assert "anderson to a residual of 0.05" in out  # in training
    assert search in out.partition("evaluation  ")[2]
    _, out, _ = run(["model.at_evaluation.solver={kind: anderson, memory: 2}"], capsys)
    assert search.replace("picard, damping 0.8", "anderson") in out.partition("evaluation  ")[2]
    _, out, _ = run(["model.kind=explicit_lm"], capsys)
    assert "residual of" not in out


def test_memory_of_a_rank_is_its_shard_plus_the_gathered_model() -> None:
    alone, ddp = memory_of(), memory_of("training.distributed.kind=ddp", ranks=8)
    assert ddp == alone
    assert alone.weights == alone.gradients == 4 * PARAMETERS
    assert alone.optimizer == 8 * PARAMETERS
    fsdp = memory_of(ranks=8)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(fsdp, name) == pytest.approx(getattr(alone, name) / 8, rel=1e-6)
    assert fsdp.gathered == 3 * 4 * PARAMETERS
    assert (fsdp.activations, fsdp.logits) == (alone.activations, alone.logits)
    hsdp = memory_of("training.distributed={kind: hsdp, shard_size: 2}", ranks=8)
    assert hsdp.optimizer == pytest.approx(alone.optimizer / 2, rel=1e-6)
    by_layer = memory_of("training.distributed={kind: fsdp, unit: layer}", ranks=8)
    assert by_layer.gathered < fsdp.gathered / 4


def test_activation_checkpointing_keeps_one_layer_or_one_step() -> None:
    kept = memory_of()
    steps = memory_of("training.checkpoint_activations=steps")
    layers = memory_of("training.checkpoint_activations=layers")
    assert layers.activations < steps.activations < kept.activations / 3
    # The residual stream at the start of each of 24 layers of 4 steps: B x L x D float32 each, and one layer.
    starts = 4 * 24 * 4 * 2048 * 2048 * 4
    assert starts < layers.activations < starts + kept.activations / 90


def test_captured_graphs_keep_weights_and_gradients() -> None:
    plain, captured = memory_of(phase=0), memory_of("training.cuda_graphs=true", phase=0)
    assert plain.graphs == 0
    # Graphs: the 1.2 B weights of the layers in bfloat16, and points of 4 x 2048 tokens.
    assert captured.graphs == pytest.approx(2 * 2 * 1.2085e9 + 5 * 4 * 8192 * 2048, rel=0.02)
    assert captured.total == plain.total + captured.graphs
    dropping = memory_of("training.cuda_graphs=true", "model.dropout=0.1", phase=0)
    assert dropping.graphs - captured.graphs == 2 * 24 * 4 * 8192 * 2048
    again = memory_of("training.cuda_graphs=true", "training.checkpoint_activations=layers", phase=0)
    assert again.graphs < captured.graphs * 0.6
    assert memory_of("training.cuda_graphs=true", "training.distributed.kind=fsdp", ranks=8).graphs == 0


def test_a_micro_batch_is_no_larger_than_a_ranks_share() -> None:
    assert memory_of("training.batch_size=8", ranks=8).activations == pytest.approx(
        memory_of().activations / 4
    )


@pytest.mark.parametrize(
    ("ranks", "machine", "memory", "expected"),
    [
        (1, 1, 80e9, ("none", 1)),
        (8, 8, None, ("ddp", 1)),
        (8, 8, 80e9, ("fsdp", 8)),
        (8, 8, 141e9, ("ddp", 1)),
        (16, 8, 80e9, ("hsdp", 8)),
    ],
)
def test_auto_shards_what_is_large(ranks: int, machine: int, memory: Any, expected: Any) -> None:
    found = DistributedSpec().resolve(
        parameters=PARAMETERS, ranks=ranks, ranks_per_machine=machine, memory=memory
    )
    assert found[:2] == expected


def test_time_at_a_measured_rate(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--rate", "1e6", "training.max_tokens=3600000000", "--ranks", "8"], capsys)
    assert code == 0
    assert "48m" in out  # 0.8 of an hour of 3.6e9 tokens
    assert "1h00m for 3.6B tokens" in out
    assert "8, fsdp (auto, for GPUs of 80 GB): each with 1/8 of the state" in out
    assert " per rank: weights 0.7 GB" in out
    code, out, _ = run(["--rate", "bounded=1e6,free=5e5", "training.max_tokens=3600000000"], capsys)
    assert code == 0
    assert "1h12m for 3.6B tokens" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast"], "positive number of tokens"),
        (["--rate", "-1"], "positive number of tokens"),
        (["--rate", "free=3"], "use bounded=20000,free=20000"),
        (["--ranks", "3"], "batch_size 512 is not divisible by 3 processes"),
        (
            ["--ranks", "8", "training.distributed={kind: hsdp, shard_size: 3}"],
            "shard_size 3 does not divide",
        ),
    ],
)
def test_invalid_dry_run_options_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(arguments, capsys)
    assert code == 2
    assert words in err


def test_ranks_and_rate_require_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--spec", "llama_1.3b", "--ranks", "2"])
    assert "torchrun" in capsys.readouterr().err


def test_memory_of_one_layer_is_at_most_that_of_the_model() -> None:
    assert resolve_layout(load_spec("llama_1.3b"), 8)[:2] == ("fsdp", 8)  # type: ignore[arg-type,index]  # a run's
    memory = memory_of("model.n_layers=1", "training.distributed={kind: fsdp, unit: layer}", ranks=8)
    whole = memory_of("model.n_layers=1", "training.distributed={kind: fsdp}", ranks=8)
    assert memory.gathered == whole.gathered


def test_calls_of_a_penalty_count_in_the_activation_memory() -> None:
    kept = []
    for name in ("books_10m_mamba2", "books_10m_mamba2_penalty"):
        spec: Any = load_spec(name)
        memory = estimate_memory(spec, spec.phase_specs()[1])
        assert memory is not None
        kept.append(memory.activations)
    assert kept[1] == pytest.approx(6 / 4 * kept[0])  # reserved by that phase on a GPU: 17.6 and 27 GB


def test_the_duration_of_the_run_is_the_sum_over_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["training.max_tokens=3600000000"], capsys)
    assert code == 0
    scale = {"T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}
    parts = [float(n) * scale[s] for n, s in re.findall(r"([\d.]+) ([TPEZ])FLOP in total", out)]
    ((number, suffix),) = re.findall(r"whole run +at most ([\d.]+) ([TPEZ])FLOP", out)
    assert len(parts) == 2
    assert float(number) * scale[suffix] == pytest.approx(sum(parts), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 1, "micro-batches of 8 x 12 = 96 tokens, 1 per step"),
        ({"training.micro_batch_size": 2}, 1, "2 x 12 = 24 tokens, gradients accumulated over 4 per step"),
        (
            {"training.batch_size": 12, "training.micro_batch_size": 4},
            2,
            "gradients accumulated over 2 per step (the last of 2 sequences) on each of 2 ranks",
        ),
    ],
    ids=["one", "four", "two ranks"],
)
def test_the_dry_run_shows_the_accumulation_of_gradients(
    small: Callable[..., RunSpec], changes: dict[str, Any], ranks: int, words: str
) -> None:
    report = dry_run_report(small(changes), name="small", ranks=ranks)
    assert words in report
    size = changes.get("training.batch_size", 8)
    assert f"4 steps of {size} x 12 = {12 * size} tokens" in report


def test_the_dry_run_shows_optimizer_schedule_and_average(small: Callable[..., RunSpec]) -> None:
    optimizer = {"kind": "torch", "class": "torch.optim.NAdam", "learning_rate": 1e-3}
    changes = {"training.optimizer": optimizer, "training.schedule": {"kind": "cosine"}}
    report = dry_run_report(small({**changes, "training.ema": {"decay": 0.99, "start": 0.5}}), name="small")
    average = "average of the weights (decay 0.99) after 2 steps; 99% of it are its first weights"
    assert f"torch.optim.NAdam, cosine, {average}" in report
    short = dry_run_report(small({"training.ema": {"decay": 0.3}}), name="small")
    assert "average of the weights (decay 0.3)" in short
    assert "first weights" not in short
