"""Every allowed combination of mixer, solver and gradient trains, saves, resumes and generates.

The combinations include the library's kinds and those of the installed plugins of this repository. The slow
suite runs all combinations; the fast suite runs each solver with each gradient, cycling through the mixers.
"""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.decoding import ContinuousDecoder, Request, generate
from implicit_blocks.specs import SpecError
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.specs.run import RunSpec

ROOT = Path(__file__).resolve().parents[2]
D_MODEL, STEPS, FEW_STEPS = 16, 20, 16  # the few steps are those of the fast suite

# Settings that kinds require, or that make them small.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("mixer", "attention"): {"n_heads": 2},
    ("mixer", "gated_deltanet"): {"n_heads": 2, "head_dim": 8, "chunk_size": 8},
    ("mixer", "mamba2"): {"d_state": 8, "head_dim": 8, "chunk_size": 8},
    ("mixer", "hybrid"): {
        "mixers": [
            {"kind": "attention", "n_heads": 2},
            {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8},
        ]
    },
    # With the published norm_eps, heads this narrow amplify outputs near 0 until the map no longer contracts.
    ("mixer", "rwkv7"): {
        "n_heads": 2,
        "head_dim": 8,
        "decay_rank": 8,
        "rate_rank": 8,
        "gate_rank": 8,
        "norm_eps": 0.1,
    },
    ("mixer", "sliding_window_attention"): {"window": 4, "n_heads": 2},
    ("solver", "anderson"): {"memory": 2},
    ("solver", "broyden"): {"memory": 2},
    ("solver", "picard"): {"damping": 0.8},
    ("gradient", "implicit_function"): {"stopping": {"tolerance": 1e-2, "max_iterations": 16}},
    ("gradient", "jacobian_penalty"): {"weight": 0.1, "gradient": {"kind": "phantom", "steps": 2}},
    ("gradient", "last_loops"): {"loops": 4},
    ("gradient", "phantom"): {"steps": 2},
    ("gradient", "unrolled"): {"steps": 4},
    ("gradient", "reversible"): {"steps": 4},
}


def owners() -> set[str]:
    """Return the names of the tested distributions: this repository and its plugins."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    return {tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files}


def components(family: str) -> list[dict[str, Any]]:
    """Return every kind of a family as a spec's mapping."""
    known = owners()
    kinds = [kind for kind in registry.kinds(family) if registry.entry(family, kind).owner in known]
    return [{"kind": kind, **SETTINGS.get((family, kind), {})} for kind in kinds]


MIXERS, SOLVERS, GRADIENTS = map(components, ("mixer", "solver", "gradient"))
# Mixers that see later tokens can't generate, and their boards are not sequences of this task.
MIXERS = [each for each in MIXERS if ib.MixerSpec.model_validate(each).is_causal]
# Solvers that couple tokens are refused with scope prefix, and their rows depend on each other in generation.
SOLVERS = [each for each in SOLVERS if not registry.entry("solver", each["kind"]).spec.couples_tokens]
Combination = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def may_be_combined(solver: dict[str, Any], gradient: dict[str, Any]) -> bool:
    """Return whether the kinds allow it: some gradients need a differentiable solver."""
    of_gradient = registry.entry("gradient", gradient["kind"]).spec
    return (
        not of_gradient.differentiates_solver or registry.entry("solver", solver["kind"]).spec.differentiable
    )


PAIRS = [pair for pair in itertools.product(SOLVERS, GRADIENTS) if may_be_combined(*pair)]
ALL: list[Combination] = [(mixer, *pair) for mixer in MIXERS for pair in PAIRS]
COVERING: list[Combination] = [
    (MIXERS[number % len(MIXERS)], *PAIRS[number % len(PAIRS)])
    for number in range(max(len(PAIRS), len(MIXERS)))
]


def name(combination: Combination) -> str:
    return "-".join(part["kind"] for part in combination)


