"""Options of composed models: placements, states, loops, trajectories, exits, objectives, masks.

Sizes are tiny and values are compared in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.models.implicit import ImplicitLM

VOCABULARY, WIDTH = 11, 16
ATTENTION = {"kind": "attention", "n_heads": 2}
MAMBA2 = {"kind": "mamba2", "d_state": 4, "expand": 1, "head_dim": 8, "chunk_size": 4}
SANDWICH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "n_layers": 1,
    "mixer": ATTENTION,
    "mlp": {"kind": "mlp", "d_ff": 24},
    "prelude": {"n_layers": 1},
    "coda": {"n_layers": 1},
    "injection": {"kind": "residual"},
    "embedding_std": 1.0,
    "weight_norm": False,
    "stopping": {"tolerance": 0.05, "max_iterations": 4},
    "at_evaluation": {
        "solver": {"kind": "picard"},
        "stopping": {"tolerance": 1e-8, "max_iterations": 200},
    },
}
LOOPED = {"depth": {"kind": "fixed", "loops": 4}, "gradient": {"kind": "last_loops"}}


def fixed(loops: int, **more: Any) -> dict[str, Any]:
    return {"at_evaluation": {"exit": {"kind": "fixed", "loops": loops}}, **more}


def built(*, contracting: bool = False, **changes: Any) -> ImplicitLM:
    """Build a model in float64; ``contracting`` divides the core's branches."""
    torch.manual_seed(0)
    model: ImplicitLM = ib.build(ib.ImplicitLMSpec.model_validate({**SANDWICH, **changes})).double().eval()
    if contracting:
        with torch.no_grad():
            for block in model.backbone.blocks():
                for projection in block.output_projections():
                    projection.weight.mul_(0.2)
    return model


def tokens(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def losses(model: ImplicitLM, *, steps: int = 8, **options: Any) -> list[float]:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found, ids = [], tokens()
    for _ in range(steps):
        loss = model(ids, labels=(ids + 1) % VOCABULARY, **options).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


LAYERS: dict[str, dict[str, Any]] = {
    "post": {"norm_placement": "post"},
    "sandwich": {"norm_placement": "sandwich"},
    "pre-post": {"norm_placement": "pre_post"},
    "coda-alone-post": {"coda": {"n_layers": 1, "norm_placement": "post"}},
    "layer-scale": {"residual_scaling": {"kind": "layer_scale"}},
    "bounded-gate": {"residual_scaling": {"kind": "bounded_gate", "maximum": 0.75, "init": 0.5}},
    "deepnorm": {"residual_scaling": {"kind": "deepnorm", "alpha": 1.2}, "norm_placement": "post"},
    "pattern": {
        "n_layers": 4,
        "layers": [{"mixer": MAMBA2}, {"mixer": ATTENTION}],
        "prelude": {"n_layers": 1, "layers": []},
        "coda": {"n_layers": 2},
    },
    "pattern-repeat": {
        "n_layers": 3,
        "layers": [{"mixer": MAMBA2, "repeat": 2}, {"mixer": ATTENTION}],
        "prelude": {"n_layers": 1, "mixer": MAMBA2},
        "coda": None,
    },
    "narrow-core": {
        "core_d_model": 8,
        "core_projection": True,
        "core_projection_bias": True,
        "injection": {"kind": "concat"},
    },
    "wide-core": {"core_d_model": 24, "core_projection": True, "injection": {"kind": "diagonal"}},
    "core-residual": {"core_residual": True, "core_norm": True},
    "norm-before-coda": {"norm_before_coda": True},
    "prelude-norm": {"prelude_norm": True, "embedding_scale": 3.0, "logit_scale": 0.5, "logit_softcap": 9.0},
    "weight-norm": {"weight_norm": True},
    "no-coda": {"coda": None},
    "no-prelude": {"prelude": None, "core_norm": True},
    "untied": {"tie_embeddings": False},
}


@pytest.mark.parametrize("layers", LAYERS)
def test_a_stack_trains_and_its_cached_loops_equal_the_full_pass(layers):
    per_loop = fixed(3, state_policy="per_loop")
    model = built(**{**LAYERS[layers], **LOOPED, **per_loop})
    per_step = losses(model)
    assert per_step[-1] < per_step[0]
    ids = tokens()
    with torch.no_grad():
        whole = model.eval()(ids)
        cut = model(ids, window_length=3)
        torch.testing.assert_close(cut.logits, whole.logits)
        assert whole.solution.iterations.tolist() == cut.solution.iterations.tolist() == [3, 3, 3]
    made = ib.generate(model, ids[:, :3], max_new_tokens=4, return_logits=True)
    with torch.no_grad():
        full = model(torch.cat((ids[:, :3], made.tokens), dim=1))
    torch.testing.assert_close(made.logits, full.logits[:, 2:-1])


@pytest.mark.parametrize("mixer", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
@pytest.mark.parametrize("injection", ["none", "add", "concat", "diagonal"])
def test_one_state_per_loop_decodes_the_tokens_of_full_passes(injection, mixer):
    model = built(injection={"kind": injection}, mixer=mixer, **fixed(3, state_policy="per_loop"))
    prompts = [[1, 2, 3, 4], [5], [9, 8]]
    made = ib.generate(model, prompts, max_new_tokens=4, return_logits=True)
    for row, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, *made.tokens[row].tolist()]])
        with torch.no_grad():
            full = model(text).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(made.logits[row], full)


