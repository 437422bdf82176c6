"""The map captured as CUDA graphs computes the values and gradients of eager execution."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.cuda import set_sync_debug_mode

import implicit_blocks as ib
from implicit_blocks.cuda.capture import capture, clear_cublas_workspaces
from implicit_blocks.layers import RMSNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


def built(mixer, **changes):
    fields = {"vocab_size": 61, "d_model": 64, "n_layers": 2, "gradient": ib.PhantomSpec(steps=2)}
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=12)
    torch.manual_seed(0)
    model = ib.build(ib.ImplicitLMSpec(**(fields | {"stopping": stopping} | MIXERS[mixer] | changes)))
    return model.cuda().train()


def tokens(seed=5, rows=4, length=64):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def step(model, *batches):
    losses = [model(ids, labels=ids, return_logits=False).loss for ids in batches]
    sum(losses).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return torch.stack(losses).detach(), grads


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_training_steps_equal_eager_steps(mixer):
    eager, captured = built(mixer), built(mixer)
    captured.capture_graphs()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, captured)]
    for seed in range(5):  # the first runs eagerly, the second captures, later ones replay with other weights
        assert_same(step(captured, tokens(seed)), step(eager, tokens(seed)))
        for model, optimizer in zip((eager, captured), optimizers, strict=True):
            model(tokens(seed), labels=tokens(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # so that rounding errors do not accumulate over the steps
            for own, other in zip(captured.parameters(), eager.parameters(), strict=True):
                own.copy_(other)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    "gradient", [ib.PhantomSpec(steps=3), ib.UnrolledSpec(steps=4)], ids=["phantom", "unrolled"]
)
def test_captured_dropout_is_drawn_anew_each_step(mixer, gradient):
    eager, captured = (built(mixer, dropout=0.3, gradient=gradient) for _ in range(2))
    captured.capture_graphs()
    losses = []
    for seed in range(5):
        results = []
        for model in (captured, eager):
            torch.cuda.manual_seed(seed)
            results.append(step(model, tokens(0)))
        assert_same(*results)
        losses.append(float(results[0][0]))
    assert len(set(losses)) == 5
    assert not captured.backbone.graphs._refused
    assert captured.backbone.graphs._steps


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_dropout_follows_compacted_rows(mixer):
    stopping = ib.Stopping(tolerance=1e-4, max_iterations=40)
    eager, captured = (built(mixer, dropout=0.3, stopping=stopping) for _ in range(2))
    captured.capture_graphs()
    for seed in range(4):
        ids = tokens(seed, rows=16)
        ids[1:, 1:] = ids[1:, :1]  # rows of unequal difficulty
        results = []
        for model in (captured, eager):
            torch.cuda.manual_seed(seed)
            results.append(step(model, ids))
        assert_same(*results)


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_captured_gradients_at_state_tracking_size_equal_eager_gradients():
    # Activations that the first of four calls saves for backward are larger than a cuBLAS workspace here. A
    # workspace shared by all captures once contained them, which made gradients NaN.
    spec = ib.load_spec("mamba2_state_tracking").model
    spec = spec.model_copy(update={"stopping": ib.Stopping(tolerance=0.0, max_iterations=4)})
    torch.manual_seed(0)
    model = ib.build(spec).cuda().train()
    model.compile_layers()
    batches = [
        torch.randint(spec.vocab_size, (512, 256), generator=torch.Generator().manual_seed(seed)).cuda()
        for seed in range(2)
    ]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eager = [step(model, ids) for ids in batches]
        model.capture_graphs()
        captured = [step(model, ids) for ids in batches]  # the second without another capture
    assert sum(map(len, model.backbone.graphs._steps.values())) == 1
    for found, expected in zip(captured, eager, strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
        for name, grad in expected[1].items():
            assert (found[1][name] - grad).norm() < 2e-2 * grad.norm() + 1e-6, name


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize("mixer", MIXERS)
def test_compiled_layers_are_captured(mixer):
    model = built(mixer)
    model.compile_layers()
    batches = [tokens(seed, rows=8, length=128) for seed in range(3)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eager = [step(model, ids) for ids in batches]
        model.capture_graphs()
        captured = [step(model, ids) for ids in batches]
    assert not model.backbone.graphs._refused
    assert sum(map(len, model.backbone.graphs._steps.values())) == 1
    for found, expected in zip(captured, eager, strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
        for name, grad in expected[1].items():
            assert (found[1][name] - grad).norm() < 2e-2 * grad.norm() + 1e-6, name


def test_a_captured_product_leaves_no_cublas_workspace_in_its_pool():
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum()
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with capture(graph, pool):
        (x @ x).sum()
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    assert segments
    assert sum(segment["allocated_size"] for segment in segments) == 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_two_captured_passes_before_one_backward_equal_eager_passes(mixer):
    eager, captured = built(mixer), built(mixer)
    captured.capture_graphs()
    for _ in range(3):
        step(captured, tokens(0))
    assert_same(step(captured, tokens(1), tokens(2)), step(eager, tokens(1), tokens(2)))


def test_captured_gradients_accumulate_over_micro_batches():
    eager, captured = built("mamba2"), built("mamba2")
    captured.capture_graphs()
    for _ in range(2):
        step(captured, tokens(0))
    for model in (eager, captured):
        for seed in (1, 2, 3):
            model(tokens(seed), labels=tokens(seed)).loss.backward()
    for own, other in zip(captured.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_a_second_backward_through_a_captured_pass_is_refused():
    model = built("attention")
    model.capture_graphs()
    for _ in range(2):
        step(model, tokens(0))
    loss = model(tokens(1), labels=tokens(1)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("mixer", MIXERS)
def test_implicit_function_gradients_with_captured_searches_equal_eager_gradients(mixer):
    gradient = ib.ImplicitFunctionSpec()
    eager, captured = (built(mixer, gradient=gradient) for _ in range(2))
    captured.capture_graphs()
    for seed in range(3):
        found, expected = step(captured, tokens(seed)), step(eager, tokens(seed))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
        for name, grad in expected[1].items():
            assert (found[1][name] - grad).norm() < 1e-2 * grad.norm() + 1e-6, name
    graphs = captured.backbone.graphs
    assert graphs._searches
    # The adjoint solve needs many Jacobian products of one call, but a graph runs backward once.
    assert not graphs._steps


def test_a_parameter_unfrozen_after_a_capture_gets_its_gradient():
    eager, captured = built("mamba2"), built("mamba2")
    captured.capture_graphs()

    def grads(model):
        model(tokens(0), labels=tokens(0), return_logits=False).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return found

    for frozen in (True, True, False, False):
        for model in (eager, captured):
            for parameter in model.backbone.blocks()[0].parameters():
                parameter.requires_grad_(not frozen)
        torch.testing.assert_close(grads(captured), grads(eager), rtol=1e-3, atol=1e-5)


def test_modules_with_hooks_run_eagerly(caplog):
    model, called = built("mamba2").eval(), []
    model.capture_graphs()
    with torch.no_grad():
        expected = [model(tokens()).logits for _ in range(3)][-1]
        handle = model.backbone.blocks()[1].mixer.out_proj.register_forward_hook(lambda *_: called.append(1))
        found = model(tokens())
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
        assert len(called) >= found.solution.iterations.max()
        assert "hooks" in caplog.text
        handle.remove()
        called.clear()
        model(tokens())
    assert not called


def test_garbage_collection_does_not_end_a_capture(monkeypatch):
    """CUDA does not permit destroying an unreachable graph during a capture."""
    first, second = built("mamba2"), built("mamba2")
    for model in (first, second):
        model.capture_graphs()
    for _ in range(3):
        step(first, tokens(0))
    first.backbone.graphs.itself = first.backbone.graphs  # a cycle: only the collector frees it
    plain, kept = RMSNorm._normed, []

    def normed(self, x):
        if torch.cuda.is_current_stream_capturing() and len(kept) < 2_000_000:
            kept.extend([] for _ in range(500_000))  # enough objects to trigger a full collection
        return plain(self, x)

    gc.collect()
    del first, model
    monkeypatch.setattr(RMSNorm, "_normed", normed)
    for _ in range(3):
        step(second, tokens(0))
    assert kept
    assert not second.backbone.graphs._refused
    assert second.backbone.graphs._steps


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_evaluation_with_compacted_rows_equals_eager_evaluation(mixer):
    eager, captured = (built(mixer).eval() for _ in range(2))
    captured.capture_graphs()
    with torch.inference_mode():
        for seed in range(4):
            ids = tokens(seed, rows=16)
            ids[1:, 1:] = ids[1:, :1]  # rows of unequal difficulty
            found, expected = (model(ids, tolerance=1e-4, max_iterations=40) for model in (captured, eager))
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
            assert found.solution.iterations.tolist() == expected.solution.iterations.tolist()


def test_windows_with_padding_or_states_equal_eager_windows():
    eager, captured = (built("mamba2").eval() for _ in range(2))
    captured.capture_graphs()
    mask = torch.ones(4, 64, device="cuda")
    mask[1, 40:] = 0
    with torch.no_grad():
        for _ in range(3):
            found, expected = (m(tokens(), attention_mask=mask).logits for m in (captured, eager))
            torch.testing.assert_close(found[0], expected[0])
            found, expected = (m(tokens(), window_length=16).logits for m in (captured, eager))
            torch.testing.assert_close(found, expected)


def bound(model, ids):
    """Return the map of these tokens and its starting point."""
    state, weights = model.initial_state(len(ids)), model.cache_weights()
    return model.bind(model.embedding(ids), state, weights=weights, ids_BL=ids)


@pytest.mark.parametrize("mixer", MIXERS)
def test_returned_values_are_never_overwritten(mixer):
    eager, captured = built(mixer), built(mixer)
    captured.capture_graphs()
    with torch.no_grad():
        (f, z), (plain, _) = (bound(model, tokens()) for model in (captured, eager))
        values, expected = [z], [z]
        for _ in range(8):  # more values than buffers
            values.append(f(values[-1]))
            expected.append(plain(expected[-1]))
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
        kept = values[-1][:2]
        del values
        for _ in range(12):  # undamped: each value is read from its buffer
            z = f(z)
        for _ in range(3):
            z = torch.lerp(z, f(z), 0.5)
        torch.testing.assert_close(kept, expected[-1][:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_search_between_forward_and_backward_keeps_gradients(mixer):
    """One step graph keeps its activations in the memory pool of the search graphs."""
    models = [built(mixer), built(mixer)]
    models[1].capture_graphs()
    found = []
    for model in models:
        for seed in range(3):
            f, z = bound(model, tokens(seed))
            with torch.no_grad():
                for _ in range(4):
                    z = f(z)
            value = f(z)
            with torch.no_grad():
                for _ in range(3):
                    z = f(z)
            leaves = list(model.backbone.parameters())
            grads = torch.autograd.grad(value.square().sum(), leaves, allow_unused=True)
        found.append([value.detach(), z, *grads])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_captured_injection_tables_equal_eager_tables():
    eager, captured, by_token = (built("mamba2") for _ in range(3))
    captured.capture_graphs()
    by_token.embedding.register_forward_hook(lambda module, given, x: x)  # a hook disables the table
    for seed in range(4):
        ids = tokens(seed, rows=16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert bound(eager, ids)[0].by_row
            assert not bound(by_token, ids)[0].by_row
            found, expected, wanted = (step(model, ids) for model in (captured, eager, by_token))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(expected[0], wanted[0], rtol=2e-3, atol=0)
        for name, grad in wanted[1].items():
            # A captured step sums gradients in another order, a difference of 2e-3 in bfloat16.
            assert (found[1][name] - expected[1][name]).norm() < 1e-2 * grad.norm() + 1e-6, name
            assert (expected[1][name] - grad).norm() < 2e-2 * grad.norm() + 1e-6, name


def test_a_copied_model_captures_its_own_graphs():
    model = built("attention")
    model.capture_graphs()
    for _ in range(2):
        step(model, tokens(0))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.embedding.weight.mul_(2.0)
    plain = copy.deepcopy(twin)
    plain.capture_graphs(False)
    for _ in range(3):
        assert_same(step(twin, tokens(1)), step(plain, tokens(1)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_training_never_synchronizes_with_the_device(mixer):
    model = built(mixer)
    model.capture_graphs()
    ids = tokens(0)
    for _ in range(3):
        step(model, ids)
    set_sync_debug_mode("error")
    try:
        loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
    finally:
        set_sync_debug_mode("default")
    assert loss.isfinite()


@pytest.mark.parametrize("kind", [ib.ImplicitLMSpec, ib.ExplicitLMSpec], ids=lambda kind: kind.__name__)
def test_a_models_graphs_are_freed_with_it(kind):
    """They are freed with the last reference to the model, without the garbage collector."""
    fields = {"vocab_size": 61, "d_model": 64, "n_layers": 2, **MIXERS["mamba2"]}

    def allocated():
        clear_cublas_workspaces()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    kept = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # the first round also allocates what kernels keep permanently
            before = allocated()
            model = ib.build(kind(**fields)).cuda().train()
            model.capture_graphs()
            for seed in range(3):
                step(model, tokens(seed, rows=64, length=256))
            alive = allocated() - before
            del model
            kept.append((alive, allocated() - before))
    finally:
        gc.enable()
    assert kept[-1][0] > 10_000_000
    assert kept[-1][1] < 0.02 * kept[-1][0]
