"""Phantom steps captured as one CUDA graph equal separate calls and sums."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


def built(mixer):
    torch.manual_seed(0)
    return ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=64, n_layers=2, **MIXERS[mixer])).cuda().train()


def tokens(seed, rows=4, length=64, vocabulary=61):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, length), generator=generator).cuda()


def bound(model, ids):
    """Return the map of these tokens and its starting point."""
    state, weights = model.initial_state(len(ids)), model.cache_weights()
    return model.bind(model.embedding(ids), state, weights=weights, ids_BL=ids)


def stepped(model, f, z, take):
    """Return the value after the steps, and gradients of a function of it that the norm does not absorb."""
    value = take(f, z)
    value.sin().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return value.detach(), found


def one_by_one(f, z):
    for _ in range(4):
        z = torch.lerp(z, f.compute(z), 0.8)
    return z


def in_a_row(f, z):
    return f.damped_steps(z, count=4, damping=0.8)


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_phantom_steps_are_one_graph_and_equal_separate_calls(mixer):
    model = built(mixer)
    model.capture_graphs()
    for seed in range(3):
        f, z = bound(model, tokens(seed))
        z = f.compute(z).detach()
        expected, wanted = stepped(model, f, z, one_by_one)
        f, _ = bound(model, tokens(seed))
        found, grads = stepped(model, f, z, in_a_row)
        assert sum(map(len, model.backbone.graphs._steps.values())) == 1
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (grads[name] - grad).norm() < 1e-3 * grad.norm() + 1e-6, name


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_captured_phantom_steps_equal_separate_calls_at_state_tracking_size():
    spec = ib.load_spec("mamba2_state_tracking").model
    torch.manual_seed(0)
    model = ib.build(spec).cuda().train()
    model.compile_layers()
    results = []
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for seed in range(3):  # one captured, two replayed
            f, z = bound(model, tokens(seed, 512, 256, spec.vocab_size))
            with torch.no_grad():
                for _ in range(4):
                    z = f.compute(z)
            results.append((z, stepped(model, f, z, one_by_one)))
        model.capture_graphs()
        for seed, (z, (expected, wanted)) in enumerate(results):
            f, _ = bound(model, tokens(seed, 512, 256, spec.vocab_size))
            found, grads = stepped(model, f, z, in_a_row)
            assert (found - expected).norm() < 5e-3 * expected.norm()
            for name, grad in wanted.items():
                assert (grads[name] - grad).norm() < 2e-2 * grad.norm() + 1e-6, name


def test_results_of_a_pass_are_unchanged_by_the_next_pass():
    model = built("mamba2")
    model.capture_graphs()
    kept = []
    for seed in range(3):
        f, z = bound(model, tokens(seed))
        value = in_a_row(f, z.detach())
        value.sin().sum().backward()
        kept.append((value.detach(), value.detach().clone()))
        for found, expected in kept:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("last", [1, 3, None])
def test_captured_last_loops_equal_eager_ones(last):
    model = built("attention")
    changes = {"gradient": ib.LastLoopsSpec(loops=last), "stopping": ib.Stopping(max_iterations=5)}
    model.reconfigure(model.spec.model_copy(update=changes))

    def gradients(seed):
        ids = tokens(seed)
        output = model(ids, labels=ids)
        output.loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return output.loss.detach(), output.solution.residual, found

    expected = [gradients(seed) for seed in range(3)]
    model.capture_graphs()
    for seed, (loss, residual, wanted) in enumerate(expected):
        found, of_search, grads = gradients(seed)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_search, residual, rtol=1e-3, atol=1e-5)
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (grads[name] - grad).norm() < 1e-3 * grad.norm() + 1e-6, name


def test_loops_of_rows_are_masked_on_the_device():
    counts = torch.tensor([1, 4, 2])
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(), loops=ib.LoopCounts(counts.cuda()))
    found = search(lambda z: 2 * z, torch.ones(3, 2, device="cuda"))
    assert found.z[:, 0].tolist() == [2, 16, 4]
    assert found.iterations.tolist() == counts.tolist()
