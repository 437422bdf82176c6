"""Scoring given continuations."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

CONTINUATIONS = [[3, 4], [1], [7, 0, 2, 5], [9, 9, 9]]


@torch.no_grad()
def test_scores_equal_those_of_single_sequences_in_any_windows(family, tiny_model, prompts):
    model = tiny_model(family)
    for window_length in (None, 1, 3):
        found = ib.score(model, prompts, CONTINUATIONS, window_length=window_length)
        assert found.lengths.tolist() == [2, 1, 4, 3]
        assert found.solution.converged.all()
        for row, (prompt, rest) in enumerate(zip(prompts, CONTINUATIONS, strict=True)):
            logits = model(torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1, :19]
            expected = logits.log_softmax(-1)[torch.arange(len(rest)), rest]
            torch.testing.assert_close(found.log_probabilities[row, : len(rest)], expected, atol=1e-4, rtol=0)
            assert found.log_probabilities[row, len(rest) :].eq(0).all()
            assert found.total[row].item() == pytest.approx(expected.sum().item(), abs=1e-4)


@pytest.mark.parametrize("search", [{"tolerance": 0.05}, {"loops": 2}], ids=str)
def test_scores_in_windows_do_not_depend_on_the_other_rows(family, tiny_model, prompts, search):
    model, options = tiny_model(family), {"window_length": 2, **search}
    found = ib.score(model, prompts, CONTINUATIONS, **options)
    for row, (prompt, rest) in enumerate(zip(prompts, CONTINUATIONS, strict=True)):
        alone = ib.score(model, [prompt], [rest], **options)
        torch.testing.assert_close(found.total[row], alone.total[0], atol=1e-4, rtol=0)
        assert torch.equal(found.solution.iterations[row], alone.solution.iterations[0])


def test_greedy_continuations_are_reported_as_greedy(family, tiny_model, prompts):
    model = tiny_model(family)
    generated = ib.generate(model, prompts, max_new_tokens=4)
    found = ib.score(model, prompts, generated.tokens.tolist())
    assert found.greedy.all()
    other = generated.tokens.clone()
    other[1, 3] = (other[1, 3] + 1) % 19
    assert ib.score(model, prompts, other.tolist()).greedy.tolist() == [True, False, True, True]


def test_explicit_models_score_without_a_solution(family, explicit_model, prompts):
    found = ib.score(explicit_model(family), prompts, CONTINUATIONS)
    assert found.solution is None
    assert found.total.lt(0).all()


def test_invalid_prompts_and_continuations_are_refused(tiny_model, prompts):
    model = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"4 prompts.* 2 continuations"):
        ib.score(model, prompts, [[1], [2]])
    with pytest.raises(ValueError, match=r"continuation 1 .*shape"):
        ib.score(model, prompts[:2], [[1], []])
    with pytest.raises(ValueError, match=r"continuation 0 .*'ab'"):
        ib.score(model, prompts[:2], ["ab", "c"])
    with pytest.raises(ValueError, match="no prompts"):
        ib.score(model, [], [])
    with pytest.raises(ValueError, match=r"prompt 1 .*shape"):
        ib.score(model, [[1], []], [[1], [2]])
    with pytest.raises(ValueError, match=r"prompt 0 .*40"):
        ib.score(model, [[1]], [[40]])
    with pytest.raises(ValueError, match=r" 3 .*max_length"):
        ib.score(model, [[1, 2]], [[3, 4]], max_length=3)
