"""The kernels of the plugin ``rwkv7`` against the recurrence in float64: values, final state, every gradient.

With ``TRITON_INTERPRET=1`` they run in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from implicit_blocks.testing import check_backend, relative_error
from tests.gpu.interpreter import DEVICE, INTERPRETED

rwkv7 = pytest.importorskip("implicit_blocks_rwkv7", reason="the plugin rwkv7 is not installed")
plain = pytest.importorskip("implicit_blocks_rwkv7.delta_rule").generalized_delta_rule
recurrence = pytest.importorskip("implicit_blocks_rwkv7.recurrence").generalized_delta_rule_recurrence
scans = pytest.importorskip("implicit_blocks_rwkv7.scan")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = [(2, 1, 2, 32, 32), (3, 7, 2, 32, 16), (1, 64, 2, 16, 16), (2, 70, 2, 32, 32), (1, 20, 1, 16, 32)]


def inputs(B: int, L: int, H: int, K: int, V: int, *, dtype=torch.float32) -> dict[str, Tensor]:
    """Return the tensors of a scan with negative eigenvalues; r and v, the activations, in ``dtype``."""
    kappa = torch.nn.functional.normalize(torch.randn(B, L, H, K), dim=-1)
    made = {
        "r": (torch.randn(B, L, H, K) / math.sqrt(K)).to(dtype),
        "log_w": -math.exp(-0.5) * torch.rand(B, L, H, K).pow(2),
        "k": torch.randn(B, L, H, K) / math.sqrt(K),
        "v": torch.randn(B, L, H, V).to(dtype),
        "a": -kappa,
        "b": 2 * torch.rand(B, L, H, K) * kappa,
        "initial_state": torch.randn(B, H, K, V),
    }
    return {name: t.to(DEVICE).requires_grad_() for name, t in made.items()}


def scan(f, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    *tensors, initial = (given.get(name) for name in ("r", "log_w", "k", "v", "a", "b", "initial_state"))
    return f(*tensors, initial_state_BHKV=initial)


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("case", ["zero", "initial-state", "fastest-decay", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_the_kernels_equal_the_recurrence(shape, case):
    if case == "bfloat16" and INTERPRETED:
        pytest.skip("the interpreter has no bfloat16")
    given = inputs(*shape, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)
    if case == "zero":
        del given["initial_state"]
    if case == "fastest-decay":
        given["log_w"] = torch.full_like(given["log_w"], -math.exp(-0.5), requires_grad=True)
    wide = {name: t.detach().double().cpu().requires_grad_() for name, t in given.items()}
    found, expected = scan(scans.scan_triton, given), scan(recurrence, wide)
    weights = [torch.randn_like(t) for t in found]
    gradients = torch.autograd.grad(found, given.values(), weights)
    exact = torch.autograd.grad(expected, wide.values(), [w.double().cpu() for w in weights])
    names, bound = ("o", "state", *given), 1e-2 if case == "bfloat16" else 1e-5
    for name, a, b in zip(names, (*found, *gradients), (*expected, *exact), strict=True):
        assert relative_error(a.detach().double().cpu(), b.detach()) < bound, name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_the_mixer_with_kernels_equals_plain_operators(head_dim, precision):
    spec = rwkv7.RWKV7Spec(n_heads=2, head_dim=head_dim, negative_eigenvalues=True)
    fast, reference = (spec.model_copy(update={"backend": name}) for name in ("triton", "plain"))
    check_backend(fast, reference, precision=precision, tolerance=1e-4 if precision is None else 1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_scan_is_captured_and_compiled():
    given = inputs(2, 20, 2, 32, 32)

    def gradients(f) -> list[Tensor]:
        o, state = scan(f, given)
        found = torch.autograd.grad(o.square().sum() + state.sum(), given.values())
        return [o.detach(), state.detach(), *found]  # no graph remains: its stream could not be captured

    expected = gradients(scans.scan_triton)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gradients(scans.scan_triton)
    graph.replay()
    compiled = gradients(torch.compile(scans.scan_triton, fullgraph=True))
    for name, a, b, c in zip(("o", "state", *given), expected, compiled, captured, strict=True):
        assert torch.equal(a, c), name
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.gpu
@needs_gpu
def test_second_derivatives_are_those_of_plain_operators():
    given = inputs(2, 9, 1, 16, 16)
    found = []
    for f in (scans.scan_triton, plain):
        o, state = scan(f, given)
        loss = o.square().sum() + state.square().sum()
        first = torch.autograd.grad(loss, given.values(), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given.values()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_auto_chooses_the_kernels_for_inputs_that_they_support(monkeypatch):
    """Runs on a CPU: nothing is computed."""
    monkeypatch.setattr(scans.DELTA_RULE, "_present", scans.DELTA_RULE.backends)
    monkeypatch.setattr(type(scans.DELTA_RULE.backends[0]), "installed", True)
    x, narrow = torch.zeros(2, 5, 2, 32), torch.zeros(2, 5, 2, 8)

    def chosen(tensor: Tensor, state: Tensor | None = None, documents: Tensor | None = None) -> str:
        return scans.DELTA_RULE.choose("auto", *(tensor,) * 6, state, documents).name

    assert chosen(x) == "plain"  # not on a GPU
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert chosen(x) == "triton"
    assert chosen(x, documents=torch.zeros(2, 5)) == "plain"
    assert chosen(x, torch.zeros(2, 2, 32, 32, dtype=torch.float64)) == "plain"
    assert chosen(narrow) == "plain"
    with pytest.raises(ValueError, match="width 16, 32"):
        scans.DELTA_RULE.choose("triton", *(narrow,) * 6, None, None)
