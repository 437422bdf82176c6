"""Compiled layers: no graph breaks, and the values and gradients of eager layers."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import implicit_blocks as ib
from implicit_blocks.analysis import spectral_radius
from implicit_blocks.models.training import COMPILE_OPTIONS

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "mamba2-one-chunk": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


@pytest.fixture
def defaults_of_the_compiler(monkeypatch, tmp_path):
    """Begin with an empty cache of compiled code, and let backward code overwrite saved tensors."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    with (
        torch._functorch.config.patch(donated_buffer=True),
        torch.compiler.config.patch(cache_key_tag=""),
    ):
        yield
    torch.compiler.reset()


def built(mixer):
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=32,
        n_layers=1,
        gradient=ib.PhantomSpec(steps=1),
        stopping=ib.Stopping(tolerance=0.0, max_iterations=3),
        **MIXERS[mixer],
    )
    return ib.build(spec)


@pytest.mark.filterwarnings("ignore")  # the compiler's own: deprecated names, gradients of non-leaf tensors
@pytest.mark.parametrize(
    "mixer", [pytest.param("mamba2", marks=pytest.mark.slow), "mamba2-one-chunk", "attention"]
)
def test_layers_compile_without_graph_breaks(mixer):
    torch.compiler.reset()
    plain, compiled = built(mixer).train(), built(mixer).train()
    for block in compiled.backbone.blocks():
        # As in compile_layers, but graph breaks are errors, and no code is generated.
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    ids = torch.randint(61, (2, 24))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(ids, labels=ids, return_logits=False).loss for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    for (name, own), other in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 0.05 * other.grad.norm() + 1e-6, name
    with torch.no_grad():
        values = [model.eval()(ids, max_iterations=2).logits for model in (plain, compiled)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_autocast_leaves_the_backward_pass_of_a_scan_in_float32():
    # The scan switches autocast off. Only its forward pass runs within that context.
    torch.compiler.reset()
    dtypes = []

    def recorded(graph, _):
        products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        dtypes.extend(factor.meta["val"].dtype for node in products for factor in node.args)
        return graph

    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):
        model = built("mamba2-one-chunk").train()
        model.compile_layers()
        backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=recorded)
        for block in model.backbone.blocks():
            block.compile(dynamic=False, backend=backend)
        ids = torch.randint(61, (2, 24))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
    assert set(dtypes) == {torch.float32}
    torch.compiler.reset()


@pytest.mark.parametrize(
    "gradient",
    [
        ib.PhantomSpec(steps=1),
        ib.UnrolledSpec(steps=2),
        ib.OneStepAdjointSpec(),
        ib.ImplicitFunctionSpec(),
        ib.JacobianPenaltySpec(),
        ib.JacobianPenaltySpec(gradient=ib.ImplicitFunctionSpec()),
    ],
    ids=repr,
)
def test_estimators_say_whether_they_retain_the_graph(gradient, monkeypatch):
    # The compiler must know: compiled layers otherwise overwrite what a second backward needs.
    model = built("attention").train()
    model.reconfigure(model.spec.model_copy(update={"gradient": gradient}))
    retained, grad = [], torch.autograd.grad

    def recorded(*args, **kwargs):
        retained.append(kwargs.get("retain_graph", False))
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", recorded)
    ids = torch.randint(61, (2, 12))
    model(ids, labels=ids).loss.backward()
    assert any(retained) == model.gradient.retains_graph
    assert not (model.gradient.retains_graph and torch._functorch.config.donated_buffer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="generating code needs g++")
def test_compiled_layers_can_be_differentiated_by_an_adjoint(defaults_of_the_compiler):
    # Backward of an adjoint keeps the graph, which the compiler does not allow by default. Code in the
    # compiler's cache, from a model with another gradient, may overwrite the tensors that are needed twice.
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=64,
        n_layers=2,
        injection={"kind": "residual"},
        gradient=ib.PhantomSpec(steps=1),
        stopping=ib.Stopping(tolerance=0.0, max_iterations=3),
        mixer=ib.AttentionSpec(n_heads=4),
        mlp=ib.SwiGLUSpec(d_ff=64),
        prelude={"n_layers": 1},
    )
    model = ib.build(spec).train()
    plain = copy.deepcopy(model)
    ids = torch.randint(61, (2, 16))

    def gradients(model):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, return_logits=False).loss
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model.compile_layers()
    gradients(model)
    adjoint = spec.model_copy(update={"gradient": ib.OneStepAdjointSpec()})
    for one in (model, plain):
        one.reconfigure(adjoint)
    compiled, eager = gradients(model), gradients(plain)
    for own, other in zip(compiled, eager, strict=True):
        assert (own - other).norm() <= 0.05 * other.norm() + 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="generating code needs g++")
def test_spectral_radius_of_compiled_layers(defaults_of_the_compiler):
    # It differentiates one call many times, whatever the gradient of training. The compiler's cache has code
    # that overwrites saved tensors, as from a program that compiled the same layers by itself.
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=32,
        n_layers=1,
        gradient=ib.PhantomSpec(steps=2),  # the second step differentiates its point too
        stopping=ib.Stopping(tolerance=0.0, max_iterations=1),
        mixer=ib.AttentionSpec(n_heads=4, n_kv_heads=2, qk_norm="weighted"),
        mlp=ib.SwiGLUSpec(d_ff=48),
        dropout=0.1,
    )
    plain = ib.build(spec).train()
    compiled = copy.deepcopy(plain)
    ids = torch.randint(61, (4, 16))

    def radius(model):
        torch.manual_seed(0)
        state, weights = model.initial_state(4), model.cache_weights()
        f, z = model.bind(model.embedding(ids), state, weights=weights, ids_BL=ids)
        generator = torch.Generator().manual_seed(0)
        return spectral_radius(f, z + 0.1, steps=6, generator=generator).radius

    for block in compiled.backbone.blocks():
        block.compile(dynamic=False, options=COMPILE_OPTIONS)
    compiled(ids, labels=ids).loss.backward()
    torch.compiler.reset()
    compiled.compile_layers()
    torch.testing.assert_close(radius(compiled), radius(plain), rtol=1e-3, atol=0)
