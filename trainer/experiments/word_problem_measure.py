"""Word problems: a trained model tested in one mode, with iterations by position and by hard tokens.

A token is *hard* where its group element is not the identity: it changes the state.

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
from trainer.step import autocast

MODES = ("simultaneous", "sequential")


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
    """Test a model in evaluation mode on a set of word problems, as JSON values.

    Args:
        model: a language model of the library.
        tested: sequences, of a :class:`WordProblemStream`.
        mode: ``simultaneous``, all tokens together, or ``sequential``, one after the other.
        device: where.
        precision: float32 or bfloat16.
        batch_size: sequences at once.
        last_tokens: how many of a sequence the first accuracy is over.
        max_iterations: of a search; None: the evaluation's.

    """
    assert isinstance(tested.source, WordProblemStream)
    began = time.perf_counter()
    correct, iterations, converged, hard, residuals = [], [], [], [], []
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
        correct.append((output.predictions == here.labels).cpu())
        solution = output.solution
        if solution is None:
            continue
        residuals.append(solution.residual.cpu())
        if solution.token_iterations is None or solution.token_converged is None:
            length = here.inputs.shape[1]  # whole rows stop at once
            iterations.append(solution.iterations.cpu()[:, None].expand(-1, length))
            converged.append(solution.converged.cpu()[:, None].expand(-1, length))
        else:
            iterations.append(solution.token_iterations.cpu())
            converged.append(solution.token_converged.cpu())
    correct_BL, hard_BL = torch.cat(correct), torch.cat(hard)
    found: dict[str, Any] = {
        "mode": mode,
        **tested.settings,
        "sequences": len(correct_BL),
        "accuracy": _mean(correct_BL),
        "accuracy_last": _mean(correct_BL[:, -last_tokens:]),
        "hard_tokens": float(hard_BL.sum(1).double().mean()),
    }
    if iterations:
        found |= _of_the_search(
            torch.cat(iterations), torch.cat(converged), torch.cat(residuals), hard_BL=hard_BL
        )
    return {**found, "seconds": round(time.perf_counter() - began, 3)}


def _of_the_search(
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


def _hard(source: WordProblemStream, tokens_BL: Tensor) -> Tensor:
    """Return which tokens' group elements are not the identity, (B, L) bool."""
    group = source.problem.group
    return tokens_BL // (source.vocab_size // group.order) != group.identity


def _mean(values: Tensor | Sequence[float]) -> float | None:
    """Return the mean as a Python number; None of nothing."""
    values = torch.as_tensor(values)
    return round(float(values.double().mean()), 7) if values.numel() else None
