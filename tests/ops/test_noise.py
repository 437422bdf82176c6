"""Counter-based noise: its distribution, its independence, and equality over windows and devices."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_blocks.ops.noise import hash_counters, normal_at, sampled_normal, uniform_at

POSITIONS = torch.arange(1024)[None]


def noise(seed: int = 0, width: int = 256, **options) -> torch.Tensor:
    return normal_at(POSITIONS, width, **{"seed": seed, "dtype": torch.float64, **options})[0]


def standard_errors(products: torch.Tensor) -> float:
    """Return the mean of products of independent normal numbers, in standard errors."""
    return float(products.mean().abs()) * products.numel() ** 0.5


def test_the_hash_is_splitmix64():
    assert hash_counters(0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 with seed 0
    assert hash_counters(2**64) == hash_counters(0)


def test_tensors_and_host_have_the_same_hash():
    seed, position, channel = 11, 37, 5
    key_of_position, key_of_channel = hash_counters(seed, 0), hash_counters(seed, 1)
    bits = hash_counters(hash_counters(key_of_position + position) + hash_counters(key_of_channel + channel))
    signed = bits - 2**64 if bits >= 2**63 else bits
    u = (2 * (signed >> 11) + 1) * 2.0**-53
    value = normal_at(torch.tensor([[position]]), channel + 1, seed=seed, dtype=torch.float64)[0, 0, channel]
    assert float(value) == pytest.approx(
        math.sqrt(2) * float(torch.erfinv(torch.tensor(u, dtype=torch.float64)))
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_noise_is_normal(seed):
    values = noise(seed).flatten()
    count = values.numel()
    assert standard_errors(values) < 4.5
    assert abs(float(values.var()) - 1) < 4.5 * math.sqrt(2 / count)
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erf(bound / math.sqrt(2))
        found = float((values.abs() < bound).double().mean())
        assert abs(found - share) < 4.5 * math.sqrt(share * (1 - share) / count)


def test_truncated_noise_is_bounded_and_not_rescaled():
    values = noise(truncation=3.0)
    assert float(values.abs().max()) < 3
    inside = noise().flatten()
    inside = inside[inside.abs() < 3]
    assert float(values.std()) == pytest.approx(float(inside.std()), abs=0.008)


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_positions_and_channels_are_independent(distance):
    values = noise()
    assert standard_errors(values[distance:] * values[:-distance]) < 4.5
    assert standard_errors(values[:, distance:] * values[:, :-distance]) < 4.5
    assert standard_errors(values[distance:, distance:] * values[:-distance, :-distance]) < 4.5


def test_seeds_are_independent():
    one, other = noise(0), noise(1)
    assert standard_errors(one * other) < 4.5
    assert standard_errors(one[1:] * other[:-1]) < 4.5
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64])
def test_windows_have_the_noise_of_the_whole_sequence(width, dtype):
    positions = torch.arange(50) + torch.tensor([[0], [1000]])
    whole = normal_at(positions, width, seed=3, dtype=dtype)
    parts = [normal_at(positions[:, a:b], width, seed=3, dtype=dtype) for a, b in ((0, 1), (1, 18), (18, 50))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=0)
    wider = normal_at(positions, width + 3, seed=3, dtype=dtype)
    torch.testing.assert_close(wider[..., :width], whole, rtol=1e-12, atol=0)


def test_noise_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    noise()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("truncation", [None, 2.0])
def test_sampled_noise_comes_from_the_global_generator(truncation):
    def sample(dtype=torch.float64):
        return sampled_normal((200, 300), truncation=truncation, dtype=dtype, device=torch.device("cpu"))

    torch.manual_seed(4)
    first, second = sample(), sample()
    torch.manual_seed(4)
    assert torch.equal(sample(), first)
    assert standard_errors(first * second) < 4.5
    assert float(first.std()) == pytest.approx(1 if truncation is None else 0.880, abs=0.01)
    assert truncation is None or float(first.abs().max()) <= truncation
    assert sample(torch.bfloat16).dtype == torch.bfloat16


def test_host_numbers_are_uniform_and_independent():
    values = torch.tensor([[uniform_at(1, i, j) for j in range(100)] for i in range(100)]) - 0.5
    scaled = values * math.sqrt(12)
    assert standard_errors(scaled) < 4.5
    assert standard_errors(scaled[1:] * scaled[:-1]) < 4.5
    assert standard_errors(scaled[:, 1:] * scaled[:, :-1]) < 4.5
    assert float(scaled.var()) == pytest.approx(1, abs=0.05)
    assert float(values.abs().max()) < 0.5


@pytest.mark.gpu
def test_a_captured_graph_has_the_noise_of_the_cpu():
    positions = torch.arange(9, device="cuda")[None]
    normal_at(positions, 32, seed=2, truncation=3.0, dtype=torch.float32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = normal_at(positions, 32, seed=2, truncation=3.0, dtype=torch.float32)
    positions += 100
    graph.replay()
    expected = normal_at(positions.cpu(), 32, seed=2, truncation=3.0, dtype=torch.float32)
    torch.testing.assert_close(captured.cpu(), expected, rtol=1e-6, atol=1e-7)
