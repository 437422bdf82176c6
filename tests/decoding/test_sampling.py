"""Sampling of tokens: distributions, limits, and random numbers per row."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from implicit_blocks.decoding import Sampling
from implicit_blocks.decoding.sampling import noise_keys

CPU = torch.device("cpu")


def frequencies(sampling, logits, count=20_000):
    drawn = sampling.choose(logits.expand(count, -1), noise_keys([7], count, device=CPU)[0])
    return drawn.bincount(minlength=logits.numel()) / count


def test_tokens_are_drawn_with_their_probability():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.5])
    for temperature in (0.5, 1.0, 2.0):
        found = frequencies(Sampling(temperature=temperature), logits)
        torch.testing.assert_close(found, (logits / temperature).softmax(0), atol=0.015, rtol=0)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    probabilities = torch.tensor([0.1, 0.4, 0.15, 0.3, 0.05])
    logits = probabilities.log()
    for sampling, kept in (
        (Sampling(temperature=1.0, top_k=2), [1, 3]),
        (Sampling(temperature=1.0, top_k=9), [0, 1, 2, 3, 4]),
        (Sampling(temperature=1.0, top_p=0.69), [1, 3]),
        (Sampling(temperature=1.0, top_p=0.71), [1, 2, 3]),
        (Sampling(temperature=1.0, top_p=1e-9), [1]),
        (
            Sampling(temperature=1.0, top_k=3, top_p=0.8),
            [1, 3],
        ),  # 0.7 / 0.85 exceeds 0.8
    ):
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        found = frequencies(sampling, logits)
        assert set(found.nonzero().flatten().tolist()) == set(kept), sampling
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


def test_a_tiny_temperature_takes_the_most_likely_token():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    keys = noise_keys(list(range(50)), 1, device=CPU)[:, 0]
    found = Sampling(temperature=1e-4).choose(logits, keys)
    assert torch.equal(found, Sampling().choose(logits))


def test_random_numbers_depend_only_on_seed_and_position():
    long, short = noise_keys([3, 8], 100, device=CPU), noise_keys([8, 3], 7, device=CPU)
    assert torch.equal(long[:, :7], short.flip(0))
    assert long.dtype == torch.int64
    assert not torch.equal(long[0], long[1])


def test_an_impossible_token_is_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf])
    found = frequencies(Sampling(temperature=1.0), logits)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 0.5, 0.0]), atol=0.015, rtol=0)


def test_a_small_change_of_the_logits_rarely_changes_a_sample():
    """The noise of a token is the same in every iterate, so that provisional and final choices agree."""
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1)).expand(5000, -1)
    keys = noise_keys([4], 5000, device=CPU)[0]
    moved = logits + 1e-3 * torch.randn(5000, 100, generator=torch.Generator().manual_seed(2))
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=40, top_p=0.9)):
        changed = sampling.choose(logits, keys) != sampling.choose(moved, keys)
        assert changed.double().mean() < 0.005


def test_swapping_nearly_equal_logits_does_not_change_samples():
    a = torch.tensor([[1.0, 1.0 + 1e-7, 0.5, 0.2]])
    b = torch.tensor([[1.0 + 1e-7, 1.0, 0.5, 0.2]])
    keys = noise_keys([1], 1000, device=CPU)[0]
    sampling = Sampling(temperature=1.0, top_p=0.9)
    assert torch.equal(sampling.choose(a.expand(1000, -1), keys), sampling.choose(b.expand(1000, -1), keys))


SMALLEST = math.ulp(0.0)  # 5e-324


@pytest.mark.parametrize("temperature", [SMALLEST, 1e-310, sys.float_info.min, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_temperatures_whose_division_overflows_take_the_most_likely_token(temperature, dtype):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).sort().values.flip(-1)
    logits = torch.linspace(2.0, -2.0, 30).expand(50, -1) + logits.to(dtype)
    keys = noise_keys(list(range(50)), 1, device=CPU)[:, 0]
    for limits in ({}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": SMALLEST}):
        found = Sampling(temperature=temperature, **limits).choose(logits, keys)
        assert torch.equal(found, Sampling().choose(logits))


def test_a_tiny_temperature_draws_evenly_among_equal_logits():
    found = frequencies(Sampling(temperature=SMALLEST), torch.tensor([1.0, 3.0, -5.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 0.0, 0.5]), atol=0.015, rtol=0)


def test_the_largest_temperature_draws_evenly_among_possible_tokens():
    found = frequencies(
        Sampling(temperature=sys.float_info.max), torch.tensor([1.0, 300.0, -torch.inf, -3.0])
    )
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, 0.0, 1.0]) / 3, atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature", [SMALLEST, 1.0, sys.float_info.max])
def test_an_infinite_logit_is_always_chosen(temperature):
    logits = torch.tensor([[0.0, torch.inf, -torch.inf, 5.0], [torch.inf, 0.0, 1.0, 2.0]])
    for keys in noise_keys([3, 5], 20, device=CPU).T:
        assert Sampling(temperature=temperature).choose(logits, keys).tolist() == [1, 0]


def test_a_nan_logit_is_chosen_as_by_argmax():
    logits = torch.tensor([[0.0, torch.nan, 7.0, torch.inf]])
    keys = torch.tensor([99])
    assert Sampling(temperature=1.0).choose(logits, keys).equal(Sampling().choose(logits))


def test_the_smallest_top_p_keeps_the_most_likely_token():
    """``top_k`` keeps less than half of the probability; its product with ``top_p`` underflows to 0."""
    logits = torch.linspace(0.0, 1e-3, 100)
    for sampling in (
        Sampling(temperature=1.0, top_k=1, top_p=SMALLEST),
        Sampling(temperature=1.0, top_k=40, top_p=SMALLEST),
        Sampling(temperature=1.0, top_p=SMALLEST),
    ):
        assert frequencies(sampling, logits, count=100)[99] == 1.0
    ordered = logits.flip(0)
    assert frequencies(Sampling(temperature=1.0, top_k=7, top_p=SMALLEST), ordered, count=100)[0] == 1.0


_logits = st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from([math.inf, -math.inf, 0.0]))


@given(
    logits=st.lists(_logits, min_size=1, max_size=12),
    temperature=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    top_k=st.none() | st.integers(1, 2**70),
    top_p=st.none() | st.floats(min_value=0, max_value=1, exclude_min=True),
    key=st.integers(-(2**63), 2**63 - 1),
)
def test_a_sampled_token_is_possible_and_within_top_k(logits, temperature, top_k, top_p, key):
    row = torch.tensor([logits])
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = sampling.choose(row, torch.tensor([key])).item()
    assert 0 <= token < len(logits)
    assert row[0, token] > -math.inf or not (row > -math.inf).any()
    if top_k is not None:
        assert int((row > row[0, token]).sum()) < top_k
    if top_k == 1:
        assert row[0, token] == row.max()
