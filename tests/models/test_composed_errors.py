"""Choices of composed models that do not fit are refused with the place, the value and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.specs import SpecError

ATTENTION: dict[str, Any] = {"kind": "attention", "n_heads": 2}
BIDIRECTIONAL = {**ATTENTION, "causal": False}
MAMBA2 = {"kind": "mamba2", "head_dim": 8, "d_state": 8}
MODEL: dict[str, Any] = {
    "vocab_size": 7,
    "d_model": 16,
    "n_layers": 2,
    "mixer": ATTENTION,
    "injection": {"kind": "add"},
}
LOOPS = {"gradient": {"kind": "last_loops"}, "depth": {"kind": "fixed", "loops": 4}}
FIXED = {"exit": {"kind": "fixed", "loops": 3}}
NARROW = {"core_d_model": 8, "core_projection": True}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    # patterns and stacks
    "unfilled pattern": (
        {"layers": [{"mixer": ATTENTION}, {"repeat": 2}]},
        r"layers: n_layers 2 is not a multiple of the 3 layers",
    ),
    "unfilled pattern of the coda": (
        {"coda": {"n_layers": 3, "layers": [{"repeat": 2}]}},
        r"coda\.layers: n_layers 3 .* 2 layers",
    ),
    "unfilled pattern of the core": (
        {"layers": [{}, {"mixer": MAMBA2}], "prelude": {"n_layers": 1}},
        r"prelude\.n_layers: n_layers 1 .* 2 layers of the core's pattern.*prelude\.layers: \[\]",
    ),
    "empty core": ({"n_layers": 0}, r"n_layers: the core has no layers; choose at least 1.*got 0"),
    "empty prelude": ({"prelude": {"n_layers": 0}}, r"prelude\.n_layers: .*\(null\); got 0"),
    # injections and starts
    "width of the injection": (
        NARROW,
        r"injection: .*'add'.*width 16.*width 8; set core_d_model to 16.*'concat'",
    ),
    "width of the start": (
        {**NARROW, "injection": {"kind": "concat"}, "z_init": "prelude"},
        r"z_init: .*'prelude'.*16.*width 8; choose another",
    ),
    "width of the injection without projection": (
        {"core_d_model": 8, "injection": {"kind": "residual"}},
        r"injection: .*'residual'.*width 8; .*'concat', 'diagonal' or 'projection' with core_proj",
    ),
    "width without projection": (
        {"core_d_model": 8, "injection": {"kind": "concat"}},
        r"core_d_model: .*8 .*16; set core_projection: true",
    ),
    "bias without projection": (
        {"core_projection_bias": True},
        r"core_projection_bias: no linear map .*set core_projection: true",
    ),
    "heads in the core's pattern": (
        {
            "layers": [{}, {"mixer": {"kind": "attention", "n_heads": 5}}],
            "n_layers": 2,
            "prelude": {"n_layers": 2},
        },
        r"layers\.1\.mixer: d_model 16 is not divisible by n_heads 5",
    ),
    "heads in a pattern of the prelude": (
        {"prelude": {"n_layers": 1, "layers": [{"mixer": {"kind": "attention", "n_heads": 5}}]}},
        r"prelude\.layers\.0\.mixer: d_model 16 is not divisible by n_heads 5",
    ),
    "heads of the prelude": (
        {"prelude": {"n_layers": 1, "mixer": {"kind": "attention", "n_heads": 5}}},
        r"prelude\.mixer: d_model 16 is not divisible by n_heads 5",
    ),
    "projections of unequal widths": (
        {"injection": {"kind": "projection"}, "layers": [{}, {"mixer": MAMBA2}]},
        r"injection: .*'projection'.*'48', '84'.*choose injection 'residual'",
    ),
    "no sight of the tokens": (
        {"injection": {"kind": "none"}, "z_init": "zeros"},
        r"z_init: .*'none'.*'zeros' does not; choose z_init 'prelude'",
    ),
    # depths
    "no loops": ({"depth": {"kind": "fixed", "loops": 0}}, r"depth\.loops: .*at least 1 loop; got 0"),
    "random depth with minimum 0": (
        {"depth": {"kind": "poisson", "mean": 4, "minimum": 0}},
        r"depth\.minimum: .*at least 1 loop; got 0",
    ),
    "random depth with maximum 0": (
        {"depth": {"kind": "log_normal_poisson", "mean": 4, "maximum": 0}},
        r"depth\.maximum: .*at least 1 loop; got 0",
    ),
    "random depth from 0": (
        {"depth": {"kind": "uniform", "low": 0, "high": 2}},
        r"depth\.low: .*at least 1 loop; got 0",
    ),
    "two numbers of steps": (
        {"depth": {"kind": "fixed", "loops": 3}, "gradient": {"kind": "unrolled"}},
        r"depth: .*'unrolled'.*'fixed'.*choose gradient 'last_loops'",
    ),
    "depth per sequence in a search": (
        {"depth": {"kind": "uniform", "high": 4, "per": "sequence"}},
        r"depth\.per: gradient 'phantom'.*choose gradient 'last_loops'",
    ),
    # objectives and gates
    "objective without a gate": (
        {**LOOPS, "objective": {"kind": "exit_mixture"}},
        r"objective: .*'exit_mixture'.*set exit_gate: true",
    ),
    "objective without loops": (
        {"objective": {"kind": "iterates", "at": [2]}},
        r"objective: .*'iterates'.*'phantom'.*choose gradient 'last_loops'",
    ),
    "iterate 0": (
        {**LOOPS, "objective": {"kind": "iterates", "at": [0, "last"]}},
        r"objective\.at\.0: choose .*at least 1, or 'last'; got 0",
    ),
    "iterate that is never reached": (
        {**LOOPS, "objective": {"kind": "iterates", "at": [2, 9]}},
        r"objective: iterate 9 .*'fixed' allows at most 4 loops; choose",
    ),
    "iterate after the search": (
        {
            "gradient": {"kind": "last_loops"},
            "stopping": {"max_iterations": 5},
            "objective": {"kind": "iterates", "at": [6]},
        },
        r"objective: iterate 6 .*stopping\.max_iterations allows at most 5",
    ),
    "iterate named twice": (
        {**LOOPS, "objective": {"kind": "iterates", "at": [2, 2]}},
        r"objective\.at: iterate 2 occurs twice",
    ),
    "no iterates": ({**LOOPS, "objective": {"kind": "iterates", "at": []}}, r"objective\.at: .*choose"),
    "weights of other iterates": (
        {**LOOPS, "objective": {"kind": "iterates", "at": [2], "weights": [1, 2]}},
        r"objective\.weights: 2 weights for 1 iterates",
    ),
    "exit by a missing gate": (
        {"at_evaluation": {"exit": {"kind": "gate"}}},
        r"at_evaluation\.exit: .*no exit gate; set exit_gate: true",
    ),
    "exit by a gate that is not trained": (
        {"exit_gate": True, "at_evaluation": {"exit": {"kind": "gate"}}},
        r"at_evaluation\.exit: objective 'last' does not train the exit gate; choose objective 'exit_exp",
    ),
    # states
    "states without a number of loops": (
        {"state_policy": "per_loop"},
        r"state_policy: .*'residual'.*set at_evaluation\.exit: \{kind: fixed",
    ),
    "states per loop and committed prefixes": (
        {"state_policy": "per_loop", "at_evaluation": {**FIXED, "commit_prefix": 4}},
        r"at_evaluation\.commit_prefix: .*set at_evaluation\.commit_prefix: null",
    ),
    "fixed loops and committed prefixes": (
        {"at_evaluation": {**FIXED, "commit_prefix": 4}},
        r"at_evaluation\.commit_prefix: .*set at_evaluation\.commit_prefix: null",
    ),
    "fixed loops in windows": (
        {"at_evaluation": {**FIXED, "window_length": 4}},
        r"at_evaluation\.window_length: .*set at_evaluation\.window_length: null",
    ),
    "loops without a search in windows": (
        {**LOOPS, "window_length": 4},
        r"window_length: gradient 'last_loops' has no search .*; set window_length: null",
    ),
    "loops until convergence in windows": (
        {"gradient": {"kind": "last_loops"}, "window_length": 4},
        r"window_length: gradient 'last_loops' has no search .*; set window_length: null",
    ),
    "penalized loops in windows": (
        {
            "gradient": {"kind": "jacobian_penalty", "gradient": {"kind": "last_loops"}},
            "window_length": 4,
        },
        r"window_length: gradient 'last_loops' has no search .*; set window_length: null",
    ),
    # bidirectional mixers
    "bidirectional in windows": (
        {"mixer": BIDIRECTIONAL, "window_length": 4},
        r"window_length: a mixer sees later tokens.*null",
    ),
    "bidirectional in windows of evaluation": (
        {"mixer": BIDIRECTIONAL, "at_evaluation": {"window_length": 4}},
        r"at_evaluation\.window_length: a mixer sees later tokens.*null",
    ),
    "bidirectional with committed prefixes": (
        {"mixer": BIDIRECTIONAL, "at_evaluation": {"commit_prefix": 4}},
        r"at_evaluation\.commit_prefix: a mixer sees later tokens.*null",
    ),
    "bidirectional with prefix scope": (
        {"mixer": BIDIRECTIONAL, "stopping": {"scope": "prefix"}},
        r"stopping\.scope: a mixer sees later tokens.*'sequence'",
    ),
    "bidirectional with prefix scope in evaluation": (
        {"mixer": BIDIRECTIONAL, "at_evaluation": {"stopping": {"scope": "prefix"}}},
        r"at_evaluation\.stopping\.scope: a mixer sees later tokens.*'sequence'",
    ),
    "bidirectional with exits per token": (
        {"mixer": BIDIRECTIONAL, "at_evaluation": {"exit": {"kind": "kl"}}},
        r"at_evaluation\.exit: a mixer sees later tokens.*'residual'",
    ),
    "bidirectional coda in windows": (
        {"coda": {"n_layers": 1, "mixer": BIDIRECTIONAL}, "window_length": 4},
        r"window_length: a mixer sees later tokens",
    ),
    "norm before the coda without a final norm": (
        {"norm_before_coda": True, "injection": {"kind": "projection"}},
        r"norm_before_coda: .*set core_norm: false",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_choices_that_do_not_fit_are_refused(case):
    fields, message = CASES[case]
    with pytest.raises(SpecError, match=message):
        ib.ImplicitLMSpec.model_validate({**MODEL, **fields})


def test_the_mixer_may_come_from_the_pattern_alone():
    fields = {**MODEL, "mixer": None, "layers": [{"mixer": MAMBA2}, {"mixer": ATTENTION}]}
    spec = ib.ImplicitLMSpec.model_validate(fields)
    assert [layer.mixer.kind for layer in spec.core.layers] == ["mamba2", "attention"]
    assert spec.mixer.kind == "mamba2"


def built(**fields: Any) -> Any:
    return ib.build(ib.ImplicitLMSpec.model_validate({**MODEL, **fields})).eval()


@pytest.mark.parametrize("stack", ["core", "coda"])
def test_a_bidirectional_model_predicts_but_does_not_decode(stack):
    fields = (
        {"mixer": BIDIRECTIONAL} if stack == "core" else {"coda": {"n_layers": 1, "mixer": BIDIRECTIONAL}}
    )
    model, ids = built(**fields), torch.randint(7, (2, 5))
    with torch.no_grad():
        before = model(ids, loops=2).logits[:, 0]
        ids[:, 4] = (ids[:, 4] + 1) % 7
        assert not torch.allclose(model(ids, loops=2).logits[:, 0], before)
    for decode in (
        lambda: ib.generate(model, [[1, 2]], max_new_tokens=2),
        lambda: list(ib.stream(model, [[1, 2]], max_new_tokens=2)),
        lambda: ib.score(model, [[1, 2]], [[3]]),
        lambda: ContinuousDecoder(model, max_batch_size=1, max_seq_len=8),
    ):
        with pytest.raises(ValueError, match=r"sees later tokens.*causal: true"):
            decode()
    for options in ({"window_length": 2}, {"return_state": True}):
        with pytest.raises(ValueError, match=r"sees later tokens.*leave out"):
            model(ids, **options)


@pytest.mark.parametrize(
    "options", [{"start": torch.zeros(1, 2, 16)}, {"trajectory": (1, 2)}], ids=["start", "trajectory"]
)
def test_decoding_refuses_options_that_concern_the_points_of_one_window(options):
    model, (name,) = built(), options
    for decode in (
        lambda: ib.generate(model, [[1, 2]], max_new_tokens=2, **options),
        lambda: list(ib.stream(model, [[1, 2]], max_new_tokens=2, **options)),
        lambda: ib.score(model, [[1, 2]], [[3]], **options),
        lambda: ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, **options),
    ):
        with pytest.raises(ValueError, match=rf"{name} .*model\(tokens, {name}="):
            decode()
    assert ib.generate(model, [[1, 2]], max_new_tokens=2, loops=2, trajectory=()).tokens.shape == (1, 2)


def test_a_warm_start_is_refused_where_only_the_start_depends_on_the_tokens():
    model = built(injection={"kind": "none"})
    for search in (
        lambda: model(torch.tensor([[1, 2]]), warm_start=True),
        lambda: ib.generate(model, [[1, 2]], max_new_tokens=2, warm_start=True),
        lambda: ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, warm_start=True),
    ):
        with pytest.raises(ValueError, match=r"injection 'none' .* warm_start"):
            search()


def test_numbers_of_loops_per_row_are_not_committed():
    model, ids = built(), torch.randint(7, (2, 4))
    with pytest.raises(ValueError, match="one number of loops for all"):
        model(ids, loops=ib.LoopCounts(torch.tensor([1, 2])), return_state=True)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        model(ids, loops=ib.LoopCounts(torch.tensor([1, 2, 3])))


def test_an_explicit_model_has_no_narrower_core():
    fields = {name: value for name, value in MODEL.items() if name != "injection"}
    with pytest.raises(SpecError, match=r"core_d_model: without an injection .*; set core_d_model: null"):
        ib.ExplicitLMSpec.model_validate({**fields, "core_d_model": 8})
