"""Rows in 8-bit floats, products with them, and the weights of a pass in them."""

from __future__ import annotations

import copy
import logging
import pickle
import re

import pytest
import torch
from torch import nn

from implicit_blocks.layers import Linear, SwiGLU
from implicit_blocks.ops import float8
from implicit_blocks.ops.float8 import Float8Weight
from implicit_blocks.specs import SwiGLUSpec
from implicit_blocks.weights import quantized
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.quantized import QuantizedWeights


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e20])
def test_the_rounding_error_is_at_most_a_sixteenth_of_an_entry(scale):
    x = torch.randn(7, 5, 64) * scale
    codes, scales = float8.quantized_rows(x)
    error = (codes.float() * scales - x).abs()
    smallest = scales * 2**-10  # half the distance of the smallest codes
    assert (error <= torch.maximum(x.abs() / 16, smallest) * 1.001).all()
    assert codes.float().abs().amax(-1).eq(448).all()


def test_rows_of_zeros_stay_zero_and_overflow_is_not_hidden():
    x = torch.zeros(3, 16)
    x[1, 4], x[2, 7] = torch.inf, torch.nan
    codes, scales = float8.quantized_rows(x)
    wide = codes.float() * scales
    assert (wide[0] == 0).all()
    assert not wide[1:].isfinite().all(1).any()


@pytest.mark.parametrize("rows", [48, 44])  # 44 rows are padded to 48
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_product_has_the_error_of_its_factors(dtype, bias, rows):
    x, source = torch.randn(3, 9, 256, dtype=dtype), torch.randn(rows, 256, dtype=dtype)
    offset = torch.randn(rows, dtype=dtype) if bias else None
    weight = Float8Weight.like(source)
    float8.quantize_([weight], [source])
    found = float8.float8_linear(x, weight, offset)
    expected = nn.functional.linear(x.float(), source.float(), None if offset is None else offset.float())
    assert found.dtype == dtype
    assert found.shape == (3, 9, rows)
    assert weight.codes.shape == (48, 256)
    assert 1e-3 < float((found.float() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((48, 40), r"\(48, 40\) is not divisible by 16"), ((4, 4, 16), "3 dimensions"), ((44, 32), None)],
)
def test_unsupported_weights_are_named(shape, reason):
    found = float8.weight_obstacle(torch.zeros(shape))
    assert (found is None) if reason is None else re.search(reason, found)


# ------------------------------------------------------------------------------------ weights of a pass


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = SwiGLU(SwiGLUSpec(d_ff=48), d_model=32)
        self.odd = Linear(32, 20)
        self.narrow = Linear(20, 20)

    def forward(self, x):
        return self.narrow(self.odd(self.mlp(x)))


def test_weights_are_quantized_anew_in_the_same_memory():
    torch.manual_seed(0)
    layers, kept = Layers(), QuantizedWeights()
    first = kept.of(WeightCache(layers))
    assert first is not None
    assert first.low_precision
    before = [tensor.data_ptr() for tensor in first.tensors()]
    codes = first.items()[0][1][0].codes.float()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(2.0).add_(0.1)
    cache = WeightCache(layers)
    second = kept.of(cache)
    assert second is first
    assert kept.of(cache) is first
    assert [tensor.data_ptr() for tensor in second.tensors()] == before
    assert not torch.equal(second.items()[0][1][0].codes.float(), codes)
    x = torch.randn(4, 32)
    with torch.no_grad(), second.activate():
        found = layers(x)
        assert isinstance(layers.mlp.gate_proj.cached[0], Float8Weight)
        assert isinstance(layers.odd.cached[0], Float8Weight)
        assert not isinstance(layers.narrow.cached[0], Float8Weight)  # 20 columns are not divisible by 16
    expected = layers(x).detach()
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert layers.mlp.gate_proj.cached is None


def test_other_shapes_and_types_get_new_memory():
    layers, kept = Layers(), QuantizedWeights()
    first = kept.of(WeightCache(layers))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = kept.of(WeightCache(layers))
    assert first is not None
    assert second is not None
    assert second is not first
    assert second.items()[0][1][0].dtype == torch.bfloat16


def test_gradients_are_not_recorded():
    kept = QuantizedWeights().of(WeightCache(Layers()))
    assert kept is not None
    assert not any(tensor.requires_grad for tensor in kept.tensors())


def test_copies_have_no_weights():
    kept = QuantizedWeights()
    kept.of(WeightCache(Layers()))
    assert copy.deepcopy(kept)._weights is None
    assert pickle.loads(pickle.dumps(kept))._weights is None


@pytest.mark.parametrize("reason", ["device", "shapes"])
def test_where_nothing_is_quantized_the_log_has_the_reason_once(reason, monkeypatch, caplog):
    quantized._report_once.cache_clear()
    layers: nn.Module = Layers()
    if reason == "device":
        monkeypatch.setattr(quantized, "device_obstacle", lambda device: "this GPU has capability 8.0")
    else:
        layers = Linear(20, 20)
    kept = QuantizedWeights()
    with caplog.at_level(logging.WARNING):
        assert kept.of(WeightCache(layers)) is None
        assert kept.of(WeightCache(layers)) is None
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert "full precision" in messages[0]
