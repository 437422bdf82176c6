"""Every mixer × solver × gradient that may be combined trains, saves, resumes and generates.

The library's own kinds and those of this repository's plugins, as far as they are installed. All combinations
are in the slow suite; the fast one takes each solver with each gradient, the mixers in turn.
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
D_MODEL, STEPS = 16, 20

# Settings of kinds that can't do, or would take long, without.
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
    # With its published norm_eps, heads this narrow magnify outputs near 0 until the map no longer contracts.
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
    ("gradient", "phantom"): {"steps": 2},
    ("gradient", "unrolled"): {"steps": 4},
    ("gradient", "reversible"): {"steps": 4},
}


def owners() -> set[str]:
    """Return the distributions that the matrix is about: this one, and the folders in ``plugins``."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    return {tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files}


def components(family: str) -> list[dict[str, Any]]:
    """Return every kind of a family as a spec's mapping."""
    known = owners()
    kinds = [kind for kind in registry.kinds(family) if registry.entry(family, kind).owner in known]
    return [{"kind": kind, **SETTINGS.get((family, kind), {})} for kind in kinds]


MIXERS, SOLVERS, GRADIENTS = map(components, ("mixer", "solver", "gradient"))
Combination = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def may_be_combined(solver: dict[str, Any], gradient: dict[str, Any]) -> bool:
    """Say what the kinds declare: who differentiates the solver needs one that can be."""
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


def run_spec(combination: Combination) -> RunSpec:
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
                "max_steps": STEPS,
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


def trained_in_two_parts(combination: Combination, folder: Path) -> torch.nn.Module:
    """Train half of the steps, go on from the checkpoint in a new model; the loss must have fallen."""
    spec = run_spec(combination)
    assert build(spec, output=folder, device="cpu").train(stop_at=STEPS // 2) is None
    resumed = build(spec, output=folder, device="cpu", resume=True)
    assert resumed.train() is not None
    fell = losses(folder)
    assert len(fell) == STEPS
    assert sum(fell[-5:]) < 0.9 * sum(fell[:5]), fell
    return resumed.model


def generates(model: torch.nn.Module) -> None:
    """Continue prompts of unlike lengths; each row as if it were alone.

    In float64: a search that has not converged may magnify what float32 rounds otherwise in another batch.
    """
    model.double().eval()
    prompts = [[1, 0, 2, 0], [3]]
    made = generate(model, prompts, max_new_tokens=4, return_logits=True)
    assert made.tokens.shape == (2, 4)
    assert made.logits is not None
    assert bool(made.logits.isfinite().all())
    assert made.iterations is not None
    assert bool((made.iterations >= 1).all())
    alone = generate(model, prompts[1:], max_new_tokens=1, return_logits=True)
    torch.testing.assert_close(alone.logits[0, 0], made.logits[1, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer["kind"])
def test_texts_decoded_side_by_side_are_those_alone(mixer):
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
def test_a_covering_selection(combination, tmp_path):
    generates(trained_in_two_parts(combination, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("combination", ALL, ids=name)
def test_all_of_them_resume_to_the_last_bit(combination, tmp_path):
    model = trained_in_two_parts(combination, tmp_path / "parts")
    whole = build(run_spec(combination), output=tmp_path / "whole", device="cpu")
    whole.train()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for (key, value), other in zip(
        model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    generates(model)


def test_every_kind_has_its_turn_in_the_fast_suite():
    for number, parts in enumerate((MIXERS, SOLVERS, GRADIENTS)):
        assert {part["kind"] for part in parts} == {chosen[number]["kind"] for chosen in COVERING}
    assert {part["kind"] for part in MIXERS} >= {"attention", "mamba2"}


def test_what_is_not_declared_compatible_is_refused():
    for solver, gradient in itertools.product(SOLVERS, GRADIENTS):
        if not may_be_combined(solver, gradient):
            with pytest.raises(SpecError, match="is not differentiable"):
                ib.ImplicitLMSpec(
                    vocab_size=6, d_model=16, n_layers=1, mixer=MIXERS[0], solver=solver, gradient=gradient
                )
