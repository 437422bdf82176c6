"""Every allowed combination of injection, start, depth, gradient and mixer, between a prelude and a coda.

Each combination trains 20 steps with a falling loss, resumes from a checkpoint with the same next loss,
generates, and where the map contracts, windows agree with one pass. The slow suite runs all combinations; the
fast suite runs a selection in which every pair of choices occurs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.layers import assign_weight, plain_weight
from implicit_blocks.specs import SpecError

VOCABULARY, WIDTH, ROWS, LENGTH, STEPS = 7, 16, 4, 6, 20
FEW_STEPS = 8  # in the fast suite

ATTENTION = {"kind": "attention", "n_heads": 2}
MAMBA2 = {
    "kind": "mamba2",
    "d_state": 7,
    "expand": 1,
    "head_dim": 8,
    "chunk_size": 4,
}  # projections as wide as attention
MLP = {"kind": "mlp", "d_ff": 24}
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"n_layers": 1, "mixer": ATTENTION, "mlp": MLP},
    "mamba2": {"n_layers": 1, "mixer": MAMBA2},
    "pattern": {"n_layers": 2, "layers": [{"mixer": MAMBA2}, {"mixer": ATTENTION, "mlp": MLP}]},
}
INJECTIONS: dict[str, dict[str, Any]] = {
    "projection": {"kind": "projection"},
    "none": {"kind": "none"},
    "add": {"kind": "add"},
    "concat": {"kind": "concat"},
    "diagonal": {"kind": "diagonal"},
    "attractor": {"kind": "attractor"},
    "residual": {"kind": "residual"},
    "gated": {"kind": "residual", "gate_init": 0.5},
}
STARTS: dict[str, dict[str, Any]] = {
    "zeros": {"kind": "zeros"},
    "embedding": {"kind": "embedding"},
    "prelude": {"kind": "prelude", "noise_std": 0.1},
    "normal": {"kind": "normal", "std": 0.5, "truncation": 3},
    "learned": {"kind": "learned", "init_std": 0.1},
}
DEPTHS: dict[str, dict[str, Any]] = {
    "until_converged": {"kind": "until_converged"},
    "fixed": {"kind": "fixed", "loops": 3},
    "poisson": {"kind": "poisson", "mean": 2, "maximum": 4},
    "log_normal_poisson": {"kind": "log_normal_poisson", "mean": 2, "maximum": 4, "per": "sequence"},
    "uniform": {"kind": "uniform", "low": 1, "high": 3, "per": "sequence"},
}
GRADIENTS: dict[str, dict[str, Any]] = {
    "phantom": {"kind": "phantom", "steps": 2},
    "implicit_function": {"kind": "implicit_function", "stopping": {"tolerance": 1e-2, "max_iterations": 8}},
    "jacobian_penalty": {
        "kind": "jacobian_penalty",
        "weight": 0.1,
        "gradient": {"kind": "phantom", "steps": 2},
    },
    "unrolled": {"kind": "unrolled", "steps": 3},
    "last_loops": {"kind": "last_loops", "loops": 2},
    "one_step_adjoint": {"kind": "one_step_adjoint", "max_norm_ratio": 1.0},
}
AXES = (INJECTIONS, STARTS, DEPTHS, GRADIENTS, MIXERS)
CONTRACTING = ("concat", "diagonal", "attractor", "residual", "gated")
"""Injections with which a core of small branches contracts; z + e, for example, has no fixed point."""
FAMILIES = ("injection", "start", "depth", "gradient")
Combination = tuple[str, str, str, str, str]


def spec_of(combination: Combination) -> ib.ImplicitLMSpec:
    injection, start, depth, gradient, mixer = combination
    return ib.ImplicitLMSpec.model_validate(
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            **MIXERS[mixer],
            "prelude": {"n_layers": 1, "layers": [], "mixer": ATTENTION},
            "coda": {"n_layers": 1, "layers": [], "mixer": ATTENTION},
            "embedding_std": 0.5,
            "injection": INJECTIONS[injection],
            "z_init": STARTS[start],
            "depth": DEPTHS[depth],
            "gradient": GRADIENTS[gradient],
            "stopping": {"tolerance": 0.05, "max_iterations": 3},
            "at_evaluation": {"stopping": {"tolerance": 1e-4, "max_iterations": 16}},
        }
    )


def refusal(combination: Combination) -> str | None:
    """Return the remedy with which choices that do not fit together are refused; None: they are allowed."""
    injection, start, depth, gradient, _ = combination
    if injection == "none" and start not in ("embedding", "prelude"):
        return "choose z_init 'prelude'"
    if gradient == "unrolled":
        return None if depth == "until_converged" else "choose gradient 'last_loops'"
    per_batch = DEPTHS[depth].get("per") != "sequence"
    return None if per_batch or gradient == "last_loops" else "choose gradient 'last_loops'"


EVERY = list(itertools.product(*AXES))
ALL = [combination for combination in EVERY if refusal(combination) is None]


def pairs(combination: Combination) -> set[tuple[int, str, int, str]]:
    numbered = list(enumerate(combination))
    return {(i, one, j, other) for (i, one), (j, other) in itertools.combinations(numbered, 2)}


def covering() -> Iterator[Combination]:
    """Yield combinations until every pair of choices that is allowed has occurred, greedily."""
    pairs_of = {combination: pairs(combination) for combination in ALL}
    missing = set().union(*pairs_of.values())
    while missing:
        best = max(ALL, key=lambda combination: len(pairs_of[combination] & missing))
        missing -= pairs_of[best]
        yield best


def batches(seed: int = 5) -> Iterator[torch.Tensor]:
    """Yield batches of tokens, from which labels are computed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


