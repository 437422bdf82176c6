"""Overflow in half precision: the sequence has diverged, and no other sequence changes."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots import batch as slot_batch
from implicit_blocks.ops.attention import slots

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4), "mlp": ib.SwiGLUSpec(d_ff=24)},
}
GRADIENTS = {
    "phantom": ib.PhantomSpec(),
    "implicit_function": ib.ImplicitFunctionSpec(),
    "jacobian_penalty": ib.JacobianPenaltySpec(),
    "unrolled": ib.UnrolledSpec(),
    "unrolled-checkpointed": ib.UnrolledSpec(checkpointing=True),
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
OVERFLOWS = 1  # the row that overflows


def made(mixer: str, dtype: torch.dtype, monkeypatch, *, first=OVERFLOWS, last=OVERFLOWS, **changes):
    """Return a model whose injection in row 1 is finite in its type, but not the map's value."""
    spec = ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, **MIXERS[mixer], **changes)
    torch.manual_seed(0)
    model = ib.ImplicitLM(spec)
    with torch.no_grad():
        for block in model.backbone.blocks():
            block.mixer.out_proj.parametrizations.weight.original0.mul_(50.0)
    inject = type(model).inject

    def large(self, x_BLD, weights, **of_window):
        u, e = inject(self, x_BLD, weights, **of_window)
        factor = torch.ones(len(u), 1, 1, dtype=u.dtype, device=u.device)
        for row in range(first, min(last + 1, len(u))):
            factor[row] = 0.25 * torch.finfo(dtype).max / float(u.detach()[row].abs().max())
        return u * factor, e

    monkeypatch.setattr(type(model), "inject", large)
    return model


def check_evaluation(model, ids, dtype, device="cpu"):
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=dtype):
        found = model(ids, labels=ids, return_state=True)
        alone = model(ids[:1], labels=ids[:1])
        more = model(ids, state=found.state)  # the row stays diverged, and no other row diverges
    for output in (found, more):
        diverged = output.solution.diverged.tolist()
        assert diverged == [row == OVERFLOWS for row in range(len(ids))]
        assert output.logits.isfinite().all()
    assert not found.solution.converged[OVERFLOWS]
    assert found.loss.isfinite()
    torch.testing.assert_close(found.logits[:1], alone.logits, atol=0.02, rtol=0)
    assert torch.equal(found.solution.token_iterations[:1], alone.solution.token_iterations)


