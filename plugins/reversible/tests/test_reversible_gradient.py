"""The gradient: equality with unrolled steps, constant memory, and a bounded, reported error."""

from __future__ import annotations

import weakref

import pytest
import torch
from implicit_blocks_reversible import ReversibleGradientSpec, ReversibleSolverSpec
from implicit_blocks_reversible.gradient import ReconstructionError, ReversibleGradient
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import implicit_blocks as ib
from implicit_blocks.testing import GRADIENT_CONTRACTS, relative_error

MIXERS = {"mamba2": ib.Mamba2Spec(d_state=8, head_dim=8), "attention": ib.AttentionSpec(n_heads=2)}


def model_of(gradient, dtype=torch.float64, *, mixer: str = "mamba2", **options) -> ib.ImplicitLM:
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=7,
        d_model=16,
        n_layers=2,
        mixer=MIXERS[mixer],
        solver=ReversibleSolverSpec(),
        gradient=gradient,
        **options,
    )
    return ib.build(spec).to(dtype)


def gradients(model: ib.ImplicitLM, tokens: Tensor, **inputs) -> tuple[ib.LMOutput, dict[str, Tensor]]:
    out = model(tokens, labels=tokens, **inputs)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) <= bound, name


def series(jacobian: Tensor, *, steps: int, damping: float) -> Tensor:
    """Return the replacement of ``(I − J)^{-1}`` when the steps start at the fixed point."""
    eye = torch.eye(jacobian.shape[0], dtype=jacobian.dtype)
    before = now = torch.zeros_like(jacobian)
    for _ in range(steps):
        before, now = now, (1 - damping) * before + damping * (jacobian @ now + eye)
    return now


@pytest.mark.parametrize(
    ("contract", "search"),
    # The ddp contract starts two processes; one case is enough.
    [(name, True) for name in GRADIENT_CONTRACTS]
    + [(name, False) for name in GRADIENT_CONTRACTS if name != "ddp"],
)
def test_the_gradient_satisfies_the_contract(contract, search):
    spec = ReversibleGradientSpec(steps=6, damping=0.6, search=search)

    def oracle(jacobian: Tensor) -> Tensor:
        return series(jacobian, steps=6, damping=0.6)

    GRADIENT_CONTRACTS[contract](spec, oracle=oracle if search else "computation")


@pytest.mark.parametrize("start", ["zeros", "embedding"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_gradient_equals_the_unrolled_gradient(steps, mixer, start):
    tokens = torch.randint(0, 7, (3, 9))
    attention_mask = torch.ones_like(tokens)
    attention_mask[0, :4] = attention_mask[1, 6:] = 0
    given = {"mixer": mixer, "z_init": start}
    ours, found = gradients(
        model_of(ReversibleGradientSpec(steps=steps, search=False), **given),
        tokens,
        attention_mask=attention_mask,
    )
    theirs, expected = gradients(
        model_of(ib.UnrolledSpec(steps=steps), **given), tokens, attention_mask=attention_mask
    )
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.solution.residual, theirs.solution.residual)
    assert torch.equal(ours.solution.iterations, theirs.solution.iterations)
    agree(found, expected, 1e-10)


def test_a_float32_map_is_undone_exactly():
    """Each halving needs one more bit; float64 has 29 more than float32."""
    tokens = torch.randint(0, 7, (3, 9))
    ours, found = gradients(model_of(ReversibleGradientSpec(steps=16, search=False), torch.float32), tokens)
    _, expected = gradients(model_of(ib.UnrolledSpec(steps=16), torch.float32), tokens)
    assert float(ours.solution.adjoint.solution.residual.max()) < 1e-12
    agree(found, expected, 1e-6)


def test_autocast_and_dropout_give_the_unrolled_gradient():
    tokens = torch.randint(0, 7, (3, 9))
    results = []
    for gradient in (ReversibleGradientSpec(steps=5, search=False), ib.UnrolledSpec(steps=5)):
        model = model_of(gradient, torch.float32, dropout=0.3)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(gradients(model, tokens)[1])
    agree(*results, 1e-6)


def test_the_steps_start_at_the_result_of_the_search():
    tokens = torch.randint(0, 7, (3, 9))
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=12)
    model = model_of(ReversibleGradientSpec(steps=4), stopping=stopping)
    out, found = gradients(model, tokens)
    searched = model_of(ib.PhantomSpec(steps=1), stopping=stopping)
    reference = searched(tokens)
    assert torch.equal(out.solution.residual, reference.solution.residual)
    assert torch.equal(out.solution.iterations, reference.solution.iterations)
    assert out.solution.adjoint.solution.iterations.tolist() == [4, 4, 4]
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())