class Trained:
    """A model, its optimizer and its data."""

    def __init__(self, combination: Combination) -> None:
        torch.manual_seed(1)
        self.model = ib.build(spec_of(combination))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)

    def step(self, ids: torch.Tensor) -> float:
        out = self.model(ids, labels=(ids + 3) % VOCABULARY)
        self.optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(out.loss.detach())

    def checkpoint(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))

    def load(self, checkpoint: Any) -> None:
        self.model.load_state_dict(checkpoint[0])
        self.optimizer.load_state_dict(checkpoint[1])
        torch.set_rng_state(checkpoint[2])


def check_training(combination: Combination, steps: int) -> torch.nn.Module:
    """Train, and resume the last two steps in a new model; return the trained model."""
    data = list(itertools.islice(batches(), steps))
    run = Trained(combination)
    losses = [run.step(ids) for ids in data[:-2]]
    saved = run.checkpoint()
    losses += [run.step(ids) for ids in data[-2:]]
    assert sum(losses[-3:]) < (0.9 if steps == STEPS else 1) * sum(losses[:3]), losses
    resumed = Trained(combination)
    resumed.load(saved)
    assert [resumed.step(ids) for ids in data[-2:]] == losses[-2:]
    return run.model


def check_generation(model: torch.nn.Module) -> None:
    """Generate from prompts of unequal lengths, each as alone."""
    prompts = [[1, 0, 2], [3]]
    made = ib.generate(model, prompts, max_new_tokens=3, return_logits=True)
    assert made.tokens.shape == (2, 3)
    assert bool(made.logits.isfinite().all())
    alone = ib.generate(model, prompts[1:], max_new_tokens=1, return_logits=True)
    torch.testing.assert_close(alone.logits[0, 0], made.logits[1, 0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def check_windows(model: torch.nn.Module) -> None:
    """Check that windows agree with one pass, once weights are scaled down until the map contracts."""
    for block in model.backbone.blocks():
        for projection in block.output_projections():
            assign_weight(projection, 0.2 * plain_weight(projection))
    if isinstance(model.injection, ib.Concat):
        weight = plain_weight(model.injection.proj).clone()
        weight[:, :WIDTH] *= 0.5  # what multiplies the state
        assign_weight(model.injection.proj, weight)
    ids = next(batches(seed=6))
    search = {"tolerance": 1e-6, "max_iterations": 400}
    one, cut = (model(ids, window_length=length, **search) for length in (None, 4))
    assert bool(one.solution.converged.all())
    torch.testing.assert_close(cut.logits, one.logits, rtol=1e-3, atol=1e-3)


def check(combination: Combination, steps: int) -> None:
    model = check_training(combination, steps).double().eval()
    check_generation(model)
    if combination[0] in CONTRACTING:
        check_windows(model)


@pytest.mark.parametrize("combination", [*covering()], ids="-".join)
def test_a_covering_selection_trains_resumes_generates_and_windows_agree(combination):
    check(combination, FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("injection", "start", "mixer"), [*itertools.product(INJECTIONS, STARTS, MIXERS)])
def test_all_combinations_train_resume_generate_and_windows_agree(injection, start, mixer):
    chosen = [each for each in ALL if (each[0], each[1], each[4]) == (injection, start, mixer)]
    failed = {}
    for combination in chosen:
        try:
            check(combination, STEPS)
        except Exception as error:  # every combination runs, whatever happens to the others
            failed["-".join(combination)] = f"{type(error).__name__}: {error}"
    assert len(chosen) == (0 if injection == "none" and start not in ("embedding", "prelude") else 18)
    assert not failed


def test_every_kind_occurs():
    for family, axis in zip(FAMILIES, AXES, strict=False):
        own = {
            kind for kind in registry.kinds(family) if registry.entry(family, kind).owner == "implicit_blocks"
        }
        assert {choice["kind"] for choice in axis.values()} >= own


def test_combinations_that_do_not_fit_are_refused_with_a_remedy():
    refused = [each for each in EVERY if refusal(each) is not None and each[0] in ("add", "none")]
    assert refused
    for combination in refused:
        with pytest.raises(SpecError, match=refusal(combination)):
            spec_of(combination)
