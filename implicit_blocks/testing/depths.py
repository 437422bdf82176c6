"""The contracts of a depth; each is a function of its spec.

``check_depth(MySpec(...))`` runs all; ``DEPTH_CONTRACTS`` names them, to write one test each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from implicit_blocks.depths.depth import Depth
from implicit_blocks.registry import build
from implicit_blocks.specs import DepthSpec
from implicit_blocks.testing.contract import named, require

BATCH, SAMPLES = 4, 400


def _build_depth(spec: DepthSpec) -> Depth:
    depth: Depth = build(spec)
    return depth.train()


def _samples(depth: Depth, count: int, batch_size: int = BATCH) -> list[list[int] | None]:
    """Return the samples as lists, None where the stopping rule decides."""
    return [_listed(depth.sample(batch_size, "cpu")) for _ in range(count)]


def _listed(loops: int | Tensor | None) -> list[int] | None:
    if loops is None:
        return None
    return [int(number) for number in loops.flatten()] if isinstance(loops, Tensor) else [loops]


def type_and_bounds(spec: DepthSpec) -> None:
    """Check the type of a sample, and that it is at least 1 and at most the spec's ``maximum_loops``."""
    depth, maximum = _build_depth(spec), spec.maximum_loops()
    for batch_size in (1, BATCH):
        for _ in range(50):
            loops = depth.sample(batch_size, "cpu")
            fits = loops is None or type(loops) is int
            if isinstance(loops, Tensor):
                fits = loops.shape == (batch_size,) and loops.dtype == torch.int64
            numbers = _listed(loops) or [1]
            require(
                fits and min(numbers) >= 1 and (maximum is None or max(numbers) <= maximum),
                spec,
                "type and bounds",
                f"sample({batch_size}) returned {loops!r}, maximum_loops is {maximum}; return None, an int, "
                "or a tensor (B,) of int64, at least 1 and at most the maximum",
            )


def mean(spec: DepthSpec) -> None:
    """Check the spec's ``expected_loops`` against the mean of many samples."""
    found = [number for loops in _samples(_build_depth(spec), SAMPLES) for number in loops or []]
    expected = spec.expected_loops()
    if not found or expected is None:
        require(
            not found and expected is None,
            spec,
            "mean",
            f"expected_loops returns {expected}, the samples are {found[:3] or None}; "
            "both must be None where the stopping rule decides, and numbers otherwise",
        )
        return
    numbers = torch.tensor(found, dtype=torch.float64)
    error = abs(float(numbers.mean()) - expected)
    bound = 5 * float(numbers.std()) / len(found) ** 0.5 + 1e-9
    require(
        error <= bound,
        spec,
        "mean",
        f"expected_loops returns {expected:.3f}, but {len(found)} samples have mean {numbers.mean():.3f}",
    )


def equal_on_ranks(spec: DepthSpec) -> None:
    """Check that two processes have the same numbers, whatever the state of torch's global generator."""
    torch.manual_seed(0)
    first = _samples(_build_depth(spec), 20)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    second = _samples(_build_depth(spec), 20)
    require(
        first == second and torch.equal(torch.get_rng_state(), before),
        spec,
        "equal on ranks",
        "two modules have different numbers, or use torch's global generator; compute the numbers from the "
        "seed and a counter",
    )


def resumes(spec: DepthSpec) -> None:
    """Check that a module that loads a state dict, and a copy, continue with the same numbers."""
    for batch_size in (1, BATCH):
        depth = _build_depth(spec)
        _samples(depth, 7, batch_size)
        state, copied = copy.deepcopy(depth.state_dict()), copy.deepcopy(depth)
        with torch.device("meta"):
            empty = _build_depth(spec)
        empty.sample(batch_size, "cpu")
        empty = empty.to_empty(device="cpu")
        used = _build_depth(spec)
        _samples(used, 3, batch_size)
        expected = _samples(depth, 20, batch_size)
        for name, other in (("a copy", copied), ("from the meta device", empty), ("a used module", used)):
            if other is not copied:
                other.load_state_dict(state)
            require(
                _samples(other, 20, batch_size) == expected,
                spec,
                "resumes",
                f"{name} with the state dict does not continue the numbers; keep the counter in a persistent "
                "buffer, and read it again after a state dict is loaded",
            )


def evaluation(spec: DepthSpec) -> None:
    """Check that evaluation returns None and does not change the numbers of training."""
    expected, depth = _samples(_build_depth(spec), 6), _build_depth(spec)
    found = _samples(depth, 3)
    evaluated = _samples(depth.eval(), 5)
    found += _samples(depth.train(), 3)
    require(
        found == expected and evaluated == [None] * 5,
        spec,
        "evaluation",
        f"in evaluation sample returned {evaluated[0]}, and training continued with {found[3:]} instead of "
        f"{expected[3:]}; return None unless self.training",
    )


DEPTH_CONTRACTS: dict[str, Callable[[DepthSpec], None]] = named(
    (type_and_bounds, mean, equal_on_ranks, resumes, evaluation)
)


def check_depth(spec: DepthSpec) -> None:
    """Run every contract on the depth that a registered spec builds.

    Raises:
        ContractError: names the component, the broken contract and a remedy.

    """
    for contract in DEPTH_CONTRACTS.values():
        contract(spec)