# ----------------------------------------------------------------------------------- loops and iterates


@pytest.mark.parametrize("kind", ["searched", "looped"])
@pytest.mark.parametrize("coda", [None, {"n_layers": 1}], ids=["no-coda", "coda"])
def test_iterates_predict_what_as_many_loops_predict(kind, coda):
    model = built(coda=coda, contracting=True)
    ids, options = tokens(), ({} if kind == "searched" else {"loops": 4})
    with torch.no_grad():
        out = model(ids, trajectory=(1, 3), **options)
        for t in (1, 3):
            assert out.trajectory[t].z_BLC.shape == (3, 7, WIDTH)
            logits = model.predict(out.trajectory[t].hidden_BLD)
            torch.testing.assert_close(logits, model(ids, loops=t).logits)


@pytest.mark.parametrize("policy", ["converged", "per_loop"])
def test_iterates_of_a_call_that_commits_include_the_last_loop(policy):
    model = built(**fixed(3, state_policy=policy))
    ids = tokens()
    with torch.no_grad():
        plain = model(ids, trajectory=(1, 2, 3))
        kept = model(ids, trajectory=(1, 2, 3), return_state=True)
        after = model(ids, trajectory=(2, 3), state=kept.state, return_state=True)
    assert sorted(plain.trajectory) == sorted(kept.trajectory) == [1, 2, 3]
    for t, iterate in plain.trajectory.items():
        torch.testing.assert_close(kept.trajectory[t].hidden_BLD, iterate.hidden_BLD)
    torch.testing.assert_close(model.predict(after.trajectory[3].hidden_BLD), after.logits)
    assert plain.solution.iterations.tolist() == kept.solution.iterations.tolist() == [3, 3, 3]


@pytest.mark.parametrize("window_length", [None, 2])
def test_iterates_do_not_change_the_state(window_length):
    model, ids = built(), tokens()
    outputs = []
    with torch.no_grad():
        for trajectory in ((), (1, 2)):
            state = model.initial_state(3, max_seq_len=9)
            first = model(
                ids, state=state, trajectory=trajectory, return_state=True, window_length=window_length
            )
            outputs.append(model(tokens(length=2), state=first.state).logits)
    assert torch.equal(outputs[0], outputs[1])


