"""Depths: contracts, distributions, resuming, and bounds that are refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.depths.distributions import draw_poisson, mean_of_clamped_poisson
from implicit_blocks.ops.noise import uniform_at
from implicit_blocks.specs import Spec, SpecError
from implicit_blocks.testing import DEPTH_CONTRACTS

DEPTHS = {
    "until-converged": ib.UntilConvergedSpec(),
    "fixed": ib.FixedDepthSpec(loops=4),
    "poisson": ib.PoissonDepthSpec(mean=4),
    "poisson-bounded": ib.PoissonDepthSpec(mean=4, minimum=3, maximum=6, per="sequence"),
    "poisson-small": ib.PoissonDepthSpec(mean=0.2, per="sequence"),
    "log-normal-poisson": ib.LogNormalPoissonDepthSpec(mean=32),
    "log-normal-poisson-bounded": ib.LogNormalPoissonDepthSpec(mean=8, maximum=10, per="sequence", seed=3),
    "uniform": ib.UniformDepthSpec(low=2, high=5),
    "uniform-sequence": ib.UniformDepthSpec(high=9, per="sequence"),
}
RANDOM = {name: spec for name, spec in DEPTHS.items() if hasattr(spec, "per")}


class Holder(Spec):
    """A spec with a depth."""

    depth: ib.DepthSpec


def samples(spec: ib.DepthSpec, count: int, batch_size: int = 1) -> torch.Tensor:
    depth = ib.build(spec)
    found = [torch.as_tensor(depth.sample(batch_size, "cpu")).flatten() for _ in range(count)]
    return torch.cat(found).double()


@pytest.mark.parametrize("contract", DEPTH_CONTRACTS)
@pytest.mark.parametrize("name", DEPTHS)
def test_a_depth_satisfies_the_contract(name, contract):
    DEPTH_CONTRACTS[contract](DEPTHS[name])


def test_every_kind_is_tested():
    assert {spec.kind for spec in DEPTHS.values()} == set(registry.kinds("depth"))


def poisson(rate: float, count: int) -> float:
    return math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))


@pytest.mark.parametrize("rate", [0.1, 3.0, 40.0, 700.0])
def test_poisson_numbers_have_the_probabilities_of_the_distribution(rate):
    draws, counter = 4000, iter(range(10**6))
    found = [draw_poisson(rate, lambda: uniform_at(7, next(counter))) for _ in range(draws)]
    for cut in (rate - math.sqrt(rate), rate, rate + math.sqrt(rate)):
        share = sum(poisson(rate, k) for k in range(max(0, math.floor(cut) + 1)))
        below = sum(number <= cut for number in found) / draws
        assert abs(below - share) < 4.5 * math.sqrt(share * (1 - share) / draws) + 1e-9


def test_the_largest_uniform_number_gives_a_finite_poisson_number():
    assert 30 < draw_poisson(4.0, lambda: 1 - 2.0**-53) < 60
    assert draw_poisson(200.0, lambda: 1 - 2.0**-53) < 500


def test_the_published_parcae_sampler_is_a_poisson_number_of_at_least_one():
    found = samples(ib.PoissonDepthSpec(mean=1.5), 6000)
    probabilities = [poisson(1.5, 0) + poisson(1.5, 1), poisson(1.5, 2), poisson(1.5, 3)]
    for loops, probability in enumerate(probabilities, start=1):
        share = float((found == loops).double().mean())
        assert abs(share - probability) < 4.5 * math.sqrt(probability * (1 - probability) / found.numel())
    assert ib.PoissonDepthSpec(mean=1.5).expected_loops() == pytest.approx(1.5 + poisson(1.5, 0))


def test_the_published_huginn_sampler_has_its_mean_and_variance():
    found = samples(ib.LogNormalPoissonDepthSpec(mean=32), 4000)
    assert float(found.mean()) == pytest.approx(33, abs=1.3)
    variance = 32 + 32**2 * (math.exp(0.25) - 1)  # of the Poisson number, and of its log-normal rate
    assert float(found.std()) == pytest.approx(math.sqrt(variance), rel=0.08)


def test_uniform_depths_reach_both_bounds_equally_often():
    found = samples(ib.UniformDepthSpec(low=3, high=6), 4000)
    shares = torch.bincount(found.long(), minlength=7)[3:].double() / found.numel()
    assert float((shares - 0.25).abs().max()) < 0.03
    assert shares.numel() == 4


@pytest.mark.parametrize(("low", "high"), [(1, None), (3, 9), (0, 2), (200, None), (1, 10_000)])
@pytest.mark.parametrize("rate", [0.3, 5.0, 80.0])
def test_the_mean_of_a_clamped_poisson_number_is_the_sum_over_its_values(rate, low, high):
    values = range(400)
    expected = sum(poisson(rate, k) * min(max(k, low), high or 10**9) for k in values)
    assert mean_of_clamped_poisson(rate, low, high) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("spec", "expected", "maximum"),
    [
        (ib.UntilConvergedSpec(), None, None),
        (ib.FixedDepthSpec(loops=4), 4.0, 4),
        (ib.PoissonDepthSpec(mean=50), 50.0, None),
        (ib.PoissonDepthSpec(mean=50, minimum=2, maximum=2), 2.0, 2),
        (ib.LogNormalPoissonDepthSpec(mean=32), 33.0, None),
        (ib.LogNormalPoissonDepthSpec(mean=32, maximum=1000), 33.0, 1000),
        (ib.UniformDepthSpec(low=2, high=7), 4.5, 7),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_a_spec_states_the_mean_and_the_largest_number_of_loops(spec, expected, maximum):
    assert spec.expected_loops() == (None if expected is None else pytest.approx(expected, rel=1e-6))
    assert spec.maximum_loops() == maximum


def test_sequences_have_numbers_of_their_own():
    loops = ib.build(ib.PoissonDepthSpec(mean=20, per="sequence")).sample(16, "cpu")
    assert (loops.shape, loops.dtype) == ((16,), torch.int64)
    assert loops.unique().numel() > 3


def test_a_larger_batch_keeps_the_numbers_of_its_first_rows():
    small, large = (ib.build(DEPTHS["poisson-bounded"]).sample(size, "cpu") for size in (3, 8))
    assert torch.equal(small, large[:3])


def test_the_seed_changes_the_numbers():
    one, other = (samples(ib.PoissonDepthSpec(mean=20, seed=seed), 20) for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["until-converged", "fixed"])
def test_depths_without_random_numbers_add_nothing_to_a_checkpoint(name):
    assert not ib.build(DEPTHS[name]).state_dict()


@pytest.mark.parametrize("name", RANDOM)
def test_the_state_dict_counts_the_samples_of_training(name):
    depth = ib.build(DEPTHS[name])
    for _ in range(3):
        depth.sample(2, "cpu")
    depth.eval().sample(2, "cpu")
    assert {key: int(value) for key, value in depth.state_dict().items()} == {"draws": 3}


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in-a-model"])
def test_a_run_resumes_with_the_same_numbers(nested, assign):
    def made() -> torch.nn.Module:
        depth = ib.build(ib.UniformDepthSpec(high=1000))
        return torch.nn.ModuleDict({"depth": depth}) if nested else depth

    def numbers(module: torch.nn.Module) -> list[int]:
        depth = module["depth"] if nested else module
        return [depth.sample(1, "cpu") for _ in range(5)]

    first, resumed = made(), made()
    numbers(first)
    numbers(resumed)
    numbers(resumed)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()), assign=assign)
    assert numbers(resumed) == numbers(first)


@pytest.mark.parametrize(
    "changed",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.double(), lambda m: m.to("cpu")],
    ids=["deepcopy", "pickle", "dtype", "device"],
)
def test_a_copied_or_converted_depth_continues(changed):
    depth, reference = (ib.build(ib.UniformDepthSpec(high=1000)) for _ in range(2))
    for each in (depth, reference):
        each.sample(1, "cpu")
    depth = changed(depth)
    assert [depth.sample(1, "cpu") for _ in range(5)] == [reference.sample(1, "cpu") for _ in range(5)]
    assert depth.draws.dtype == torch.int64


def test_reset_parameters_restarts_a_depth_built_on_the_meta_device():
    with torch.device("meta"):
        depth = ib.build(ib.UniformDepthSpec(high=1000))
    assert isinstance(depth.sample(1, "meta"), int)
    depth = depth.to_empty(device="cpu")
    depth.reset_parameters()
    assert depth.sample(1, "cpu") == ib.build(ib.UniformDepthSpec(high=1000)).sample(1, "cpu")


def test_a_checkpoint_that_is_read_into_the_tensors_resumes_the_numbers():
    first, resumed = (ib.build(ib.UniformDepthSpec(high=1000)) for _ in range(2))
    for _ in range(5):
        first.sample(1, "cpu")
    resumed.sample(1, "cpu")
    for name, tensor in resumed.state_dict().items():
        tensor.copy_(first.state_dict()[name])
    assert [resumed.sample(1, "cpu") for _ in range(5)] == [first.sample(1, "cpu") for _ in range(5)]


def test_sampling_reads_the_buffer_once(monkeypatch):
    depth = ib.build(ib.UniformDepthSpec(high=9, per="sequence"))
    depth.sample(2, "cpu")

    def fail(tensor):
        raise AssertionError("the buffer was read, for which the host waits for the device")

    with monkeypatch.context() as patched:
        for name in ("__int__", "__index__", "item", "tolist"):
            patched.setattr(torch.Tensor, name, fail)
        for _ in range(3):
            depth.sample(2, "cpu")
    assert int(depth.draws) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "fixed", "loops": 0}, r"depth\.loops: .*at least 1 loop; got 0"),
        ({"kind": "fixed"}, r"depth\.loops: is missing"),
        ({"kind": "poisson", "mean": 0}, r"depth\.mean: .*positive.*got 0"),
        ({"kind": "poisson", "mean": -2.5}, r"depth\.mean: .*positive.*got -2.5"),
        ({"kind": "poisson", "mean": 1e9}, r"depth\.mean: .*65536.*got"),
        ({"kind": "poisson", "mean": 4, "maximum": 0}, r"depth\.maximum: .*at least 1 loop; got 0"),
        ({"kind": "poisson", "mean": 4, "minimum": 0}, r"depth\.minimum: .*at least 1 loop; got 0"),
        (
            {"kind": "poisson", "mean": 4, "minimum": 5, "maximum": 3},
            r"depth\.maximum: maximum 3 .*minimum 5.*at least 5",
        ),
        ({"kind": "log_normal_poisson", "mean": 0.0}, r"depth\.mean: .*positive.*got 0"),
        (
            {"kind": "log_normal_poisson", "mean": 4, "maximum": 0},
            r"depth\.maximum: .*at least 1 loop; got 0",
        ),
        ({"kind": "log_normal_poisson", "mean": 4, "sigma": -1}, r"depth\.sigma: .*got -1"),
        ({"kind": "uniform", "low": 0, "high": 4}, r"depth\.low: .*at least 1 loop; got 0"),
        ({"kind": "uniform", "low": 1, "high": 0}, r"depth\.high: .*at least 1 loop; got 0"),
        ({"kind": "uniform", "low": 5, "high": 4}, r"depth\.low: low 5 .*high 4.*at most 4"),
        ({"kind": "uniform", "high": 4, "per": "token"}, r"depth\.per: .*'batch' or 'sequence'.*token"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_wrong_bounds_are_refused_with_place_value_and_remedy(fields, message):
    with pytest.raises(SpecError, match=message):
        Holder(depth=fields)


def test_a_random_depth_without_a_distribution_is_refused():
    with pytest.raises(NotImplementedError, match=r"RandomDepthSpec must override draw"):
        ib.RandomDepthSpec(kind="none").draw(lambda: 0.5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("per", ["batch", "sequence"])
def test_sampling_does_not_synchronize_a_gpu(per):
    depth = ib.build(ib.UniformDepthSpec(high=9, per=per)).cuda()
    expected = ib.build(ib.UniformDepthSpec(high=9, per=per))
    found = [depth.sample(4, "cuda")]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += [depth.sample(4, "cuda") for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for loops in found:
        assert torch.equal(torch.as_tensor(loops).cpu(), torch.as_tensor(expected.sample(4, "cpu")))
    assert int(depth.draws) == 4
