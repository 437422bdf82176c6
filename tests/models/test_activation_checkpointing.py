"""Activation checkpointing: equal gradients, fewer saved activations, one more call of each layer."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

MAMBA2 = {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}
ATTENTION = {"kind": "attention", "n_heads": 2}
GRADIENTS = [
    {"kind": "phantom", "steps": 3},
    {"kind": "unrolled", "steps": 3},
    {"kind": "implicit_function"},
    None,
]
STEPS = 3
ONE_STEP = {"kind": "phantom", "steps": 1}


def model_of(mixer, gradient, **changes):
    spec = {
        "vocab_size": 11,
        "d_model": 16,
        "n_layers": 2,
        "mixer": mixer,
        "mlp": {"kind": "swiglu", "d_ff": 24},
    }
    if gradient is None:
        spec["kind"] = "explicit_lm"
    else:
        spec |= {"kind": "implicit_lm", "gradient": gradient, "stopping": {"max_iterations": 5}}
    spec |= changes
    torch.manual_seed(0)
    return ib.build(ib.ModelSpec.model_validate(spec)).double().train()


def gradients(model, checkpoint):
    """Return the loss, the gradients, the bytes saved for backward, and the calls of the first layer."""
    model.backbone.activation_checkpointing = checkpoint
    saved = {}
    calls = []
    block = model.backbone.blocks()[0]
    hook = block.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    ids = torch.randint(0, 11, (2, 12))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, return_logits=False).loss
    loss.backward()
    hook.remove()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found, sum(saved.values()), calls


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda g: "explicit" if g is None else g["kind"])
@pytest.mark.parametrize("mixer", [MAMBA2, ATTENTION], ids=lambda m: m["kind"])
def test_activation_checkpointing_keeps_gradients_and_saves_memory(mixer, gradient, dropout):
    model = model_of(mixer, gradient, dropout=dropout)
    loss, expected, saved_without, _ = gradients(model, "none")
    for checkpoint in ("steps", "layers"):
        recomputed, found, saved, _ = gradients(model, checkpoint)
        assert torch.equal(recomputed, loss)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-15), name
        assert saved < 0.8 * saved_without


@pytest.mark.parametrize("mixer", [MAMBA2, ATTENTION], ids=lambda m: m["kind"])
def test_the_search_saves_no_activations_for_backward(mixer):
    """The saved bytes grow with the phantom steps, by the same amount each, and not with the iterations."""

    def saved_bytes(steps, iterations):
        stopping = {"tolerance": 1e-30, "max_iterations": iterations}
        model = model_of(mixer, {"kind": "phantom", "steps": steps}, stopping=stopping)
        _, _, saved, calls = gradients(model, "none")
        assert calls.count(False) == iterations
        return saved

    one, two, three = (saved_bytes(steps, 3) for steps in (1, 2, 3))
    assert saved_bytes(2, 12) == two
    assert two > 1.4 * one
    assert three - two == pytest.approx(two - one, rel=0.02)


@pytest.mark.parametrize("checkpoint", ["steps", "layers"])
def test_checkpointing_recomputes_phantom_steps_but_not_the_search(checkpoint):
    model = model_of(MAMBA2, {"kind": "phantom", "steps": STEPS})
    _, _, _, plain = gradients(model, "none")
    _, _, _, checkpointed = gradients(model, checkpoint)
    assert plain.count(True) == STEPS
    assert checkpointed.count(True) == 2 * STEPS
    assert checkpointed.count(False) == plain.count(False)


def test_waiting_for_another_process_does_not_change_a_converged_search():
    # Simulates another process that needs more iterations than this one.
    model = model_of(
        ATTENTION, {"kind": "phantom", "steps": 1}, stopping={"tolerance": 0.3, "max_iterations": 32}
    )
    ids = torch.arange(6)[None] % 11
    with torch.no_grad():
        alone = model(ids).solution
        asked = []
        model.agree = lambda done: asked.append(done) or len(asked) >= 9
        together = model(ids).solution
    assert asked == sorted(asked)
    assert len(asked) == 9
    assert int(alone.iterations) == int(together.iterations) < 9
    assert torch.equal(alone.z, together.z)


def test_a_fixed_budget_calls_the_map_max_iterations_times():
    from implicit_blocks.search.agreement import fixed_budget

    model = model_of(
        ATTENTION, {"kind": "phantom", "steps": 1}, stopping={"tolerance": 0.9, "max_iterations": 9}
    )
    model.agree = fixed_budget
    calls = []
    model.backbone.blocks()[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    ids = torch.arange(6)[None] % 11
    solution = model(ids, labels=ids).solution
    assert calls == [False] * model.stopping.max_iterations + [True]
    assert int(solution.iterations) < model.stopping.max_iterations