def run_spec(combination: Combination, steps: int = STEPS) -> RunSpec:
    mixer, solver, gradient = combination
    return RunSpec.model_validate(
        {
            "model": {
                "kind": "implicit_lm",
                "d_model": D_MODEL,
                "n_layers": 1,
                "mixer": mixer,
                "solver": solver,
                "gradient": gradient,
                "stopping": {"tolerance": 0.02, "max_iterations": 8},
                "at_evaluation": {"solver": solver, "stopping": {"tolerance": 1e-3, "max_iterations": 24}},
            },
            "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.9, "seq_len": 12},
            "training": {
                "max_steps": steps,
                "batch_size": 16,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
                "schedule": {"kind": "warmup_linear", "warmup": 0.1},
                "threads": 1,
            },
            "evaluation": {
                "lengths": [12],
                "identity_probabilities": [0.9],
                "sequences": 4,
                "batch_size": 4,
            },
        }
    )


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def train_in_two_parts(combination: Combination, folder: Path, steps: int = STEPS) -> torch.nn.Module:
    """Train half of the steps and resume in a new model; check that the loss falls; return the model."""
    spec = run_spec(combination, steps)
    assert build(spec, output=folder, device="cpu").train(stop_at=steps // 2) is None
    resumed = build(spec, output=folder, device="cpu", resume=True)
    assert resumed.train() is not None
    per_step = losses(folder)
    assert len(per_step) == steps
    assert sum(per_step[-5:]) < 0.9 * sum(per_step[:5]), per_step
    return resumed.model


def check_generation(model: torch.nn.Module) -> None:
    """Check that prompts of unequal lengths generate what each generates alone.

    In float64: an unconverged search may amplify float32's rounding differences between batches.
    """
    model.double().eval()
    prompts = [[1, 0, 2, 0], [3]]
    made = generate(model, prompts, max_new_tokens=2, return_logits=True)
    assert made.tokens.shape == (2, 2)
    assert made.logits is not None
    assert bool(made.logits.isfinite().all())
    assert made.iterations is not None
    assert bool((made.iterations >= 1).all())
    alone = generate(model, prompts[1:], max_new_tokens=1, return_logits=True)
    torch.testing.assert_close(alone.logits[0, 0], made.logits[1, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer["kind"])
def test_continuous_decoding_equals_generate_for_every_mixer(mixer):
    torch.manual_seed(0)
    spec = run_spec((mixer, {"kind": "picard", "damping": 0.6}, {"kind": "phantom"})).model
    model = ib.build(spec.model_copy(update={"vocab_size": 6})).eval()
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=16, max_iterations=6, tolerance=0.0)
    prompts = [[1, 0, 2, 0, 5], [3], [2, 2]]
    numbers = [decoder.submit(Request(prompt=prompt, max_new_tokens=7)) for prompt in prompts]
    made: dict[int, list[int]] = {number: [] for number in numbers}
    for new in decoder.run():
        made[new.request].append(new.token)
    for number, prompt in zip(numbers, prompts, strict=True):
        alone = generate(model, [prompt], max_new_tokens=7, max_iterations=6, tolerance=0.0)
        assert made[number] == alone.tokens[0].tolist()


@pytest.mark.parametrize("combination", COVERING, ids=name)
def test_covering_combinations_train_resume_and_generate(combination, tmp_path):
    check_generation(train_in_two_parts(combination, tmp_path / "run", FEW_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("combination", ALL, ids=name)
def test_all_combinations_resume_bit_for_bit(combination, tmp_path):
    model = train_in_two_parts(combination, tmp_path / "parts")
    whole = build(run_spec(combination), output=tmp_path / "whole", device="cpu")
    whole.train()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for (key, value), other in zip(
        model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    check_generation(model)


def test_the_covering_selection_includes_every_kind():
    for number, parts in enumerate((MIXERS, SOLVERS, GRADIENTS)):
        assert {part["kind"] for part in parts} == {chosen[number]["kind"] for chosen in COVERING}
    assert {part["kind"] for part in MIXERS} >= {"attention", "mamba2"}


def test_undeclared_combinations_are_refused():
    for solver, gradient in itertools.product(SOLVERS, GRADIENTS):
        if not may_be_combined(solver, gradient):
            with pytest.raises(SpecError, match="differentiable"):
                ib.ImplicitLMSpec(
                    vocab_size=6, d_model=16, n_layers=1, mixer=MIXERS[0], solver=solver, gradient=gradient
                )
