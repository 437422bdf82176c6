"""What Mamba2 asks of the GPU's operator; the operator's values are compared on a GPU (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.mixers import Mamba2
from implicit_blocks.ops import mamba2_mix
from implicit_blocks.ops.causal_conv import fla as conv_fla
from implicit_blocks.ops.ssd import fla as scan_fla
from implicit_blocks.ops.ssd import mamba_ssm
from implicit_blocks.weights.cache import WeightCache


class Wrapped(nn.Module):
    """Wraps a layer, as an adapter does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.fixture
def asked(monkeypatch):
    """Replace the operator; record the weights of the output projection that it receives."""
    given = []

    def mix(projected, u, *, sizes, return_state, out_weight_DI=None, out_bias_D=None, **others):
        given.append((out_weight_DI, out_bias_D))
        mixed = projected[..., : sizes.inner].tanh()
        state = projected.new_zeros(1) if return_state else None
        if out_weight_DI is not None:
            mixed = nn.functional.linear(mixed, out_weight_DI, out_bias_D)
        return mixed, state

    monkeypatch.setattr("implicit_blocks.mixers.mamba2.mixer._fusible", lambda *_: True)
    monkeypatch.setattr(mamba2_mix, "suits", lambda *_: True)
    monkeypatch.setattr(mamba2_mix, "mamba2_mix", mix)
    torch.manual_seed(0)
    mixer = Mamba2(ib.Mamba2Spec(d_state=16, head_dim=16, bias=True), d_model=32)
    z = torch.randn(2, 8, 32)
    context = SimpleNamespace(plain=True, continues=False, u_rows_BL=None)
    return SimpleNamespace(given=given, mixer=mixer, run=lambda: mixer(z, None, None, context))


def test_the_operator_includes_the_output_projection_if_gradients_are_required(asked):
    mixer = asked.mixer
    with torch.no_grad():
        expected = asked.run()
    found = asked.run()
    torch.testing.assert_close(found, expected)
    assert [weight is mixer.out_proj.weight for weight, _ in asked.given] == [False, True]
    assert asked.given[1][1] is mixer.out_proj.bias
    found.sum().backward()
    assert mixer.out_proj.weight.grad is not None


def test_the_operator_receives_the_cached_weights(asked):
    cached = WeightCache(asked.mixer)
    with cached.activate():
        asked.run()
        assert asked.given[0] == asked.mixer.out_proj.cached


def test_a_wrapper_of_the_output_projection_is_called(asked):
    plain = asked.run().detach()
    asked.mixer.out_proj = Wrapped(asked.mixer.out_proj)
    torch.testing.assert_close(asked.run(), 2 * plain)
    assert asked.given[1] == (None, None)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_the_output_projection_are_called(asked, kind):
    plain, called, projection = asked.run().detach(), [], asked.mixer.out_proj
    register = {
        "forward": projection.register_forward_hook,
        "forward_pre": projection.register_forward_pre_hook,
        "full_backward": projection.register_full_backward_hook,
    }[kind]
    handle = register(lambda *_: called.append(1))
    found = asked.run()
    torch.testing.assert_close(found.detach(), plain)
    found.sum().backward()
    assert called == [1]
    assert asked.given[1:] == [(None, None)]
    handle.remove()
    asked.run()
    assert asked.given[2][0] is projection.weight


def unfused(mixer):
    """Let the plain operators accept the fixture's window."""
    mixer._scan = lambda gate, *_args, **_options: (mixer.out_proj(mixer.norm(gate)), None)
    mixer._project = lambda z, *_: (mixer.in_proj(z)[..., : mixer.d_inner], None, None)


def test_a_hook_of_the_norm_selects_the_plain_operators(asked):
    called = []
    asked.mixer.norm.register_forward_hook(lambda *_: called.append(1))
    unfused(asked.mixer)
    context = SimpleNamespace(plain=True, continues=False, u_rows_BL=None, order_BL=None, inverse_BL=None)
    asked.mixer(torch.randn(2, 8, 32), None, None, context)
    assert called == [1]
    assert not asked.given


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script:DeprecationWarning"
)  # forward mode's own, at its first use
def test_forward_mode_selects_the_plain_operators(asked):
    """Forward mode and ``torch.func`` cannot differentiate the kernels."""
    unfused(asked.mixer)
    context = SimpleNamespace(plain=True, continues=False, u_rows_BL=None, order_BL=None, inverse_BL=None)
    z = torch.randn(2, 8, 32)
    torch.func.jvp(lambda z: asked.mixer(z, None, None, context), (z,), (torch.ones_like(z),))
    assert not asked.given
    asked.mixer(z, None, None, context)
    assert asked.given


@pytest.mark.filterwarnings("ignore")  # the compiler's, of itself
def test_the_compiled_mixer_has_no_graph_break(asked):
    torch.compiler.reset()
    expected = asked.run().detach()
    asked.mixer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(asked.run().detach(), expected)
    torch.compiler.reset()


def test_rows_beyond_the_grid_limit_are_not_supported():
    few, many = (torch.empty(rows, 4, 8, dtype=torch.bfloat16, device="meta") for rows in (65_535, 65_536))
    assert mamba2_mix.suits(few)
    assert not mamba2_mix.suits(many)
    assert not mamba2_mix.suits(few.float())
    long = torch.empty(256, 65_536, 1, dtype=torch.bfloat16, device="meta")  # 256 chunks each
    assert not mamba2_mix.suits(long)
    assert mamba2_mix.suits(long[:255])


@pytest.mark.parametrize("name", ["A_log", "D", "dt_bias", "conv.weight", "conv.bias", "norm.weight"])
def test_strided_parameters_select_the_plain_operators(asked, name):
    """The kernels ignore strides: transposed or expanded parameters would silently give wrong values."""
    owner = asked.mixer.get_submodule(name.rpartition(".")[0])
    name = name.rpartition(".")[2]
    value = getattr(owner, name).detach()
    apart = value.mT.contiguous().mT if value.ndim > 1 else torch.stack([value, value], 1)[:, 0]
    setattr(owner, name, nn.Parameter(apart))
    unfused(asked.mixer)
    context = SimpleNamespace(plain=True, continues=False, u_rows_BL=None, order_BL=None, inverse_BL=None)
    asked.mixer(torch.randn(2, 8, 32), None, None, context)
    assert not asked.given


def test_scans_beyond_what_a_grid_counts_are_left_to_others():
    def refused(rows, length, apart=1):
        stride = (length * apart,)
        x = SimpleNamespace(
            is_cuda=True, dtype=torch.bfloat16, shape=(rows, length), stride=stride.__getitem__
        )
        return mamba_ssm.BACKEND.refuses(x, None, None)

    assert not refused(65_535, 256)
    assert "65535 chunks" in refused(65_536, 1)
    assert "65535 chunks" in refused(32_768, 257)
    assert "32 bits" in refused(64, 2048, apart=16_384)
    assert not refused(64, 2048, apart=16_383)


def test_fla_s_kernels_count_rows_and_heads_to_the_end_of_a_grid():
    def conv(rows):
        x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(rows, 4, 96))
        return conv_fla.BACKEND.refuses(x, None, None)

    def scan(rows, length, heads):
        shape = (rows, length, heads, 64)
        x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=shape, requires_grad=False)
        return scan_fla.BACKEND.refuses(x, None, None)

    assert not conv(65_535)
    assert "65535 rows" in conv(65_536)
    assert not scan(4095, 256, 16)
    assert "65535 heads" in scan(4096, 256, 16)
    assert not scan(4096, 1, 16)  # a single token's kernel counts by one number
