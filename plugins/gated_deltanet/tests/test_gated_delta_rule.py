"""The chunked scan against the recurrence, in output, final state and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from implicit_blocks_gated_deltanet.delta_rule import gated_delta_rule
from implicit_blocks_gated_deltanet.recurrence import gated_delta_rule_recurrence
from torch import Tensor

from implicit_blocks.testing import relative_error

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def inputs(B: int, L: int, H: int, K: int, V: int, *, top: float, dtype=torch.float64) -> dict[str, Tensor]:
    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)

    made = {
        "q": unit(B, L, H, K),
        "k": unit(B, L, H, K),
        "v": torch.randn(B, L, H, V, dtype=torch.float64),
        "g": -torch.rand(B, L, H, dtype=torch.float64).pow(4) * 3,
        "beta": torch.rand(B, L, H, dtype=torch.float64) * top,
        "initial_state": torch.randn(B, H, K, V, dtype=torch.float64),
    }
    return {name: value.to(dtype).requires_grad_() for name, value in made.items()}


def scan(f, given: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    tensors = [given[name] for name in NAMES[:5]]
    return f(*tensors, initial_state_BHKV=given.get("initial_state"), **options)


SHAPES = [(2, 1, 2, 3, 5), (2, 7, 1, 4, 4), (1, 33, 2, 4, 6), (3, 64, 2, 8, 4)]


def name_of(shape: tuple[int, ...]) -> str:
    return "-".join(f"{letter}{size}" for letter, size in zip("BLHKV", shape, strict=True))


@pytest.mark.parametrize("top", [1.0, 2.0], ids=["positive", "negative-eigenvalues"])
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=map(name_of, SHAPES))
def test_chunks_equal_the_recurrence(check_same_function, shape, chunk_size, top):
    given = inputs(*shape, top=top)
    found = scan(gated_delta_rule, given, chunk_size=chunk_size)
    check_same_function(found, scan(gated_delta_rule_recurrence, given), given, bound=1e-11)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("known", [False, True], ids=["first-document", "document-before"])
def test_a_new_document_resets_the_state(check_same_function, chunk_size, known):
    given = inputs(4, 23, 2, 4, 3, top=2.0)
    documents = torch.rand(4, 23).lt(0.2).long().cumsum(1)
    before = documents[:, 0] - torch.tensor([0, 1, 0, 1]) if known else None
    options = {"documents_BL": documents, "initial_document_B": before}
    found = scan(gated_delta_rule, given, chunk_size=chunk_size, **options)
    check_same_function(found, scan(gated_delta_rule_recurrence, given, **options), given, bound=1e-11)


def test_the_default_initial_state_is_zero():
    given = inputs(2, 9, 2, 4, 4, top=2.0)
    zeros = {**given, "initial_state": torch.zeros_like(given["initial_state"])}
    del given["initial_state"]
    for a, b in zip(
        scan(gated_delta_rule, given, chunk_size=4), scan(gated_delta_rule, zeros, chunk_size=4), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("g", [-1e-8, -200.0], ids=["remembers", "forgets"])
def test_float32_is_accurate_for_weak_and_strong_decay(g):
    given = {name: t.detach() for name, t in inputs(1, 256, 2, 8, 8, top=2.0).items()}
    given["g"] = torch.full_like(given["g"], g)
    given["g"][:, ::50] = -300.0  # strong decay must not cost precision elsewhere
    narrow = {name: t.float() for name, t in given.items()}
    narrow["g"] = given["g"]
    expected, state = scan(gated_delta_rule_recurrence, given)
    found, found_state = scan(gated_delta_rule, {**narrow, "g": given["g"].float()})
    assert found.dtype == found_state.dtype == torch.float32
    assert relative_error(found.double(), expected) < 2e-5
    assert relative_error(found_state.double(), state) < 2e-5


@torch.no_grad()
def test_bfloat16_inputs_keep_a_float32_state_under_autocast():
    given = inputs(2, 20, 2, 8, 8, top=2.0, dtype=torch.bfloat16)
    wide = {name: t.detach().double() for name, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y, state = scan(gated_delta_rule, given, chunk_size=8)
    expected, expected_state = scan(gated_delta_rule_recurrence, wide)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_error(y.double(), expected) < 1e-2
    assert relative_error(state.double(), expected_state) < 1e-5


def test_reflections_track_permutations():
    """β = 2 with a key along e_i − e_j swaps rows i and j of the state: one transposition per token."""
    generator = torch.Generator().manual_seed(5)
    pairs = list(itertools.combinations(range(3), 2))
    drawn = torch.randint(0, 3, (40,), generator=generator).tolist()
    k = torch.zeros(1, 40, 1, 3, dtype=torch.float64)
    order = list(range(3))
    for t, choice in enumerate(drawn):
        i, j = pairs[choice]
        k[0, t, 0, i], k[0, t, 0, j] = 0.5**0.5, -(0.5**0.5)
        order[i], order[j] = order[j], order[i]
    zeros, ones = torch.zeros(1, 40, 1, dtype=torch.float64), torch.ones(1, 40, 1, dtype=torch.float64)
    start = torch.eye(3, dtype=torch.float64)[None, None]
    _, state = gated_delta_rule(
        k, k, torch.zeros_like(k), zeros, 2 * ones, initial_state_BHKV=start, chunk_size=16
    )
    torch.testing.assert_close(state[0, 0], torch.eye(3, dtype=torch.float64)[order], rtol=0, atol=1e-12)


def test_a_token_without_decay_and_input_leaves_the_state_unchanged():
    given = {name: t.detach() for name, t in inputs(2, 6, 2, 4, 4, top=1.0).items()}
    given["g"], given["beta"] = torch.zeros_like(given["g"]), torch.zeros_like(given["beta"])
    before = given["initial_state"].clone()
    _, state = scan(gated_delta_rule, given, chunk_size=4)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(2, 5, 2, 4)}, r"v \(B, L, H, V\)"),
        ({"g": torch.zeros(2, 4)}, r"g and beta must have shape"),
        ({"initial_state": torch.zeros(2, 2, 4, 5)}, r"\(B, H, K, V\) = \(2, 2, 4, 4\)"),
    ],
)
def test_mismatched_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        scan(gated_delta_rule, {**inputs(2, 4, 2, 4, 4, top=1.0), **change})
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        scan(gated_delta_rule, inputs(2, 4, 2, 4, 4, top=1.0), chunk_size=0)
