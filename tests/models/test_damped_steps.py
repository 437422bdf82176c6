"""Damped steps taken by the map itself equal separate calls and sums, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import implicit_blocks as ib

MAMBA2 = {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)}
ATTENTION = {"mixer": ib.AttentionSpec(n_heads=2), "mlp": ib.SwiGLUSpec(d_ff=48)}


def built(layers=2, parts=MAMBA2):
    torch.manual_seed(0)
    return ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=32, n_layers=layers, **parts))


def bound(model):
    ids = torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(1))
    f, start = model.bind(model.embedding(ids), model.initial_state(3), weights=model.cache_weights())
    return f, f(start).detach()


def gradients(model, value):
    value.sin().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def one_by_one(f, z, count, damping):
    for _ in range(count):
        z = f(z) if damping == 1 else torch.lerp(z, f(z), damping)
    return z


@pytest.mark.parametrize("checkpoint", ["none", "steps", "layers"])
@pytest.mark.parametrize(("count", "damping"), [(1, 0.8), (3, 0.8), (2, 0.3), (2, 1.0)])
@pytest.mark.parametrize("parts", [MAMBA2, ATTENTION], ids=["mamba2", "attention"])
def test_damped_steps_equal_separate_calls_bit_for_bit(parts, count, damping, checkpoint):
    model = built(parts=parts)
    f, z = bound(model)
    expected = one_by_one(f, z, count, damping)
    wanted = gradients(model, expected)
    model.backbone.activation_checkpointing = checkpoint
    f, z = bound(model)
    assert isinstance(f, ib.SteppingMap)
    found = f.damped_steps(z, count=count, damping=damping)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model, found), wanted, rtol=0, atol=0)


def test_phantom_gives_equal_results_with_and_without_a_stepping_map():
    model = built()
    f, z = bound(model)
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(max_iterations=4))
    phantom = ib.Phantom(steps=3, damping=0.7)
    expected = phantom(lambda z: f(z), z, search)  # a function has no damped_steps
    wanted = gradients(model, expected.z)
    f, z = bound(model)
    found = phantom(f, z, search)
    torch.testing.assert_close(found.z, expected.z, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model, found.z), wanted, rtol=0, atol=0)


def test_phantom_uses_the_damped_steps_of_any_map_that_has_them():
    class Halved:
        taken = None

        def __call__(self, z):
            return z / 2 + 1

        def damped_steps(self, z, *, count, damping):
            self.taken = (count, damping)
            return one_by_one(self, z, count, damping)

    f, z = Halved(), torch.zeros(2, 3)
    assert isinstance(f, ib.SteppingMap)
    assert not isinstance(lambda z: z, ib.SteppingMap)
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(max_iterations=2))
    found = ib.Phantom(steps=2, damping=0.5)(f, z, search)
    assert f.taken == (2, 0.5)
    torch.testing.assert_close(found.z, ib.Phantom(steps=2, damping=0.5)(f.__call__, z, search).z)


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
@pytest.mark.parametrize(("layers", "inputs"), [(1, 3), (2, 4)])
def test_a_compiled_norm_includes_the_damped_step(layers, inputs):
    """With one layer the norm's residual sum reads the point already: branch, point and weight suffice."""
    model = built(layers)
    f, z = bound(model)
    expected = one_by_one(f, z, 3, 0.8)
    wanted = gradients(model, expected)
    forward, backward = [], []

    def recorder(graphs):
        def compiler(module, given):
            graphs.append(sum(t.ndim == 3 for t in given) if graphs is backward else len(given))
            return module

        return compiler

    torch.compiler.reset()
    model.backbone.norm.compile(
        backend=aot_autograd(fw_compiler=recorder(forward), bw_compiler=recorder(backward)), dynamic=False
    )
    f, z = bound(model)
    forward.clear()
    found = f.damped_steps(z, count=3, damping=0.8)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, found), wanted)
    torch.compiler.reset()
    assert forward == [inputs, inputs]  # a point without a gradient, and points with one
    assert len(backward) == 2
