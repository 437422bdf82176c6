"""The spec: its costs are those of the mixer it describes, and what doesn't fit is refused."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_sliding_window import SlidingWindowAttentionSpec

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import check_plugin


@pytest.mark.parametrize("n_kv_heads", [None, 1, 2])
def test_parameters_are_counted_as_built(n_kv_heads):
    spec = SlidingWindowAttentionSpec(window=8, n_heads=4, n_kv_heads=n_kv_heads)
    with torch.device("meta"):
        mixer = ib.build(spec, d_model=32)
    counted = spec.parameter_count(32)
    weights = list(mixer.parameters())
    assert counted.weights == sum(weight.numel() for weight in weights)
    assert counted.weight_normed_rows == sum(weight.shape[0] for weight in weights)
    assert spec.injection_width(32) == mixer.injection_width


def test_operations_stop_growing_with_the_length():
    spec, attention = SlidingWindowAttentionSpec(window=64, n_heads=4), ib.AttentionSpec(n_heads=4)
    assert spec.flops_per_token(32, 10) == attention.flops_per_token(32, 10)
    assert spec.flops_per_token(32, 64) == attention.flops_per_token(32, 64)
    projections = 2 * 32 * (3 * 32 + 32)
    seen = [1, 2, *[3] * 98]
    narrow = SlidingWindowAttentionSpec(window=3, n_heads=4)
    assert narrow.flops_per_token(32, 100) == pytest.approx(projections + 4 * 32 * sum(seen) / 100)


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"window": 0}, "window", "greater than 0"),
        ({"n_kv_heads": 3}, "n_kv_heads", "n_heads 4 is not divisible by n_kv_heads 3"),
        ({"windows": 8}, "windows", "'window'"),
    ],
)
def test_what_does_not_fit_is_refused_in_its_place(fields, place, message):
    with pytest.raises(SpecError) as caught:
        SlidingWindowAttentionSpec.model_validate({"window": 8, "n_heads": 4, **fields})
    (error,) = caught.value.errors()
    assert error["loc"] == (place,)
    assert message in error["msg"]


def test_heads_must_divide_the_width():
    spec = SlidingWindowAttentionSpec(window=8, n_heads=4)
    with pytest.raises(ValueError, match="d_model 30 is not divisible by n_heads 4"):
        ib.build(spec, d_model=30)
    with pytest.raises(SpecError, match="d_model 30 is not divisible by n_heads 4"):
        ib.ExplicitLMSpec(vocab_size=6, d_model=30, n_layers=1, mixer=spec)


def test_knowing_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-sliding-window", ("mixer", "sliding_window_attention"))
