"""The spec: costs, and errors for invalid fields."""

from __future__ import annotations

import pytest
from implicit_blocks_sliding_window import SlidingWindowAttentionSpec

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import check_plugin


def test_flops_stop_growing_with_the_length():
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
def test_an_invalid_field_is_refused_with_its_name(check_refused, fields, place, message):
    check_refused(SlidingWindowAttentionSpec, {"window": 8, "n_heads": 4, **fields}, place, message)


def test_heads_must_divide_the_width():
    spec = SlidingWindowAttentionSpec(window=8, n_heads=4)
    with pytest.raises(ValueError, match="d_model 30 is not divisible by n_heads 4"):
        ib.build(spec, d_model=30)
    with pytest.raises(SpecError, match="d_model 30 is not divisible by n_heads 4"):
        ib.ExplicitLMSpec(vocab_size=6, d_model=30, n_layers=1, mixer=spec)


def test_looking_up_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-sliding-window", ("mixer", "sliding_window_attention"))
