"""The spec: costs, and errors for invalid fields."""

from __future__ import annotations

import pytest
from implicit_blocks_gated_deltanet import GatedDeltaNetSpec

from implicit_blocks.testing import check_plugin


def test_flops_grow_with_the_state_and_not_with_the_length():
    spec = GatedDeltaNetSpec(n_heads=3, head_dim=8)
    assert spec.flops_per_token(20, 64) == spec.flops_per_token(20, 4096)
    wider = GatedDeltaNetSpec(n_heads=3, head_dim=8, expand_v=4)
    assert wider.flops_per_token(20, 64) > spec.flops_per_token(20, 64)


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"n_heads": 0}, "n_heads", "greater than 0"),
        ({"a_min": 20.0}, "a_min", "a_min 20.0 is above a_max 16.0"),
        ({"negative_eigenvalue": True}, "negative_eigenvalue", "'negative_eigenvalues'"),
        ({"backend": "triton"}, "backend", "'plain' or 'fla'"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(check_refused, fields, place, message):
    check_refused(GatedDeltaNetSpec, {"n_heads": 2, "head_dim": 4, **fields}, place, message)


def test_looking_up_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-gated-deltanet", ("mixer", "gated_deltanet"))
