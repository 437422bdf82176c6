"""CUDA graphs of the map, with captures simulated on the CPU: what is captured, memory pools, lifetimes."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.cuda import capture as capturing
from implicit_blocks.models import map_graphs as graphs


def test_every_differentiated_call_gets_its_own_graph_and_memory_pool(monkeypatch):
    captured, pools = [], []

    class Step:
        in_use = False

        def __init__(self, f, z_BLD, steps, pool):
            captured.append(z_BLD.requires_grad)
            pools.append(pool)
            assert steps == graphs.ONE_CALL

        def call(self, given):
            self.in_use = True
            return f.compute(given[0])

    class Search:
        def __init__(self, f, z_BLD):
            self.f = f

        def takes(self, z_BLD):
            return True

        def call(self, z_BLD, pool):
            searched.append(pool)
            return self.f.compute(z_BLD)

    searched = []
    monkeypatch.setattr(graphs, "_StepGraph", Step)
    monkeypatch.setattr(graphs, "_SearchGraph", Search)
    handles = iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    torch.manual_seed(0)
    mixer = ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)
    model = ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=1, mixer=mixer))
    ids = torch.randint(61, (2, 24))
    f, z = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
    made = graphs.MapGraphs()
    points = [z]
    for _ in range(3):
        points.append(made.call(f, points[-1].detach() if points[-1] is z else points[-1]))
    torch.testing.assert_close(points[3], f.compute(points[2]))
    assert captured == [False, True, True]
    with torch.no_grad():  # a step graph uses the memory pool of the searches until its backward
        made.call(f, z)
    assert not searched
    for steps in made._steps.values():
        for step in steps:
            step.in_use = False  # as after backward
    with torch.no_grad():
        made.call(f, z)
        made.call(f, z)
    assert searched == 2 * [pools[0]]
    made.call(f, points[1])
    assert captured == [False, True, True]
    assert len(set(pools)) == 3


class Graph:
    """Replaces a CUDA graph on the CPU: a capture computes eagerly, and a replay does nothing."""

    def replay(self):
        pass


@pytest.fixture
def captures(monkeypatch):
    """Simulate captures on the CPU; return the list of the captures begun."""
    begun = []

    @contextmanager
    def capture(graph, **options):
        begun.append(graph)
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(capturing, "clear_cublas_workspaces", lambda: None)
    return begun


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("damping", [0.8, 1.0])
def test_phantom_steps_are_captured_as_one_graph(captures, count, damping):
    torch.manual_seed(0)
    mixer = ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)
    model = ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=1, mixer=mixer))
    steps = graphs.Steps(count, damping)
    ids = torch.arange(48).view(2, 24)
    f, start = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
    z = f.compute(start).detach()
    made = graphs.MapGraphs()
    value = made.call(f, z, steps)
    torch.testing.assert_close(value, f.compute(z, steps), rtol=0, atol=0)
    assert len(captures) == 2  # forward and backward, for any number of steps
    (graph,) = next(iter(made._steps.values()))
    assert graph.in_use
    value.sum().backward()
    assert not graph.in_use
    assert all(p.grad is not None for p in model.backbone.parameters())
    f, _ = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
    made.call(f, z, steps)
    assert len(captures) == 2
    made.call(f, z, steps._replace(damping=0.5))
    assert len(captures) == 4


@pytest.mark.parametrize("layers", [1, 2])
def test_a_replayed_graph_uses_the_dropout_masks_of_the_current_pass(captures, layers):
    torch.manual_seed(0)
    mixer = ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)
    fields = {"vocab_size": 61, "d_model": 32, "n_layers": layers, "mixer": mixer, "dropout": 0.3}
    model = ib.build(ib.ImplicitLMSpec(**fields)).train()
    ids, steps, made, seen = torch.arange(48).view(2, 24), graphs.Steps(3, 0.8), graphs.MapGraphs(), []
    for _ in range(2):
        f, start = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
        z = start.detach()
        with torch.no_grad():
            made.call(f, z)
        value = made.call(f, z, steps)
        value.sum().backward()
        (graph,) = next(iter(made._steps.values()))
        (search,) = made._searches.values()
        with torch.no_grad():
            # A replay computes the map on the graph's own memory.
            seen.append(graph._f.compute(z, steps))
            torch.testing.assert_close(seen[-1], f.compute(z, steps), rtol=0, atol=0)
            torch.testing.assert_close(search._f.compute(z), f.compute(z), rtol=0, atol=0)
    assert not torch.allclose(*seen)
    before = len(captures)
    model.eval()  # without dropout masks other graphs are captured
    f, start = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
    torch.testing.assert_close(made.call(f, start.detach(), steps), f.compute(start, steps), rtol=0, atol=0)
    assert len(captures) == before + 2


def test_a_memory_pool_is_not_reused_after_a_failed_capture(captures, monkeypatch, caplog):
    handles, pools, broken = iter(range(1, 9)), [], [False]

    @contextmanager
    def capture(graph, *, pool, **options):
        pools.append(pool)
        yield
        if broken[0]:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    torch.manual_seed(0)
    mixer = ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)
    model = ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=1, mixer=mixer))
    ids = torch.arange(48).view(2, 24)
    f, start = model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())
    made = graphs.MapGraphs()

    def search(rows):
        part = f if rows == 2 else f.select_rows(torch.arange(rows))
        with torch.no_grad():
            made.call(part, start[:rows])
            made.call(part, start[:rows])

    search(2)
    broken[0] = True
    steps = graphs.Steps(3, 0.8)
    z = start.detach()
    torch.testing.assert_close(made.call(f, z, steps), f.compute(z, steps), rtol=0, atol=0)
    assert "eagerly" in caplog.text
    broken[0] = False
    search(1)
    assert pools == [(0, 1), (0, 1), (0, 2)]


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_no_compilation_happens_during_a_capture(monkeypatch, captures):
    """Compiled code depends on whether autocast caches casts; captures disable that cache."""
    compiled, inside = [], []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    @contextmanager
    def capture(graph, **options):
        before = len(compiled)
        yield
        inside.append(len(compiled) - before)

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    torch.manual_seed(0)
    mixer = ib.AttentionSpec(n_heads=2)
    model = ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=2, mixer=mixer))
    for part in (*model.backbone.blocks(), model.backbone.norm):
        part.compile(backend=backend, dynamic=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        f, start = model.bind(
            model.embedding(torch.randint(61, (2, 24))), model.initial_state(2), weights=model.cache_weights()
        )
        made = graphs.MapGraphs()
        with torch.no_grad():
            z = start
            for _ in range(4):
                z = made.call(f, z)
        made.call(f, made.call(f, start.detach()))
        made.call(f, start.detach(), graphs.Steps(4, 0.8))
    assert compiled
    # Two pairs of buffers; forward and backward of two calls and of four steps.
    assert len(inside) == 2 + 2 * 3
    assert not any(inside)


def bound(model):
    ids = torch.arange(48).view(2, 24)
    return model.bind(model.embedding(ids), model.initial_state(2), weights=model.cache_weights())


def small(**changes):
    torch.manual_seed(0)
    mixer = ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)
    return ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=1, mixer=mixer, **changes))


def test_a_model_and_its_graphs_are_freed_by_reference_counting(captures):
    model = small()
    made = model.backbone.graphs = graphs.MapGraphs()
    f, z = bound(model)
    made.call(f, z.detach()).sum().backward()
    with torch.no_grad():
        for _ in range(3):
            made.call(f, z)
    assert made._searches
    known = [ref(model.backbone), ref(made), ref(next(iter(made._steps.values()))[0])]
    gc.collect()
    gc.disable()
    try:
        del model, made, f, z
        assert [each() for each in known] == [None] * 3
    finally:
        gc.enable()


def test_a_parameter_unfrozen_after_a_capture_gets_its_gradient(captures):
    model, made = small(), graphs.MapGraphs()
    frozen = model.backbone.blocks()[0].mixer.out_proj.parametrizations.weight.original1
    for thawed in (False, True, False):
        frozen.requires_grad_(thawed)
        f, z = bound(model)
        made.call(f, z.detach()).sum().backward()
        assert (frozen.grad is not None) == thawed
        model.zero_grad(set_to_none=True)
    assert len(captures) == 4  # one graph for the frozen parameter, one for the trained parameter
    assert len(made._steps) == 2


def test_training_and_evaluation_modes_are_captured_separately(captures):
    model, made = small(), graphs.MapGraphs()
    for training in (True, False, True, False):
        f, z = bound(model.train(training))
        with torch.no_grad():
            made.call(f, z)
            made.call(f, z)
    assert len(captures) == 2


@pytest.mark.parametrize("where", ["layer", "norm", "everywhere"])
def test_modules_with_hooks_run_eagerly(captures, where, caplog):
    model, made, called = small(), graphs.MapGraphs(), []

    def search():
        f, z = bound(model)
        with torch.no_grad():
            for _ in range(3):
                made.call(f, z)
        made.call(f, z.detach()).sum().backward()

    search()
    before = len(captures)
    assert before
    if where == "everywhere":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    else:
        block = model.backbone.blocks()[0]
        module = {"layer": block, "norm": block.mixer.norm}[where]
        handle = module.register_forward_hook(lambda *_: called.append(1))
    search()
    search()
    assert len(called) >= 8
    assert len(captures) == before
    assert caplog.text.count("have hooks") == 1
    handle.remove()
    called.clear()
    search()
    assert not called


def test_implicit_function_gradients_use_graphs_only_for_the_search(captures):
    """The adjoint solve needs many Jacobian products of one call; a graph runs backward once."""
    made = graphs.MapGraphs()
    f, z = bound(small())
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(tolerance=0.0, max_iterations=3))
    gradient = ib.ImplicitFunction(stopping=ib.Stopping(tolerance=0.0, max_iterations=4))
    gradient(lambda point: made.call(f, point), z.detach(), search).z.sum().backward()
    assert captures
    assert made._searches
    assert not made._steps


def test_buffers_that_share_weights_track_their_current_owner(captures):
    """The windows of one model have one copy of the weights, whatever their length."""
    model, made = small(), graphs.MapGraphs()
    first, z = bound(model)
    with torch.no_grad():
        made.call(first, z)
        for p in model.backbone.parameters():
            p.mul_(1.5)
        ids = torch.arange(32).view(2, 16)
        second, start = model.bind(
            model.embedding(ids), model.initial_state(2), weights=model.cache_weights()
        )
        made.call(second, start)
        assert not made._buffers[graphs._key(first, z)].hold(first)
        made.call(first, z)
    for own, given in zip(
        made._buffers[graphs._key(first, z)].weights.copy.tensors(), first.weights.tensors(), strict=True
    ):
        torch.testing.assert_close(own, given)
