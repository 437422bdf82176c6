"""The decoding kernels of single tokens against those of windows of one token, and plain operators.

With ``TRITON_INTERPRET=1`` they run in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

import implicit_blocks as ib
from implicit_blocks.decoding.slots.fused_layers import FusedAttention, FusedStep
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.layers import RMSNorm
from implicit_blocks.mixers.attention.mixer import AttentionContext
from implicit_blocks.ops.quantization import LARGEST, EightBits, eight_bits
from implicit_blocks.ops.rotary import rotation_tables
from implicit_blocks.solution import finite_or
from implicit_blocks.solvers import Picard
from tests.gpu.interpreter import DEVICE, HALF, INTERPRETED, MARKS, random

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _seed():
    pytest.importorskip("triton", reason="Triton is not installed")
    torch.manual_seed(0)


def error(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def rotations(room, width):
    positions = torch.arange(room, device=DEVICE)[None]
    tables = rotation_tables(positions, head_dim=width, theta=1e4, dtype=torch.float32)
    return [table[0, 0].contiguous() for table in tables]


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("span", [16, 1024], ids=["parts", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("heads", "kv", "width"), [(4, 2, 16), (2, 2, 32)], ids=["H4-K2-P16", "H2-K2-P32"])
def test_attention_is_that_of_a_window_of_one_token(heads, kv, width, dtype, span, normed, monkeypatch):
    """Repeatedly, because the counters of programs that have ended must be 0 again."""
    from implicit_blocks.ops.kernels import decoding_attention, decoding_window_attention

    for kernels, name in (
        (decoding_attention, "attention_tiles"),
        (decoding_window_attention, "window_attention_tiles"),
    ):
        tiles = getattr(kernels, name)
        patched = lambda *a, tiles=tiles, **o: tiles(*a, **o)._replace(span=span)  # noqa: E731  # short
        monkeypatch.setattr(kernels, name, patched)
    rows, room = torch.tensor([2, 0, 1], device=DEVICE), 70
    cos, sin = rotations(room, width)
    norms = decoding_attention.HeadNorms(random(width), random(width), 1e-2) if normed else None
    counters = decoding_attention.arrivals(DEVICE)
    for before in ([60, 0, 17], [1, 33, 69]):
        lengths = torch.tensor(before, device=DEVICE)
        projected = random(3, (heads + 2 * kv) * width)
        keys, values = random(2, 3, kv, room, width).to(dtype).unbind()
        found = [
            attend(
                projected,
                *options,
                rows,
                lengths,
                own[0],
                own[1],
                cos,
                sin,
                n_heads=heads,
                dtype=torch.float32,
                norms=norms,
                arrivals_X=counters,
                **more,
            )
            for attend, options, more, own in (
                (decoding_attention.attention_step, [None], {}, (keys.clone(), values.clone())),
                (decoding_window_attention.attention_window, [], {"length": 1}, (keys, values)),
            )
        ]
        assert error(*found) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert not counters.any()


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=["wide", "8-bit"])
@pytest.mark.parametrize("rows", [[2, 0], [1, 3, 0, 2]], ids=["R2", "R4"])
@pytest.mark.parametrize(
    ("qk_norm", "kv"),
    [("none", 2), ("weighted", 1), ("weighted", 2), ("unweighted", 4)],
    ids=["plain-K2", "weighted-K1", "weighted-K2", "unweighted-K4"],
)
@torch.no_grad()
def test_a_token_of_attention_is_that_of_the_mixer(qk_norm, kv, rows, stored):
    """Its value, and the key that it stores; with few rows and with many, whose injection a kernel adds."""
    spec = ib.AttentionSpec(n_heads=4, n_kv_heads=kv, bias=True, qk_norm=qk_norm, qk_norm_eps=0.1)
    with torch.device(DEVICE):
        mixer, norm = ib.build(spec, d_model=64), RMSNorm(64)
    for of_heads in (mixer.q_norm, mixer.k_norm) if qk_norm == "weighted" else ():
        of_heads.weight.normal_()
    states = mixer.slots(4, device=DEVICE, dtype=torch.float32, max_seq_len=40)
    states.set_dtype(stored)
    for kept in (states.keys, states.values):
        kept.copy_(random(*kept.shape) * (1 if states.key_scales is None else 40))
    if states.key_scales is not None:
        states.key_scales.fill_(0.02)
        states.value_scales.fill_(0.03)
    own, tables, rows = copy.deepcopy(states), rotations(40, 16), torch.tensor(rows, device=DEVICE)
    lengths, z = torch.tensor([33, 0, 7, 39], device=DEVICE)[: len(rows)], random(len(rows), 64)
    u = random(4, mixer.injection_width)
    context = AttentionContext(*(table[lengths][:, None, None] for table in tables), mask=None, causal=False)
    expected = z + mixer(norm(z)[:, None], u[rows][:, None], states.gather(rows, lengths), context)[:, 0]
    fused = FusedAttention(mixer, own, tables)
    for _ in range(2):  # as the calls of a search
        step = FusedStep(rows, u, lengths, torch.zeros_like(rows, dtype=torch.bool))
        found, branch = fused(z, None, norm, step)
    found = found if branch is None else found + branch.value_RD
    assert error(found - z, expected - z) < 1e-5
    if states.key_scales is None:
        torch.testing.assert_close(own.keys, states.keys, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(own.key_scales, states.key_scales)
        assert (own.keys.int() - states.keys.int()).abs().max() <= 1  # ties of the rounding


@pytest.mark.parametrize(("norm", "damping"), [("relative", 0.9), ("absolute", 0.4)])
@torch.no_grad()
def test_a_step_of_searches_by_the_limits_of_their_slots_is_that_of_plain_operators(norm, damping):
    """Of slots that search, whose values may not be finite, slots that commit, and idle ones."""
    from implicit_blocks.ops.kernels.decoding_search import take_in

    slots, width = 64, 70
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=50, norm=norm)
    search = SlotSearch(
        Picard(damping=damping), stopping, slots=slots, width=width, device=DEVICE, dtype=torch.float32
    )
    rows = torch.randperm(slots, device=DEVICE)[:50]
    for points in (search.z, search.best):
        points.copy_(random(slots, width))
    step = random(50, width) * 10 ** torch.linspace(-6, 1, 50, device=DEVICE)[:, None]
    fz = search.z[rows] + step
    fz[3, 5], fz[17, 0], fz[40] = torch.inf, torch.nan, torch.nan
    search.residual.copy_(torch.where(random(slots) > 0, torch.inf, 2.0))
    search.scale.copy_(random(slots).abs())
    search.iterations.copy_(torch.randint(40, (slots,), device=DEVICE))
    tolerance_S, max_iterations_S = search.limits
    tolerance_S.copy_((10 ** (2 * random(slots) - 3)).clamp(max=1.0))
    tolerance_S[rows[:4]] = 0.0
    max_iterations_S.copy_(torch.randint(1, 60, (slots,), device=DEVICE))
    busy, lengths = random(slots) > -1, torch.randint(20, (slots,), device=DEVICE)
    search.done.copy_(random(slots) > 1)
    busy[rows[9:12]], search.done[rows[9:12]] = True, True
    hidden, entries = random(slots, width), torch.randint(4, (3, slots), device=DEVICE)
    committing = busy[rows] & search.done[rows]
    own, own_hidden, own_lengths, own_entries = copy.deepcopy((search, hidden, lengths, entries))
    take_in(
        fz,
        rows,
        committing,
        busy,
        z_SD=own.z,
        best_SD=own.best,
        hidden_SD=own_hidden,
        residual_S=own.residual,
        scale_S=own.scale,
        iterations_S=own.iterations,
        converged_S=own.converged,
        done_S=own.done,
        lengths_S=own_lengths,
        entries_YS=own_entries,
        taps=4,
        damping=damping,
        limits_S=own.limits,
        relative=norm == "relative",
    )
    hidden[rows] = torch.where(committing[:, None], finite_or(fz, search.z[rows]), hidden[rows])
    search.take(rows, fz, busy[rows] & ~committing, lambda z: z)
    search.done[rows] &= ~committing
    lengths[rows] += committing
    entries[:, rows] = (entries[:, rows] + committing) % 4
    ended, active = search.done[rows], busy[rows] & ~committing
    for some in (active & ended & search.converged[rows], active & ended, active & ~ended, committing):
        assert some.any()
    sound = active & fz.isfinite().all(1)  # the scale of others is not read again
    torch.testing.assert_close(own.scale[rows[sound]], search.scale[rows[sound]], rtol=1e-5, atol=0)
    for name in ("z", "best", "residual", "iterations", "converged", "done"):
        torch.testing.assert_close(getattr(own, name), getattr(search, name), rtol=1e-5, atol=1e-6, msg=name)
    for found, expected in ((own_hidden, hidden), (own_lengths, lengths), (own_entries, entries)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [64, 70, 2112, 4160, 12288])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_product_row_by_row_is_the_plain_one(width, gated, dtype):
    from implicit_blocks.ops.kernels.decoding import linear_rows

    x = random(2, width)
    up, gate = ((random(37, width) / width**0.5) for _ in range(2))
    norm, z, rows = random(width), random(2, 37), torch.tensor([1, 0], device=DEVICE)
    weights, scales = (up.to(dtype), gate.to(dtype)), (None, None)
    if dtype in LARGEST:
        weights, scales = zip(*(eight_bits(each, dtype) for each in (up, gate)), strict=True)
        up, gate = (EightBits(*each).wide(torch.float32) for each in zip(weights, scales, strict=True))
    else:
        up, gate = weights
    found = linear_rows(
        x,
        weights[0],
        gate_MK=weights[1] if gated else None,
        scales_M=scales[0],
        gate_scales_M=scales[1],
        norm_K=norm,
        eps=1e-5,
        z_RM=z,
        u_SM=z.flip(0),
        rows_R=rows,
    )
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    expected = normed @ up.float().T
    if gated:
        expected = expected * F.silu(normed @ gate.float().T)
    assert error(found, expected + 2 * z) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e30, 1e-30, 0.0])
def test_the_product_of_an_input_that_is_not_finite_large_or_small(value, dtype):
    from implicit_blocks.ops.kernels.decoding import linear_rows

    x, weight, scales = random(1, 96), random(8, 96), None
    x = x * value if abs(value) < torch.inf else torch.where(torch.arange(96, device=DEVICE) == 70, value, x)
    if dtype in LARGEST:
        weight, scales = eight_bits(weight, dtype)
    found = linear_rows(x, weight, scales_M=scales)
    wide = weight.double() if scales is None else weight.double() * scales[:, None]
    if abs(value) < torch.inf:
        assert (found - x.double() @ wide.T).norm() <= 1e-4 * (x.double() @ wide.T).norm()
    else:
        assert not found.isfinite().any()


@pytest.mark.skipif(INTERPRETED, reason="copies from a GPU")
def test_a_copy_to_the_host_keeps_its_values_when_its_memory_is_reused():
    from implicit_blocks.cuda.host_copy import AsyncHostCopy

    values = torch.arange(12, device=DEVICE).view(3, 4)
    first, second = AsyncHostCopy(values), AsyncHostCopy(values + 1)
    assert first.read() == values.tolist()
    third = AsyncHostCopy(values + 2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        fourth = AsyncHostCopy(values + 3)
    assert [copy.read() for copy in (first, second, third, fourth)] == [
        (values + number).tolist() for number in range(4)
    ]