def test_steps_without_a_search_have_a_trace_and_refuse_options_without_effect():
    tokens = torch.randint(0, 7, (3, 9))
    ours = model_of(ReversibleGradientSpec(steps=4, search=False))
    found = ours(tokens, trace=True).solution
    expected = model_of(ib.UnrolledSpec(steps=4))(tokens, trace=True).solution
    assert found.trace.shape == (4, 3)
    torch.testing.assert_close(found.trace, expected.trace)
    assert ours(tokens).solution.trace is None
    for option in ({"max_iterations": 2}, {"damping": 0.5}, {"trajectory": (1, 2)}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is "):
            ours(tokens, **option)
    layer = ib.FixedPoint(lambda z, x: 0.3 * torch.tanh(z) + x, gradient=ReversibleGradient(search=False))
    with pytest.raises(ValueError, match="max_iterations is 2, but gradient ReversibleGradient"):
        layer(torch.randn(2, 3), max_iterations=2)


def test_the_gradient_after_a_search_equals_its_formula():
    torch.manual_seed(1)
    weight = (torch.randn(5, 5, dtype=torch.float64) / 5).requires_grad_()
    x = torch.randn(3, 5, dtype=torch.float64)
    results = []
    for unrolled in (False, True):
        layer = ib.FixedPoint(
            lambda z, x: torch.tanh(z @ weight + x),
            gradient=ReversibleGradient(steps=3, damping=0.6),
            stopping=ib.Stopping(tolerance=1e-6),
        )
        if unrolled:
            with torch.no_grad():
                previous = current = layer(x).z
            for _ in range(3):
                previous, current = current, 0.4 * previous + 0.6 * torch.tanh(current @ weight + x)
            value = current
        else:
            value = layer(x).z
        results.append((value.detach(), *torch.autograd.grad(value.sin().sum(), weight)))
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) < 1e-12


def test_a_second_backward_through_the_same_graph_gives_equal_gradients():
    model = model_of(ReversibleGradientSpec(steps=5, search=False))
    out = model(torch.randint(0, 7, (2, 6)))
    loss = out.logits.square().sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert len(out.solution.adjoint.solutions) == 2


def test_two_passes_run_backward_in_any_order():
    model = model_of(ReversibleGradientSpec(steps=4, search=False))
    a, b = torch.randint(0, 7, (2, 2, 6))
    losses = [model(tokens, labels=tokens).loss for tokens in (a, b)]
    losses[0].backward()
    losses[1].backward()
    interleaved = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = [model(tokens, labels=tokens).loss for tokens in (b, a)]
    for loss in expected:
        loss.backward()
    agree(interleaved, {name: p.grad for name, p in model.named_parameters()}, 1e-12)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages created inside the context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


def peak_of(gradient) -> int:
    """Return the peak of live bytes in a forward and backward pass."""
    weight = torch.randn(64, 64, requires_grad=True)
    search = ib.Stopping(max_iterations=1)
    layer = ib.FixedPoint(
        lambda z, x: torch.tanh(torch.tanh(torch.tanh(z @ weight / 16 + x))),
        solver=ib.build(ReversibleSolverSpec()),
        gradient=ib.build(gradient),
        stopping=search,
    )
    x = torch.randn(256, 64)
    with LiveBytes() as counter:
        layer(x).z.square().sum().backward()
    return counter.peak


