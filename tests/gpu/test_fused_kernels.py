"""The library's kernels against the plain operators that they replace, in values and every gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.layers import WeightNorm, add_weight_norm
from implicit_blocks.mixers import Mamba2
from implicit_blocks.ops import cross_entropy, mamba2_mix
from implicit_blocks.ops.accelerated import load
from implicit_blocks.ops.ssd import mamba_ssm
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import SequenceState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("groups", [None, [2, 0, 2, 1, 0, 1]], ids=["together", "in-groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weight_norm_kernel_matches_the_reference(dtype, groups):
    from implicit_blocks.ops.kernels.weight_norm import Layout, normed_weights

    torch.manual_seed(0)
    shapes = [(37, 69), (64, 48), (5, 64), (1, 3), (130, 32), (70, 1, 4)]
    paddings = [(3, 59), (0, 16), (59, 0), (0, 0), (0, 0), (0, 0)]
    gains = [
        torch.rand(rows, *[1] * len(others), device="cuda", requires_grad=True) for rows, *others in shapes
    ]
    weights = [torch.randn(*shape, device="cuda", requires_grad=True) for shape in shapes]
    weights[4] = torch.randn(1 + 130 * 32, device="cuda")[1:].view(130, 32).requires_grad_()  # not aligned
    found = normed_weights(gains, weights, [Layout(dtype, *padding) for padding in paddings], groups)
    nodes = {id(w.grad_fn) for w in found}
    assert len(nodes) == (1 if groups is None else 3)
    dw = [torch.randn_like(w) for w in found]
    found_grads = torch.autograd.grad(
        found[:3] + found[4:], gains + weights, dw[:3] + dw[4:], allow_unused=True
    )
    for number, (g, v, (rows, columns)) in enumerate(zip(gains, weights, paddings, strict=True)):
        wide_g, wide_v = (t.detach().double().requires_grad_() for t in (g, v))
        expected = WeightNorm.compute(wide_g, wide_v)
        if rows or columns:
            expected = torch.nn.functional.pad(expected, (0, columns, 0, rows))
        assert error(found[number], expected) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert not found[number][len(v) :].any()
        assert not found[number][:, v.shape[1] :].any()
        assert found[number].shape == expected.shape
        ours = found_grads[number], found_grads[number + len(shapes)]
        if number == 3:  # its gradient was not requested
            assert ours == (None, None)
            continue
        expected_grads = torch.autograd.grad(expected, (wide_g, wide_v), dw[number].double())
        for own, exact in zip(ours, expected_grads, strict=True):
            assert error(own, exact) < 1e-6


def test_weight_norm_with_strided_gains_uses_the_plain_operators():
    """The kernels do not support strided gains; the plain operators compute them."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, device="cuda")
    add_weight_norm(layer)
    apart = torch.rand(32, 3, device="cuda")[:, 1:2]
    layer.parametrizations.weight.original0 = nn.Parameter(apart)
    cached = WeightCache(layer)
    expected = WeightNorm.compute(apart, layer.parametrizations.weight.original1)
    torch.testing.assert_close(cached.tensors()[0], expected)


@pytest.mark.parametrize("vocabulary", [61, 50_277], ids=["V61", "V50277"])
def test_the_cross_entropy_kernel_matches_the_reference(vocabulary, monkeypatch):
    torch.manual_seed(0)
    z = torch.randn(700, 64, device="cuda")
    weight = torch.randn(vocabulary, 64, device="cuda") * 0.3
    labels = torch.randint(vocabulary, (700,), device="cuda")
    labels[::7] = -100

    def run(precise):
        if precise:
            monkeypatch.setattr(cross_entropy, "available", lambda module: False)
        leaves = [
            (t.double() if precise else t).detach().requires_grad_()
            for t in (z.bfloat16(), weight.bfloat16())
        ]
        loss, predictions = cross_entropy.linear_cross_entropy(*leaves, labels)
        return loss, predictions, *torch.autograd.grad(loss, leaves)

    loss, predictions, *grads = run(False)
    exact, expected, *exact_grads = run(True)
    assert error(loss, exact) < 1e-3
    assert (predictions == expected).float().mean() > 0.95  # ties of bfloat16 logits
    for ours, wanted in zip(grads, exact_grads, strict=True):
        assert error(ours, wanted) < 1e-2


