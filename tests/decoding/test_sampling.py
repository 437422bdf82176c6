"""Drawing tokens: distributions, limits, and numbers that belong to a row."""

from __future__ import annotations

import torch

from implicit_blocks.decoding import Sampling
from implicit_blocks.decoding.sampling import uniforms

CPU = torch.device("cpu")


def frequencies(sampling, logits, count=20_000):
    drawn = sampling.choose(logits.expand(count, -1), uniforms([7], count, device=CPU)[0])
    return drawn.bincount(minlength=logits.numel()) / count


def test_tokens_are_drawn_by_their_probability():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.5])
    for temperature in (0.5, 1.0, 2.0):
        found = frequencies(Sampling(temperature=temperature), logits)
        torch.testing.assert_close(found, (logits / temperature).softmax(0), atol=0.015, rtol=0)


def test_top_k_and_top_p_leave_the_likeliest():
    probabilities = torch.tensor([0.1, 0.4, 0.15, 0.3, 0.05])
    logits = probabilities.log()
    for sampling, kept in (
        (Sampling(temperature=1.0, top_k=2), [1, 3]),
        (Sampling(temperature=1.0, top_k=9), [0, 1, 2, 3, 4]),
        (Sampling(temperature=1.0, top_p=0.69), [1, 3]),
        (Sampling(temperature=1.0, top_p=0.71), [1, 2, 3]),
        (Sampling(temperature=1.0, top_p=1e-9), [1]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), [1, 3]),  # 0.7 of 0.85 are more than 0.8
    ):
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        found = frequencies(sampling, logits)
        assert set(found.nonzero().flatten().tolist()) == set(kept), sampling
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


def test_a_vanishing_temperature_takes_the_likeliest():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    uniform = uniforms(list(range(50)), 1, device=CPU)[:, 0]
    found = Sampling(temperature=1e-4).choose(logits, uniform)
    assert torch.equal(found, Sampling().choose(logits))


def test_numbers_belong_to_the_seed_and_longer_rows_begin_as_shorter_ones():
    long, short = uniforms([3, 8], 100, device=CPU), uniforms([8, 3], 7, device=CPU)
    assert torch.equal(long[:, :7], short.flip(0))
    assert long.dtype == torch.float64
    assert not torch.equal(long[0], long[1])


def test_extreme_numbers_take_a_possible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for uniform, token in ((0.0, 1), (1.0 - 2**-53, 2)):
        chosen = Sampling(temperature=1.0).choose(logits, torch.tensor([uniform], dtype=torch.float64))
        assert chosen.item() == token


def test_swapping_nearly_equal_logits_changes_nothing():
    a = torch.tensor([[1.0, 1.0 + 1e-7, 0.5, 0.2]])
    b = torch.tensor([[1.0 + 1e-7, 1.0, 0.5, 0.2]])
    uniform = uniforms([1], 1000, device=CPU)[0]
    sampling = Sampling(temperature=1.0, top_p=0.9)
    assert torch.equal(
        sampling.choose(a.expand(1000, -1), uniform), sampling.choose(b.expand(1000, -1), uniform)
    )
