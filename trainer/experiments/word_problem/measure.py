"""Word problems: test of a trained model in one mode, with iterations by position and by hard tokens.

A token is *hard* if its group element is not the identity, so that it changes the state. A *step* is wrong if
the predicted product is not the previously predicted one times the token, whether or not either is correct.

Shape legend: B sequences, L tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.source import EvaluationSet
from trainer.data.word_problem import WordProblemStream
from trainer.experiments.common.search import by_token
from trainer.run.step import autocast

MODES = ("simultaneous", "sequential")

NEAR = 4
"""Window of the count of nearby hard tokens: the receptive field of Mamba2's convolution, four tokens."""


@torch.no_grad()
def measure(
    model: nn.Module,
    tested: EvaluationSet,
    *,
    mode: str,
    device: torch.device,
    precision: str,
    batch_size: int,
    last_tokens: int,
    max_iterations: int | None = None,
) -> dict[str, Any]:
    """Test a model in evaluation mode on a set of word problems; return JSON values.

    Args:
        model: a language model of the library.
        tested: the sequences, of a `WordProblemStream`.
        mode: ``simultaneous``, all tokens together, or ``sequential``, one at a time.
        device: the device.
        precision: float32 or bfloat16.
        batch_size: sequences per forward pass.
        last_tokens: number of final tokens for ``accuracy_last``.
        max_iterations: maximum iterations per search; None: that of the evaluation.

    """
    assert isinstance(tested.source, WordProblemStream)
    began = time.perf_counter()
    correct, iterations, converged, hard, wrong, residuals = [], [], [], [], [], []
    for batch in tested.batches(batch_size):
        hard.append(_hard(tested.source, batch.inputs))
        here = batch.to(device)
        with autocast(device, precision):
            output = model(
                here.inputs,
                labels=here.labels,
                return_logits=False,
                window_length=1 if mode == "sequential" else None,
                max_iterations=max_iterations,
            )
        predictions = output.predictions.cpu()
        correct.append(predictions == batch.labels)
        wrong.append(_wrong_steps(tested.source, batch.inputs, predictions))
        solution = output.solution
        if solution is None:
            continue
        residuals.append(solution.residual.cpu())
        of_tokens, flags = by_token(solution, tested.length)
        iterations.append(of_tokens)
        converged.append(flags)
    correct_BL, hard_BL = torch.cat(correct), torch.cat(hard)
    found: dict[str, Any] = {
        "mode": mode,
        **tested.settings,
        "sequences": len(correct_BL),
        "accuracy": _mean(correct_BL),
        "accuracy_last": _mean(correct_BL[:, -last_tokens:]),
        "hard_tokens": float(hard_BL.sum(1).double().mean()),
        "wrong_steps_by_hard_tokens": _by_hard_tokens(torch.cat(wrong), hard_BL),
        "wrong_steps_by_hard_tokens_near": _by_hard_tokens_near(torch.cat(wrong), hard_BL),
    }
    if iterations:
        found |= _search_statistics(
            torch.cat(iterations), torch.cat(converged), torch.cat(residuals), hard_BL=hard_BL
        )
    return {**found, "seconds": round(time.perf_counter() - began, 3)}


def _search_statistics(
    iterations_BL: Tensor, converged_BL: Tensor, residual_B: Tensor, *, hard_BL: Tensor
) -> dict[str, Any]:
    counted_BL = hard_BL.cumsum(1)
    by_hard = [
        {"hard_tokens": int(count), "tokens": int(here.sum()), "iterations": _mean(iterations_BL[here])}
        for count in counted_BL.unique()
        for here in [counted_BL == count]
    ]
    return {
        "iterations": _mean(iterations_BL.amax(1)),
        "iterations_max": int(iterations_BL.max()),
        "iterations_of_hard_tokens": _mean(iterations_BL[hard_BL]),
        "iterations_of_identities": _mean(iterations_BL[~hard_BL]),
        "residual": _mean(residual_B),
        "residual_max": float(residual_B.max()),
        "converged": _mean(converged_BL.all(1)),
        "tokens_converged": _mean(converged_BL),
        "iterations_by_position": [round(v, 3) for v in iterations_BL.double().mean(0).tolist()],
        "iterations_by_hard_tokens": by_hard,
    }


def _by_hard_tokens(wrong_BL: Tensor, hard_BL: Tensor) -> list[dict[str, Any]]:
    """Count hard tokens, and wrong steps among them, by the hard tokens so far, in doubling ranges."""
    counted_BL = hard_BL.cumsum(1)
    found, least = [], 1
    while (here := hard_BL & (counted_BL >= least) & (counted_BL < 2 * least)).any():
        found.append({"hard_tokens": least, "tokens": int(here.sum()), "wrong": _mean(wrong_BL[here])})
        least *= 2
    return found


def _by_hard_tokens_near(wrong_BL: Tensor, hard_BL: Tensor) -> list[dict[str, Any]]:
    """Count hard tokens, and wrong steps among them, by how many of the last `NEAR` are hard."""
    near_BL = hard_BL.long().cumsum(1)
    near_BL[:, NEAR:] -= near_BL[:, :-NEAR].clone()
    return [
        {"hard_tokens": count, "tokens": int(here.sum()), "wrong": _mean(wrong_BL[here])}
        for count in range(1, NEAR + 1)
        for here in [hard_BL & (near_BL == count)]
        if here.any()
    ]


def _wrong_steps(source: WordProblemStream, tokens_BL: Tensor, predicted_BL: Tensor) -> Tensor:
    """Return where the predicted group element is not the previous prediction times the token's.

    The result is (B, L) bool.
    """
    group = source.problem.group
    of_each = source.vocab_size // group.order
    # Predictions outside the group (a model's vocabulary may be larger) are wrong, and so is the next step.
    none, table = group.order, torch.full((group.order + 1, group.order), -1)
    table[:none] = torch.tensor(group.table)
    predicted_BL = (predicted_BL // of_each).clamp(max=none)
    before_BL = predicted_BL.roll(1, dims=1)
    before_BL[:, 0] = group.identity
    return predicted_BL != table[before_BL, tokens_BL // of_each]


def _hard(source: WordProblemStream, tokens_BL: Tensor) -> Tensor:
    """Return which tokens' group elements are not the identity, (B, L) bool."""
    group = source.problem.group
    return tokens_BL // (source.vocab_size // group.order) != group.identity


def _mean(values: Tensor | Sequence[float]) -> float | None:
    """Return the mean as a Python number; None if empty."""
    values = torch.as_tensor(values)
    return round(float(values.double().mean()), 7) if values.numel() else None