def test_rows_and_tokens_take_their_own_numbers_of_loops():
    model, ids = built(contracting=True), tokens()
    per_row = torch.tensor([1, 4, 2])
    per_token = torch.ones(3, 7, dtype=torch.int64) * 3
    with torch.no_grad():
        found = model(ids, loops=ib.LoopCounts(per_row))
        for row, loops in enumerate(per_row.tolist()):
            torch.testing.assert_close(found.logits[row], model(ids[row : row + 1], loops=loops).logits[0])
        by_token = model(ids, loops=ib.LoopCounts(per_token))
        torch.testing.assert_close(by_token.logits, model(ids, loops=3).logits)
        per_token[:, 4:] = 1  # causal: earlier tokens are as before
        torch.testing.assert_close(
            model(ids, loops=ib.LoopCounts(per_token)).logits[:, :4], by_token.logits[:, :4]
        )
    assert found.solution.iterations.tolist() == [1, 4, 2]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_the_last_k_of_n_loops_are_differentiated(training):
    ids = tokens()
    labels = (ids + 1) % VOCABULARY
    gradients = {}
    for name, loops in {"all": 4, "four": (4, 4), "two": (4, 2), "none": (4, 0)}.items():
        model = built(injection={"kind": "add"}).train(training)
        loss = model(ids, labels=labels, loops=loops).loss
        loss.backward()
        gradients[name] = (float(loss.detach()), model.backbone.layers[0].mlp.in_proj.weight.grad)
    values = [value for value, _ in gradients.values()]
    assert values == pytest.approx([values[0]] * 4, rel=1e-12)
    torch.testing.assert_close(gradients["all"][1], gradients["four"][1])
    assert not torch.allclose(gradients["all"][1], gradients["two"][1])
    assert gradients["none"][1] is None


COMMITTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loops": ({}, {"loops": 5}),
    "last of the loops": ({}, {"loops": (5, 2)}),
    "no loop": ({}, {"loops": (5, 0)}),
    "last_loops": ({**LOOPED, "gradient": {"kind": "last_loops", "loops": 2}}, {}),
    "phantom": ({**LOOPED, "gradient": {"kind": "phantom", "steps": 2}}, {}),
    "implicit_function": ({**LOOPED, "gradient": {"kind": "implicit_function"}}, {}),
}


@pytest.mark.parametrize(("changes", "options"), COMMITTED.values(), ids=COMMITTED)
def test_committing_changes_neither_loss_nor_gradient(changes, options):
    found = []
    for return_state in (False, True):
        model = built(**changes).train()
        loss = model(tokens(), labels=tokens(), return_state=return_state, **options).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loops", [1, 4])
