"""Reports of tokens as JSON: the search behind each, its residual curve, logit lens and alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.parts import ModelWeights
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.replay import Replay, replay
from implicit_blocks.serving.word_problem import WordProblem

MOST_TOKENS = 4096
"""Maximum number of tokens of a report, which are solved with all chosen iterates in memory."""


def token_reports(
    model: LanguageModel,
    language: Language,
    prompt: Sequence[int],
    continuation: Sequence[int],
    options: SearchOptions,
    *,
    problem: WordProblem | None = None,
    weights: ModelWeights | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the report of each token of a text, with the fields that ``Answer`` describes."""
    tokens = [*prompt, *continuation]
    products = None if problem is None else problem.products(tokens)

    def report(number: int, found: Replay | None) -> dict[str, Any]:
        fields = {**_token(language, tokens[number]), "generated": number >= len(prompt)}
        fields |= _searched(language, found)
        if products is not None and found is not None:
            fields["product"] = _token(language, products[number])
            fields["right"] = fields["prediction"]["token_id"] == products[number]
        return fields

    if products is None:
        yield report(0, None)
        if len(tokens) == 1:
            return
        # The last token predicts one that is not in the text.
        prompt, continuation = (prompt, continuation[:-1]) if continuation else (prompt[:-1], ())
    targets = tokens[1:] if products is None else products
    searches = replay(model, prompt, continuation, options, targets=targets, weights=weights)
    for number, found in enumerate(searches, 0 if products is not None else 1):
        yield report(number, found)


def _token(language: Language, token: int) -> dict[str, Any]:
    return {"token": language.token(token), "token_id": int(token)}


def _searched(language: Language, found: Replay | None) -> dict[str, Any]:
    if found is None:
        nothing: dict[str, Any] = dict.fromkeys(("iterations", "residual", "converged", "prediction"))
        return {**nothing, "curve": [], "alternatives": [], "lens": []}
    return {
        "iterations": found.iterations,
        "residual": found.residual,
        "converged": found.converged,
        "prediction": _token(language, found.alternatives[0][0]),
        "curve": [None if value is None else float(f"{value:.4g}") for value in found.curve],
        "alternatives": [
            {**_token(language, token), "log_probability": round(value, 4)}
            for token, value in found.alternatives
        ],
        "lens": [
            {
                "iterations": reading.calls,
                **_token(language, reading.token),
                "log_probability": round(reading.log_probability, 4),
                "alternatives": [round(value, 4) for value in reading.followed],
            }
            for reading in found.lens
        ],
    }