@pytest.mark.parametrize("label", [-1, 61, 10**9])
def test_a_label_outside_the_vocabulary_gives_a_nan_loss(label):
    labels = torch.tensor([3, label, -100], device="cuda")
    z, weight = torch.randn(3, 64, device="cuda"), torch.randn(61, 64, device="cuda")
    loss, _ = cross_entropy.linear_cross_entropy(z.bfloat16(), weight.bfloat16(), labels)
    assert loss.isnan()


SHAPES = {
    "B2-L256-D256-G1": (2, 256, 256, 1, True, True, 64),
    "B3-L300-D128-G2-no-injection": (3, 300, 128, 2, False, True, 64),
    "B2-L77-D192-G1-no-conv-bias": (2, 77, 192, 1, True, False, 64),
    "B5-L32-D64-G1": (5, 32, 64, 1, True, True, 64),
    "B3-L150-D128-G2": (3, 150, 128, 2, True, True, 64),
    "B2-L5-D128-G1": (2, 5, 128, 1, True, True, 64),
    "B10-L300-D512-G2-walking": (10, 300, 512, 2, True, True, 64),
    "B20-L512-D256-G1-walking": (20, 512, 256, 1, False, True, 64),
    "B3-L64-D128-G1-P32": (3, 64, 128, 1, False, True, 32),
    "B3-L200-D128-G2-P32": (3, 200, 128, 2, True, True, 32),
    "B2-L96-D64-G1-P16": (2, 96, 64, 1, False, True, 16),
    "B33-L300-D64-G1-P32-walking": (33, 300, 64, 1, True, True, 32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_fused_mamba2_operator_matches_the_plain_operators(shape, monkeypatch):
    if isinstance(reason := load(mamba_ssm.MODULE), str):
        pytest.skip(reason)
    batch, length, width, groups, injected, bias, head_dim = shape
    torch.manual_seed(0)
    spec = ib.Mamba2Spec(d_state=64, head_dim=head_dim, n_groups=groups, conv_bias=bias, bias=not bias)
    mixer = Mamba2(spec, d_model=width).cuda()
    state = mixer.initial_state(batch, device=torch.device("cuda"), dtype=torch.float32)
    committed = SequenceState(batch, 0, torch.zeros(1, dtype=torch.int64, device="cuda"), (state,))
    window = committed.window(length, valid_BL=None, documents_BL=None, dtype=torch.float32)
    context = mixer.prepare(window)
    z = torch.randn(batch, length, width, device="cuda")
    u = torch.randn(batch, length, mixer.injection_width, device="cuda").bfloat16() if injected else None
    dy = torch.randn(batch, length, width, device="cuda")

    def run(fused, precise=False):
        if not fused:
            monkeypatch.setattr(mamba2_mix, "eligible", lambda *_: False)
        z_leaf = z.clone().requires_grad_()
        u_leaf = None if u is None else (u.float() if precise else u).clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not precise):
            cached = WeightCache(mixer)
            with cached.activate():
                y = mixer(z_leaf, u_leaf, state, context)
                with torch.no_grad():
                    searched = mixer(z_leaf, u_leaf, state, context)  # saves nothing for backward
                    _, after = mixer.advance(z_leaf, u_leaf, state, context)
        leaves = [leaf for leaf in (z_leaf, u_leaf, *mixer.parameters()) if leaf is not None]
        return [y, searched, *after, *torch.autograd.grad((y.float() * dy).sum(), leaves)]

    fused = run(True)
    plain, exact = run(False), run(False, precise=True)
    for ours, eager, wanted in zip(fused, plain, exact, strict=True):
        assert error(ours, wanted) < max(1.2 * error(eager, wanted), 1.6e-2)


@pytest.mark.parametrize("length", [256, 300], ids=["one-chunk", "chunks"])
def test_the_mamba2_kernel_reads_injections_from_a_table(length):
    if isinstance(reason := load(mamba_ssm.MODULE), str):
        pytest.skip(reason)
    torch.manual_seed(0)
    mixer = Mamba2(ib.Mamba2Spec(d_state=64), d_model=256).cuda()
    state = mixer.initial_state(3, device=torch.device("cuda"), dtype=torch.float32)
    committed = SequenceState(3, 0, torch.zeros(1, dtype=torch.int64, device="cuda"), (state,))
    window = committed.window(length, valid_BL=None, documents_BL=None, dtype=torch.float32)
    ids = torch.randint(11, (3, length), device="cuda")
    table = torch.randn(11, mixer.injection_width, device="cuda").bfloat16()
    z, dy = torch.randn(2, 3, length, 256, device="cuda")

    def run(by_row):
        z_leaf, leaf = z.clone().requires_grad_(), table.clone().requires_grad_()
        # In both cases the gradients of a table's rows are summed in float32.
        rows, u = (ids, leaf) if by_row else (None, leaf.float()[ids].bfloat16())
        context = mixer.prepare(replace(window, u_rows_BL=rows, shared={}))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = mixer(z_leaf, u, state, context)
            with torch.no_grad():
                _, after = mixer.advance(z_leaf, u, state, context)
        return [y, *after, *torch.autograd.grad((y.float() * dy).sum(), [z_leaf, leaf, *mixer.parameters()])]

    for by_row, by_token in zip(run(True), run(False), strict=True):
        assert error(by_row, by_token) < 5e-3


def test_mamba2_does_not_save_the_input_of_the_output_projection():
    torch.manual_seed(0)
    mixer = Mamba2(ib.Mamba2Spec(d_state=64, expand=2, head_dim=64), d_model=256).cuda()
    state = mixer.initial_state(3, device=torch.device("cuda"), dtype=torch.float32)
    committed = SequenceState(3, 0, torch.zeros(1, dtype=torch.int64, device="cuda"), (state,))
    window = committed.window(128, valid_BL=None, documents_BL=None, dtype=torch.float32)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tuple(tensor.shape)
        return tensor

    with (
        torch.autocast("cuda", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        mixer(torch.randn(3, 128, 256, device="cuda"), None, state, mixer.prepare(window))
    assert [shape for shape in kept.values() if shape[-1:] == (512,) and shape[0] == 3] == [(3, 128, 512)]


@pytest.mark.parametrize("change", ["strides", "hook", "many-rows"])
def test_mamba2_with_strided_parameters_hooks_or_many_rows_matches_the_reference(change):
    """The operator copies strided parameters and leaves modules with hooks to the plain operators."""
    rows, length = (65_540, 4) if change == "many-rows" else (3, 40)
    torch.manual_seed(0)
    mixer = Mamba2(ib.Mamba2Spec(d_state=16, head_dim=16), d_model=32).cuda()
    exact = copy.deepcopy(mixer).double()
    state, wide = (
        one.initial_state(rows, device=torch.device("cuda"), dtype=one.A_log.dtype) for one in (mixer, exact)
    )
    committed = SequenceState(rows, 0, torch.zeros(1, dtype=torch.int64, device="cuda"), (state,))
    window = committed.window(length, valid_BL=None, documents_BL=None, dtype=torch.float32)
    context, z, called = mixer.prepare(window), torch.randn(rows, length, 32, device="cuda"), []
    if change == "strides":
        with torch.no_grad():
            for name in ("A_log", "D", "dt_bias"):
                setattr(mixer, name, nn.Parameter(torch.stack([getattr(mixer, name)] * 3, 1)[:, 1]))
            mixer.conv.weight = nn.Parameter(mixer.conv.weight.mT.contiguous().mT)
    if change == "hook":
        mixer.norm.register_forward_hook(lambda *_: called.append(1))
        mixer.out_proj.register_forward_hook(lambda *_: called.append(1))
    expected = exact(z.double(), None, wide, context)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = mixer(z, None, state, context)
    assert error(found, expected) < 2e-2
    assert len(called) == 2 * (change == "hook")