@pytest.mark.parametrize("differentiated", [None, 1, 2])
def test_the_penalty_of_a_call_that_commits_is_that_of_the_last_loop(loops, differentiated):
    gradient = {"kind": "last_loops", "loops": differentiated, "residual_weight": 0.5}
    model = built(depth={"kind": "fixed", "loops": loops}, gradient=gradient).train()
    start = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    found = model(tokens(), return_state=True, start=start, trajectory=range(1, loops + 1))
    before = found.trajectory[loops - 1].z_BLC if loops > 1 else start
    after = found.trajectory[loops].z_BLC
    if differentiated == 1:
        before = before.detach()
    expected = 0.5 * ((after - before).square().sum(-1) / after.square().sum(-1)).mean(1)
    torch.testing.assert_close(found.solution.penalty.double(), expected, rtol=1e-5, atol=1e-9)
    weight = model.backbone.layers[0].mlp.in_proj.weight
    ours, theirs = (
        torch.autograd.grad(penalty.sum(), weight, retain_graph=True)[0]
        for penalty in (found.solution.penalty, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


def test_a_given_start_is_where_the_loops_begin():
    model, ids = built(), tokens()
    with torch.no_grad():
        first = model(ids, loops=2, trajectory=(2,))
        whole = model(ids, loops=5)
        onward = model(ids, loops=3, start=first.trajectory[2].z_BLC)
        torch.testing.assert_close(onward.logits, whole.logits)


def test_a_given_start_is_divided_into_windows():
    model, ids = built(**fixed(3, state_policy="per_loop")), tokens()
    start = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        whole, cut = model(ids, start=start), model(ids, start=start, window_length=3)
    torch.testing.assert_close(cut.logits, whole.logits)
    for wrong in (start[:, :5], start[:2], start[..., :4]):
        with pytest.raises(ValueError, match=r"start has shape .*the state of the core has \(3, 7, 16\)"):
            model(ids, start=wrong)


def test_a_warm_start_reaches_the_same_point():
    model, ids = built(contracting=True), tokens()
    with torch.no_grad():
        plain, warm = (model(ids, window_length=2, warm_start=warm) for warm in (False, True))
        torch.testing.assert_close(warm.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert bool(warm.solution.converged.all())


def test_windows_of_a_search_agree_with_one_pass():
    model, ids = built(contracting=True, core_residual=True, norm_before_coda=True), tokens()
    with torch.no_grad():
        whole, cut = model(ids), model(ids, window_length=2)
    torch.testing.assert_close(cut.logits, whole.logits, rtol=1e-5, atol=1e-5)


def test_other_loops_than_those_of_the_kept_states_are_refused():
    model, ids = built(**fixed(3, state_policy="per_loop")), tokens()
    assert model(ids, loops=2).logits.shape == (3, 7, VOCABULARY)  # nothing is committed
    model(ids, loops=3, return_state=True)
    with pytest.raises(ValueError, match=r"3 loops.*loops 2.*at_evaluation\.exit"):
        model(ids, loops=2, return_state=True)
    with pytest.raises(ValueError, match=r"3 loops.*exit .*at_evaluation\.exit"):
        model(ids, exit=ib.KLExitSpec(), window_length=2)


# -------------------------------------------------------------------------------- exits and objectives


@pytest.mark.parametrize(
    "criterion",
    [
        {"kind": "residual"},
        {"kind": "second_difference", "tolerance": 1e-7},
        {"kind": "kl", "tolerance": 1e-12},
        {"kind": "argmax_stability", "calls": 12},
        {"kind": "gate", "threshold": 1.0},
        {"kind": "fixed", "loops": 25},
    ],
    ids=lambda criterion: criterion["kind"],
)
def test_strict_exit_criteria_predict_the_fixed_point(criterion):
    model = built(contracting=True, exit_gate=True)
    gated = {**LOOPED, "objective": {"kind": "exit_mixture"}} if criterion["kind"] == "gate" else {}
    strict = built(
        contracting=True,
        exit_gate=True,
        **gated,
        at_evaluation={**SANDWICH["at_evaluation"], "exit": criterion},
    )
    strict.load_state_dict(model.state_dict())
    ids = tokens()
    with torch.no_grad():
        expected, found = model(ids, loops=100).logits, strict(ids)
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
        alone = strict(ids[1:2, :5])
        torch.testing.assert_close(alone.logits[0], found.logits[1, :5], rtol=1e-4, atol=1e-4)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "iterates": {"objective": {"kind": "iterates", "at": [2, 4, "last"], "weights": [1, 2, 3]}},
    "exit-mixture": {"objective": {"kind": "exit_mixture"}, "exit_gate": True},
    "exit-expectation": {"objective": {"kind": "exit_expectation"}, "exit_gate": True},
}


@pytest.mark.parametrize("depth", ["fixed", "sequence", "until_converged"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_trains_the_model_and_its_gate(objective, depth):
    depths = {
        "fixed": {"kind": "fixed", "loops": 4},
        "sequence": {"kind": "uniform", "low": 1, "high": 4, "per": "sequence"},
        "until_converged": {"kind": "until_converged"},
    }
    model = built(**OBJECTIVES[objective], depth=depths[depth], gradient={"kind": "last_loops"})
    per_step = losses(model)
    assert per_step[-1] < per_step[0]
    if model.exit_gate is not None:
        assert float(model.exit_gate.weight.grad.abs().sum()) > 0


def test_the_loss_of_iterates_is_the_weighted_mean_of_their_losses():
    model = built(**OBJECTIVES["iterates"], **LOOPED)
    ids = tokens()
    labels = (ids + 1) % VOCABULARY
    labels[0, :2] = -100
    each = {n: float(model(ids, labels=labels, loops=n).loss.detach()) for n in (2, 4)}
    found = float(model.train()(ids, labels=labels).loss.detach())
    assert found == pytest.approx((each[2] + 2 * each[4] + 3 * each[4]) / 6, rel=1e-10)
    shorter = float(model(ids, labels=labels, loops=3).loss.detach())  # iterate 4 is left out
    last = float(model.eval()(ids, labels=labels, loops=3).loss.detach())
    assert shorter == pytest.approx((each[2] + 3 * last) / 4, rel=1e-10)


def test_the_loss_until_an_error_omits_the_tokens_after_it():
    model = built(objective={"kind": "until_error"}, **LOOPED)
    ids = tokens()
    model.eval()
    with torch.no_grad():
        labels = model(ids, loops=4).logits.argmax(-1)
    labels[0, 1] = -100
    labels[0, 3] = (labels[0, 3] + 1) % VOCABULARY  # the first error of the first sequence
    labels[0, 5] = (labels[0, 5] + 1) % VOCABULARY
    kept = labels.clone()
    kept[0, 4:] = -100
    expected = model(ids, labels=kept, loops=4).loss.detach()  # in evaluation: the mean over all labels
    assert float(expected) != pytest.approx(float(model(ids, labels=labels, loops=4).loss.detach()))
    found = model.train()(ids, labels=labels).loss
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-10)


def test_windows_in_training_have_the_iterates_of_the_objective():
    model = built(**OBJECTIVES["iterates"], **LOOPED).train()
    ids = tokens()
    out = model(ids, labels=ids, window_length=3)
    out.loss.backward()
    assert sorted(out.trajectory) == [2, 4]
    assert bool(out.loss.isfinite())


def test_the_exit_objectives_follow_their_equations():
    ids = tokens()
    labels = (ids + 1) % VOCABULARY
    labels[1, 3:] = -100
    labelled = labels != -100
    for name in ("exit-mixture", "exit-expectation"):
        model = built(**OBJECTIVES[name], **LOOPED)
        steps = model(ids, loops=4, trajectory=(1, 2, 3, 4)).trajectory
        logits = torch.stack([model.predict(steps[t].hidden_BLD) for t in (1, 2, 3, 4)], dim=2)
        gates = [model.exit_gate(steps[t].z_BLC).squeeze(-1).sigmoid() for t in (1, 2, 3)]
        stay, share = torch.ones_like(gates[0]), []
        for gate in gates:
            share.append(gate * stay)
            stay = stay * (1 - gate)
        p = torch.stack([*share, stay], dim=-1)
        target = labels.clamp(min=0)
        if name == "exit-mixture":
            mixed = (p[..., None] * logits).sum(2).log_softmax(-1)
            expected = -mixed.gather(-1, target[..., None])[..., 0]
        else:
            each = -logits.log_softmax(-1).gather(-1, target[:, :, None, None].expand(-1, -1, 4, 1))[..., 0]
            expected = (p * each).sum(-1) + 0.05 * (p * p.log()).sum(-1)
        found = model.train()(ids, labels=labels).loss
        torch.testing.assert_close(found, expected[labelled].mean())


# ------------------------------------------------------------------------- masks, documents, checkpointing

SEARCHES: dict[str, dict[str, Any]] = {
    "searched": {},
    "looped": {"loops": 3},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_row(search, side):
    model, ids = built(contracting=True, injection={"kind": "diagonal"}), tokens()
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :3] = 0
        real = slice(3, None)
    else:
        mask[1, 4:] = 0
        real = slice(0, 4)
    options = SEARCHES[search]
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, **options)
        alone = model(ids[1:2, real], **options)
        whole = model(ids, **options)
    torch.testing.assert_close(padded.logits[1, real], alone.logits[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded.logits[[0, 2]], whole.logits[[0, 2]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("mixer", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
def test_packed_documents_are_solved_as_alone(mixer, search):
    model, ids = built(contracting=True, mixer=mixer), tokens()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3)
    options = SEARCHES[search]
    with torch.no_grad():
        packed = model(ids, documents=documents, **options)
        for part in (slice(0, 3), slice(3, 7)):
            alone = model(ids[:, part], **options)
            torch.testing.assert_close(packed.logits[:, part], alone.logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("injection", ["projection", "residual", "concat"])
@pytest.mark.parametrize("gradient", ["phantom", "last_loops"])
def test_activation_checkpointing_does_not_change_gradients(gradient, injection):
    ids, found = tokens(), []
    for unit in ("none", "steps", "layers"):
        model = built(gradient={"kind": gradient}, injection={"kind": injection}, dropout=0.2).train()
        for stack in model.stacks():
            stack.activation_checkpointing = unit
        torch.manual_seed(7)  # the same dropout
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient_of in found[0].items():
            torch.testing.assert_close(other[name], gradient_of, msg=name)


def test_dropout_has_one_mask_in_all_loops():
    model = built(dropout=0.5, injection={"kind": "residual"}).train()
    ids = tokens()
    torch.manual_seed(1)
    one = model(ids, loops=1).logits
    torch.manual_seed(1)
    again = model(ids, loops=1).logits
    torch.manual_seed(2)
    other = model(ids, loops=1).logits
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    evaluated = model.eval()(ids, loops=1).logits
    assert not torch.equal(one, evaluated)
