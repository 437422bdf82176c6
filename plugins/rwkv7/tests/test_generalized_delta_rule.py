"""The chunked scan against the recurrence, in output, final state and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from implicit_blocks_rwkv7.delta_rule import generalized_delta_rule
from implicit_blocks_rwkv7.recurrence import generalized_delta_rule_recurrence
from torch import Tensor

from implicit_blocks.testing import relative_error

NAMES = ("r", "log_w", "k", "v", "a", "b", "initial_state")


def inputs(
    B: int, L: int, H: int, K: int, V: int, *, top: float = 1.0, dtype=torch.float64
) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    kappa = torch.nn.functional.normalize(draw(B, L, H, K), dim=-1)
    made = {
        "r": draw(B, L, H, K) / math.sqrt(K),
        "log_w": -math.exp(-0.5) * torch.rand(B, L, H, K, dtype=torch.float64).pow(2),
        "k": draw(B, L, H, K) / math.sqrt(K),
        "v": draw(B, L, H, V),
        "a": -kappa,
        "b": top * torch.rand(B, L, H, K, dtype=torch.float64) * kappa,
        "initial_state": draw(B, H, K, V),
    }
    return {name: value.to(dtype).requires_grad_() for name, value in made.items()}


def scan(f, given: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    tensors = [given[name] for name in NAMES[:6]]
    return f(*tensors, initial_state_BHKV=given.get("initial_state"), **options)


SHAPES = [(2, 1, 2, 3, 5), (2, 7, 1, 4, 4), (1, 33, 2, 4, 6), (3, 64, 2, 8, 4)]


def name_of(shape: tuple[int, ...]) -> str:
    return "-".join(f"{letter}{size}" for letter, size in zip("BLHKV", shape, strict=True))


@pytest.mark.parametrize("top", [1.0, 2.0], ids=["positive", "negative-eigenvalues"])
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=map(name_of, SHAPES))
def test_chunks_equal_the_recurrence(check_same_function, shape, chunk_size, top):
    given = inputs(*shape, top=top)
    found = scan(generalized_delta_rule, given, chunk_size=chunk_size)
    check_same_function(found, scan(generalized_delta_rule_recurrence, given), given, bound=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("known", [False, True], ids=["first-document", "document-before"])
def test_a_new_document_resets_the_state(check_same_function, chunk_size, known):
    given = inputs(4, 23, 2, 4, 3)
    documents = torch.rand(4, 23).lt(0.2).long().cumsum(1)
    before = documents[:, 0] - torch.tensor([0, 1, 0, 1]) if known else None
    options = {"documents_BL": documents, "initial_document_B": before}
    found = scan(generalized_delta_rule, given, chunk_size=chunk_size, **options)
    check_same_function(found, scan(generalized_delta_rule_recurrence, given, **options), given, bound=1e-10)


def test_the_default_initial_state_is_zero():
    given = inputs(2, 9, 2, 4, 4)
    zeros = {**given, "initial_state": torch.zeros_like(given["initial_state"])}
    del given["initial_state"]
    ours, theirs = (scan(generalized_delta_rule, tensors, chunk_size=4) for tensors in (given, zeros))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("decay", [0.0, math.exp(-0.5)], ids=["remembers", "forgets"])
def test_float32_is_accurate_for_the_longest_chunk(decay):
    """At the fastest decay the keys of 64 tokens differ by 17 orders of magnitude in scale."""
    given = {name: t.detach() for name, t in inputs(1, 256, 2, 8, 8).items()}
    given["log_w"] = torch.full_like(given["log_w"], -decay)
    expected, state = scan(generalized_delta_rule_recurrence, given)
    narrow = {name: t.float() for name, t in given.items()}
    found, found_state = scan(generalized_delta_rule, narrow, chunk_size=64)
    assert found.dtype == found_state.dtype == torch.float32
    assert relative_error(found.double(), expected) < 1e-5
    assert relative_error(found_state.double(), state) < 1e-5


@torch.no_grad()
def test_bfloat16_inputs_keep_a_float32_state_under_autocast():
    given = inputs(2, 20, 2, 8, 8, dtype=torch.bfloat16)
    wide = {name: t.double() for name, t in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y, state = scan(generalized_delta_rule, given, chunk_size=8)
    expected, expected_state = scan(generalized_delta_rule_recurrence, wide)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_error(y.double(), expected) < 1e-2
    assert relative_error(state.double(), expected_state) < 1e-5


def test_the_delta_rule_is_a_special_case():
    """``(I − β k kᵀ) S + β k vᵀ``: the delta rule, computed token by token."""
    given = {name: t.detach() for name, t in inputs(1, 12, 1, 4, 4).items()}
    k = -given["a"]
    beta = torch.rand(1, 12, 1, 1, dtype=torch.float64)
    given |= {"log_w": torch.zeros_like(k), "b": beta * k, "k": beta * k}
    _, state = scan(generalized_delta_rule, given, chunk_size=5)
    S = given["initial_state"][0, 0]
    for t in range(12):
        key, value = k[0, t, 0, :, None], given["v"][0, t, 0, None]
        S = S + beta[0, t, 0] * key @ (value - key.T @ S)
    torch.testing.assert_close(state[0, 0], S, rtol=1e-11, atol=1e-11)


def test_a_token_without_decay_and_input_leaves_the_state_unchanged():
    given = {name: t.detach() for name, t in inputs(2, 6, 2, 4, 4).items()}
    for name in ("log_w", "k", "b"):
        given[name] = torch.zeros_like(given[name])
    before = given["initial_state"].clone()
    _, state = scan(generalized_delta_rule, given, chunk_size=4)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(2, 5, 2, 4)}, r"v \(B, L, H, V\)"),
        ({"b": torch.zeros(2, 4, 2, 3)}, r"b must have the shape of k, \(2, 4, 2, 4\)"),
        ({"initial_state": torch.zeros(2, 2, 4, 5)}, r"\(B, H, K, V\) = \(2, 2, 4, 4\)"),
    ],
)
def test_mismatched_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        scan(generalized_delta_rule, {**inputs(2, 4, 2, 4, 4), **change})
    with pytest.raises(ValueError, match="chunk_size must be from 1 to 64, got 65"):
        scan(generalized_delta_rule, inputs(2, 4, 2, 4, 4), chunk_size=65)
