"""The spec: costs, and errors for invalid fields."""

from __future__ import annotations

import pytest
from implicit_blocks_rwkv7 import RWKV7Spec

from implicit_blocks.testing import check_plugin


def test_flops_grow_with_the_state_and_not_with_the_length():
    spec = RWKV7Spec(n_heads=3, head_dim=8)
    assert spec.flops_per_token(20, 64) == spec.flops_per_token(20, 4096)
    wider = RWKV7Spec(n_heads=3, head_dim=16)
    assert wider.flops_per_token(20, 64) > spec.flops_per_token(20, 64)


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"n_heads": 0}, "n_heads", "greater than 0"),
        ({"chunk_size": 128}, "chunk_size", "less than or equal to 64"),
        ({"negative_eigenvalue": True}, "negative_eigenvalue", "'negative_eigenvalues'"),
        ({"backend": "torch"}, "backend", "'auto', 'triton', 'fla' or 'plain'"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(check_refused, fields, place, message):
    check_refused(RWKV7Spec, {"n_heads": 2, "head_dim": 4, **fields}, place, message)


def test_looking_up_the_kind_imports_no_torch():
    check_plugin("implicit-blocks-rwkv7", ("mixer", "rwkv7"))