def test_memory_does_not_grow_with_the_steps():
    point = 256 * 64 * 4
    ours = {steps: peak_of(ReversibleGradientSpec(steps=steps, search=False)) for steps in (4, 32)}
    unrolled = {steps: peak_of(ib.UnrolledSpec(steps=steps)) for steps in (4, 32)}
    remembered = {steps: peak_of(ib.UnrolledSpec(steps=steps, checkpointing=True)) for steps in (4, 32)}
    assert ours[32] - ours[4] < point / 4
    assert unrolled[32] - unrolled[4] > 28 * 3 * point
    assert remembered[32] - remembered[4] > 20 * point  # checkpointing alone stores one point per step
    assert ours[32] < remembered[32] < unrolled[32]


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
def test_an_error_above_the_bound_is_raised_and_reported():
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    noise = torch.Generator().manual_seed(0)

    def unsteady(z: Tensor, x: Tensor) -> Tensor:
        """Return a different value each time, as a nondeterministic kernel may."""
        shaken = torch.rand(z.shape, dtype=z.dtype, generator=noise)
        return torch.tanh(z @ weight + x) + 1e-3 * shaken

    layer = ib.FixedPoint(unsteady, gradient=ReversibleGradient(steps=5, search=False, max_error=1e-6))
    solution = layer(torch.randn(2, 6, dtype=torch.float64))
    assert solution.adjoint.solution is None
    with pytest.raises(
        ReconstructionError, match=r"ReversibleGradient .*-reversible.* more than max_error 1\.0e-06"
    ):
        solution.z.sum().backward()
    report = solution.adjoint.solution
    assert not bool(report.converged.any())
    assert bool((report.residual > 1e-6).all())


def test_the_error_is_reported_per_row():
    model = model_of(ReversibleGradientSpec(steps=30, search=False))
    out = model(torch.randint(0, 7, (3, 9)), labels=torch.randint(0, 7, (3, 9)))
    assert out.solution.adjoint.solution is None  # known after backward
    out.loss.backward()
    report = out.solution.adjoint.solution
    assert report.residual.shape == (3,)
    assert bool((report.residual > 1e-12).all())  # float64 has no spare bits for a float64 map
    assert bool(report.converged.all())


def test_a_map_that_saves_nothing_for_backward_is_not_called_again():
    """A linear map with a constant factor needs no recomputation, so nothing is undone."""
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    layer = ib.FixedPoint(lambda z, x: 0.5 * z + x, gradient=ReversibleGradient(steps=2, search=False))
    (gradient,) = torch.autograd.grad(layer(x).z.sum(), x)
    # p_1 = x / 2; p_2 = (p_1 / 2 + x) / 2 = 5 x / 8
    torch.testing.assert_close(gradient, torch.full_like(x, 0.625))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "from 1 to 39"),
        ({"steps": 40}, "from 1 to 39"),
        ({"damping": 1.0}, r"damping must be in \(0, 1\), got 1\.0"),
        ({"max_error": 2.0}, r"max_error must be in \(0, 1\), got 2\.0"),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReversibleGradient(**options)


def test_a_module_with_parameters_trains():
    linear = nn.Linear(8, 8)
    layer = ib.FixedPoint(lambda z, x: torch.tanh(linear(z) + x), gradient=ReversibleGradient(steps=12))
    optimizer = torch.optim.Adam(linear.parameters(), lr=1e-2)
    x, target = torch.randn(16, 8), torch.rand(16, 8) - 0.5
    losses = []
    for _ in range(20):
        loss = (layer(x).z - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_second_derivatives_are_refused():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    layer = ib.FixedPoint(lambda z, x: 0.3 * torch.tanh(z) + x, gradient=ReversibleGradient(steps=3))
    with pytest.raises(RuntimeError, match=r"reversible gradient has no second derivatives.*create_graph"):
        torch.autograd.grad(layer(x).z.square().sum(), x, create_graph=True)