def check_training(model, ids, dtype, device="cpu"):
    model.train()
    with torch.autocast(device, dtype=dtype):
        output = model(ids, labels=ids)
    assert output.solution.diverged.tolist() == [row == OVERFLOWS for row in range(len(ids))]
    penalty = output.solution.penalty
    assert output.loss.isfinite()
    (output.loss if penalty is None else output.loss + penalty.mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
    moved = [p for name, p in model.named_parameters() if "in_proj" in name and p.grad.abs().max() > 0]
    assert moved  # by the gradients of the other rows


@pytest.fixture
def ids():
    return torch.randint(0, 19, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("search", [{}, {"window_length": 4}, {"commit_prefix": 2}], ids=str)
def test_overflow_in_evaluation_affects_one_row(mixer, dtype, search, ids, monkeypatch):
    at_evaluation = ib.AtEvaluation(stopping=ib.StoppingOverrides(max_iterations=60), **search)
    check_evaluation(made(mixer, dtype, monkeypatch, at_evaluation=at_evaluation), ids, dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_overflow_in_training_affects_one_row(mixer, dtype, gradient, ids, monkeypatch):
    check_training(made(mixer, dtype, monkeypatch, gradient=gradient), ids, dtype)


def test_the_loss_is_nan_if_every_row_overflows(ids, monkeypatch):
    model = made("mamba2", torch.float16, monkeypatch, first=0, last=2).train()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(ids, labels=ids)
    assert output.solution.diverged.all()
    assert output.loss.isnan()


class OneRowDiverges:
    """A map with one row that is not finite from its second call on; the others converge to 2."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, z):
        diverged = (self.rows == OVERFLOWS)[:, None] & (z > 0.5)
        return torch.where(diverged, torch.nan, 0.5 * z + 1)

    def select_rows(self, rows):
        return OneRowDiverges(self.rows[rows])


@pytest.mark.parametrize(
    "gradient",
    [ib.Phantom(steps=2), ib.ImplicitFunction(), ib.JacobianPenalty()],
    ids=lambda gradient: type(gradient).__name__,
)
def test_a_diverged_row_keeps_its_best_value(gradient):
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(tolerance=1e-4, max_iterations=40))
    z0 = torch.zeros(3, 4, requires_grad=True)
    solution = gradient(OneRowDiverges(torch.arange(3)), z0, search)
    assert solution.diverged.tolist() == [False, True, False]
    assert torch.equal(solution.z[OVERFLOWS], torch.ones(4))  # its one finite f(z), not another row's
    torch.testing.assert_close(solution.z[[0, 2]], torch.full((2, 4), 2.0), atol=1e-3, rtol=0)


def test_unrolled_a_diverged_row_keeps_its_start_and_the_others_their_gradient():
    def gradient_of(rows):
        z0 = torch.full((len(rows), 4), 0.2, requires_grad=True)
        search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping())
        solution = ib.Unrolled(steps=4)(OneRowDiverges(rows), z0, search)
        solution.z.sum().backward()
        return solution, z0.grad

    solution, grad = gradient_of(torch.arange(3))
    alone, expected = gradient_of(torch.tensor([0]))
    assert solution.diverged.tolist() == [False, True, False]
    torch.testing.assert_close(solution.z[0], alone.z[0])
    assert torch.equal(solution.z[OVERFLOWS], torch.full((4,), 0.2))
    torch.testing.assert_close(grad[[0, 2]], expected.expand(2, 4))
    assert torch.equal(grad[OVERFLOWS], torch.zeros(4))


LARGE = 7  # the token that overflows, as all tokens after it do


def check_decoding(mixer, dtype, monkeypatch, device="cpu"):
    model = made(mixer, dtype, monkeypatch, first=9).to(device).eval()
    inject = type(model).inject

    def large(self, x_BLD, weights, **of_window):
        u, e = inject(self, x_BLD, weights, **of_window)
        here = (x_BLD == self.embedding.weight[LARGE]).all(-1, keepdim=True)
        most = u.abs().amax(-1, keepdim=True).clamp(min=1e-3)
        factor = 0.25 * torch.finfo(dtype).max / most  # in float32 on a GPU, where autocast divides in it
        return torch.where(here, (u * factor).to(u.dtype), u), e

    monkeypatch.setattr(type(model), "inject", large)
    texts = {0: [1, 2, 3, 4, 5], 1: [2, LARGE], 2: [3, 1], 3: [1, LARGE, 3, 3], 4: [4]}
    found = {}
    with torch.no_grad(), torch.autocast(device, dtype=dtype):
        for each in [list(texts), *([number] for number in texts)]:  # together, and alone
            options = {"max_seq_len": 9, "max_iterations": 60, "max_in_flight": 1}
            decoder = ContinuousDecoder(model, max_batch_size=2, **options)
            for number in each:
                decoder.submit(Request(prompt=texts[number], max_new_tokens=4))
            for new in decoder.run():
                found.setdefault((len(each), each[new.request]), []).append(new)
    for number, prompt in texts.items():
        together, alone = found[len(texts), number], found[1, number]
        assert all(new.logits.isfinite().all() for new in together)
        if LARGE in prompt:
            converged = [new.converged for new in together]
            assert not (
                any(converged) if device == "cpu" else all(converged)
            )  # the kernels' sums have more range
            continue  # no fixed point, and nothing to compare
        assert [new.token for new in together] == [new.token for new in alone]
        for new, old in zip(together, alone, strict=True):
            assert new.converged == old.converged
            torch.testing.assert_close(new.logits, old.logits, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("mixer", "attention"), [*((mixer, "each") for mixer in MIXERS), ("attention", "masked")]
)
def test_overflow_in_decoding_affects_one_text(mixer, dtype, attention, monkeypatch):
    monkeypatch.setitem(slots.BACKENDS, "each", slots.BACKENDS[attention])  # on a GPU they are masked
    check_decoding(mixer, dtype, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
def test_overflow_in_decoding_on_a_gpu_affects_one_text(mixer, dtype, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(slot_batch, "fused_map", lambda *_, **__: None)
    check_decoding(mixer, dtype, monkeypatch, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_overflow_on_a_gpu_affects_one_row(mixer, dtype, ids, monkeypatch):
    at_evaluation = ib.AtEvaluation(stopping=ib.StoppingOverrides(max_iterations=60))
    model = made(mixer, dtype, monkeypatch, at_evaluation=at_evaluation).cuda()
    check_evaluation(model, ids.cuda(), dtype, "cuda")
    check_training(model, ids.cuda(), dtype, "cuda")


# ------------------------------------------------------------------------------------ plain maps


PLAIN = {
    "phantom": ib.Phantom(steps=3),
    "implicit_function": ib.ImplicitFunction(),
    "penalty": ib.JacobianPenalty(),
    "unrolled": ib.Unrolled(steps=12),
    "checkpointed": ib.Unrolled(steps=12, checkpointing=True),
}


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
@pytest.mark.parametrize("solver", [ib.Picard(), ib.Anderson(memory=3)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("gradient", PLAIN.values(), ids=PLAIN)
def test_a_layer_learns_from_the_rows_that_have_not_diverged(gradient, solver):
    """The weights' gradient is that of the other rows, though this map has no ``select_rows``."""

    def trained(inputs):
        torch.manual_seed(0)
        weight = torch.full((), 0.4, dtype=torch.float64, requires_grad=True)
        stopping = ib.Stopping(tolerance=1e-9, max_iterations=200)
        # Converges to a point near small x; overflows in the second call if x is 800.
        layer = ib.FixedPoint(
            lambda z, x: weight * z.exp().mul(0.3) + x, solver=solver, gradient=gradient, stopping=stopping
        )
        x = inputs.clone().requires_grad_()
        solution = layer(x)
        loss = solution.z.sum(1) @ torch.arange(1.0, 1 + len(x), dtype=torch.float64)
        loss.backward()
        return solution, weight.grad, x.grad

    inputs = torch.tensor([[0.3, 0.2], [0.5, 0.1], [800.0, 0.3]], dtype=torch.float64)
    solution, of_weight, of_x = trained(inputs)
    _, expected_of_weight, expected_of_x = trained(inputs[:2])
    assert solution.diverged.tolist() == [False, False, True]
    assert solution.z.isfinite().all()
    torch.testing.assert_close(of_weight, expected_of_weight)
    torch.testing.assert_close(of_x[:2], expected_of_x)
    assert torch.equal(of_x[2], torch.zeros_like(of_x[2]))
