"""The searches of a text, repeated with the residual of every call and the predictions of the iterates.

The prompt is solved in one window, and every further token alone after those before it, as ``generate`` and
the slots of a decoder do: with equal options the searches are the same, up to the rounding of sums.

Shape legend: L tokens of a window, D model width, V vocabulary, T iterates of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.decoding.prompts import needed_ids
from implicit_blocks.models.implicit import ImplicitLM, loop_counts
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.outputs import Encoded
from implicit_blocks.models.parts import ModelWeights
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.scores import LOWEST
from implicit_blocks.solution import Solution

ALTERNATIVES = 5
"""The number of most likely tokens of an output."""
MOST_ALTERNATIVES = 8
"""Maximum number of tokens that are followed through the iterates: those, and tokens that led before."""
DENSE = 16
"""Up to this call every iterate is read; then four per doubling."""


@dataclass(frozen=True)
class Reading:
    """What an iterate predicts: its number of calls, the most likely token, and log-probabilities in nats.

    ``followed`` are those of the output's ``alternatives``, in their order.
    """

    calls: int
    token: int
    log_probability: float
    followed: Sequence[float]


@dataclass(frozen=True)
class Replay:
    """The search at one token.

    ``iterations``, ``residual`` and ``converged`` report it as a ``Solution`` does, and are None in explicit
    models. ``curve`` has the residual of each call; residuals that are not finite are None. ``alternatives``
    are tokens with their log-probabilities at the output, the highest first: the most likely ones, the
    target, and tokens that were most likely at an earlier iterate. ``lens`` has the iterates.
    """

    iterations: int | None
    residual: float | None
    converged: bool | None
    curve: Sequence[float | None]
    alternatives: Sequence[tuple[int, float]]
    lens: Sequence[Reading]


def calls_to_read(most: int) -> tuple[int, ...]:
    """Return the numbers of calls whose iterates are read in a search of at most ``most`` calls."""
    found = {*range(1, min(most, DENSE) + 1), most}
    quarter = 4 * int(math.log2(DENSE))
    while (call := round(2 ** (quarter / 4))) <= most:
        found.add(call)
        quarter += 1
    return tuple(sorted(found))


def replay(
    model: LanguageModel,
    prompt: Sequence[int],
    continuation: Sequence[int],
    options: SearchOptions,
    *,
    targets: Sequence[int],
    weights: ModelWeights | None = None,
) -> Iterator[Replay]:
    """Yield the search at each token of a prompt and of its continuation, in order.

    Args:
        model: the model, in evaluation mode.
        prompt: tokens that are solved together, at least one.
        continuation: tokens that are solved one after the other.
        options: of the searches.
        targets: the token that the model should predict at each of them.
        weights: the model's prepared weights, if known.

    """
    options = replace(options, trajectory=_trajectory(model, options))
    wanted = iter(targets)
    windows = [prompt, *([token] for token in continuation)]
    device = model.embedding.weight.device
    with torch.no_grad():
        weights = model.cache_weights() if weights is None else weights
        state = model.initial_state(1, max_seq_len=len(prompt) + len(continuation))
    for window in windows:
        with torch.no_grad():
            ids = torch.tensor([list(window)], device=device)
            encoded: Encoded = model.encode(
                model.embedding(ids),
                ids_BL=needed_ids(model, ids),
                state=state,
                return_state=True,
                search=options,
                trace=isinstance(model, ImplicitLM),
                weights=weights,
            )
            assert encoded.state is not None
            state = encoded.state
        for place in range(len(window)):
            yield _replay_at(model, encoded, place, next(wanted))


def _trajectory(model: LanguageModel, options: SearchOptions) -> tuple[int, ...]:
    if not isinstance(model, ImplicitLM):
        return ()
    loops = loop_counts(model, 1, options)
    most = model.search_config(options)[1].max_iterations if loops is None else loops.maximum
    return calls_to_read(most)


@torch.no_grad()
def _replay_at(model: LanguageModel, encoded: Encoded, place: int, target: int) -> Replay:
    search: dict[str, Any] = {"iterations": None, "residual": None, "converged": None, "curve": ()}
    if encoded.solution is not None:
        search = _search(encoded.solution, place)
    points = _points(encoded, search["iterations"] or 0)
    hidden = [encoded.iterates[calls].hidden_BLD[0, place] for calls in points.values()]
    hidden_TD = torch.stack([*hidden, encoded.hidden_BLD[0, place]])
    scores_TV = model.predict(hidden_TD)[:, : model.spec.vocab_size].log_softmax(-1).double()
    scores_TV = scores_TV.nan_to_num(nan=LOWEST, neginf=LOWEST, posinf=0.0).clamp(min=LOWEST)
    best = scores_TV.max(-1)
    leading, leading_scores = best.indices.tolist(), best.values.tolist()
    kept = _followed(scores_TV[-1], leading, target)
    followed_TK = scores_TV[:, torch.tensor(kept, device=scores_TV.device)]
    final, followed = followed_TK[-1].tolist(), followed_TK.tolist()
    readings = zip(points, leading, leading_scores, followed, strict=False)  # the last one is the output
    return Replay(
        **search,
        alternatives=list(zip(kept, final, strict=True)),
        lens=[Reading(*reading) for reading in readings],
    )


def _points(encoded: Encoded, iterations: int) -> dict[int, int]:
    """Return the numbers of calls to read up to the last one, each with the iterate that has its point.

    The point of a token that has left the search is that of all later iterates.
    """
    points = {calls: calls for calls in sorted(encoded.iterates) if calls <= iterations}
    later = [calls for calls in encoded.iterates if calls > iterations]
    if later and iterations:
        points.setdefault(iterations, min(later))
    return points


def _followed(scores_V: Tensor, leading: Sequence[int], target: int) -> list[int]:
    """Return the tokens to follow through the iterates, the most likely at the output first."""
    kept = scores_V.topk(min(ALTERNATIVES, len(scores_V))).indices.tolist()
    for token in (target, *sorted(set(leading), key=leading.count, reverse=True)):
        if token not in kept and len(kept) < MOST_ALTERNATIVES:
            kept.append(token)
    values = scores_V.tolist() if len(kept) > ALTERNATIVES else None
    return kept if values is None else sorted(kept, key=lambda token: -values[token])


def _search(solution: Solution, place: int) -> dict[str, Any]:
    """Return the report of the search at a token, or of the row where tokens are not reported."""

    def value(name: str) -> Any:
        of_tokens = getattr(solution, f"token_{name}")
        return (getattr(solution, name)[0] if of_tokens is None else of_tokens[0, place]).item()

    iterations, residual = value("iterations"), value("residual")
    curve: list[float] = []
    if solution.trace is not None:
        trace = solution.trace[:, 0, place] if solution.trace.ndim == 3 else solution.trace[:, 0]
        curve = trace[:iterations].tolist()
    return {
        "iterations": iterations,
        "residual": _finite(residual),
        "converged": value("converged"),
        "curve": [_finite(each) for each in curve],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
