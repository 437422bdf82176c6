"""Models that keep one state per loop: calls that commit against calls that do not, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.models.implicit import ImplicitLM

MODEL: dict[str, Any] = {
    "vocab_size": 11,
    "d_model": 16,
    "n_layers": 2,
    "mixer": {"kind": "attention", "n_heads": 2},
    "mlp": {"kind": "mlp", "d_ff": 24},
    "prelude": {"n_layers": 1},
    "injection": {"kind": "residual"},
    "embedding_std": 1.0,
    "weight_norm": False,
    "state_policy": "per_loop",
    "at_evaluation": {"exit": {"kind": "fixed", "loops": 3}},
}


def built(**changes: Any) -> ImplicitLM:
    torch.manual_seed(0)
    model: ImplicitLM = ib.build(ib.ImplicitLMSpec.model_validate({**MODEL, **changes}))
    return model.double().eval()


def tokens() -> torch.Tensor:
    return torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(3))


PER_LOOP: dict[str, dict[str, Any]] = {
    "all loops": {"gradient": {"kind": "last_loops"}},
    "last loop": {"gradient": {"kind": "last_loops", "loops": 1, "residual_weight": 0.5}},
    "two loops": {"gradient": {"kind": "last_loops", "loops": 2, "residual_weight": 0.5}},
    "an early iterate": {
        "gradient": {"kind": "last_loops"},
        "objective": {"kind": "iterates", "at": [1, "last"]},
    },
}


@pytest.mark.parametrize("changes", PER_LOOP.values(), ids=PER_LOOP)
@pytest.mark.parametrize("options", [{"return_state": True}, {"window_length": 3}], ids=["state", "windows"])
def test_one_state_per_loop_trains_like_a_call_that_commits_nothing(changes, options):
    found = []
    for chosen in ({}, options):
        model, ids = built(depth={"kind": "fixed", "loops": 3}, **changes).train(), tokens()
        output = model(ids, labels=ids, **chosen)
        penalty = 0.0 if output.solution.penalty is None else output.solution.penalty.sum()
        (output.loss + penalty).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append([output.loss.detach(), torch.cat(gradients)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


def test_the_penalty_is_a_mean_over_the_real_tokens_of_all_windows():
    gradient = {"kind": "last_loops", "residual_weight": 0.5}
    model, ids = built(depth={"kind": "fixed", "loops": 3}, gradient=gradient).train(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 2:] = 0, 0
    for attention_mask in (None, mask):
        whole, cut = (
            model(ids, attention_mask=attention_mask, window_length=length).solution.penalty
            for length in (None, 3)
        )
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=0)


UNEQUAL_LOOPS: dict[str, dict[str, Any]] = {
    "another depth": {"depth": {"kind": "fixed", "loops": 4}, "gradient": {"kind": "last_loops"}},
    "a depth per sequence": {
        "depth": {"kind": "uniform", "low": 3, "high": 3, "per": "sequence"},
        "gradient": {"kind": "last_loops"},
    },
    "a search": {},
}


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("changes", UNEQUAL_LOOPS.values(), ids=UNEQUAL_LOOPS)
def test_training_commits_only_the_loops_of_the_kept_states(changes, loops):
    model, ids = built(**changes, at_evaluation={"exit": {"kind": "fixed", "loops": loops}}).train(), tokens()
    assert model(ids).logits.shape == (3, 8, 11)  # nothing is committed
    for options in ({"return_state": True}, {"window_length": 3}):
        with pytest.raises(
            ValueError, match=rf"{loops} loops, .* loops .*depth 'fixed' of {loops} loops.*'last_loops'"
        ):
            model(ids, **options)
    assert model(ids, loops=loops, return_state=True).solution.iterations.tolist() == [loops] * 3


def test_the_states_of_a_single_loop_are_those_of_one_pass():
    single = {"at_evaluation": {"exit": {"kind": "fixed", "loops": 1}}}
    train = {"depth": {"kind": "fixed", "loops": 1}, "gradient": {"kind": "last_loops"}}
    for model in (built(**single), built(**single, **train).train()):
        ids = tokens()
        with torch.no_grad():
            torch.testing.assert_close(model(ids, window_length=3).logits, model(ids).logits)
            with pytest.raises(ValueError, match="takes loops 2"):
                model(ids, window_length=3, loops=2)


def test_the_status_of_one_state_per_loop_follows_the_options_of_the_call():
    model, ids = built(), tokens()
    for tolerance in (1.0, 1e-12):
        with torch.no_grad():
            plain, kept = (
                model(ids, trace=True, tolerance=tolerance, return_state=state) for state in (False, True)
            )
        assert bool(kept.solution.converged.all()) == (tolerance == 1.0)
        torch.testing.assert_close(kept.solution.trace, plain.solution.trace)
