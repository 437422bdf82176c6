"""Which scan serves a window of Mamba2's fused operator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from implicit_blocks.ops import mamba2_mix
from implicit_blocks.ops.mamba2_mix import Mamba2Sizes


def sizes(heads=24, width=64, states=128, norm_groups=1):
    return Mamba2Sizes(heads, width, 1, states, norm_groups, 1e-5)


@pytest.mark.parametrize(
    ("batch", "shape", "expected"),
    [
        (8, sizes(), True),  # 192 programs
        (6, sizes(), True),
        (5, sizes(), False),  # 120: multiprocessors would have nothing to do
        (1, sizes(heads=132), True),
        (8, sizes(width=128), False),  # a state of 128 x 128 is more than registers hold
        (8, sizes(width=128, states=64), True),
        (8, sizes(width=48), False),
        (8, sizes(states=8), False),
        (8, sizes(norm_groups=2), True),  # the norm is a kernel of its own
    ],
)
def test_a_long_scan_walks_where_heads_keep_the_gpu_busy(batch, shape, expected, monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert mamba2_mix._walks(torch.zeros(batch, 2048, 4), shape) is expected


@pytest.mark.parametrize(("length", "expected"), [(1_198_372, True), (1_198_373, False)])
def test_a_walk_is_no_longer_than_32_bits_count(length, expected, monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert mamba2_mix._walks(torch.empty(8, length, 4, device="meta"), sizes()) is expected


@pytest.mark.parametrize(
    ("length", "shape", "expected"),
    [
        (256, sizes(), True),
        (257, sizes(), False),
        (64, sizes(norm_groups=2), False),
        (64, sizes(width=24), False),
    ],
)
def test_a_short_sequence_is_one_chunk(length, shape, expected):
    assert mamba2_mix._one_chunk(length, shape) is expected
