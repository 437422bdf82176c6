"""Reports of a text, token by token: iterations, residual curves, and predictions of the iterates.

Shape legend: L tokens fed, V vocabulary.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from implicit_blocks._utils.devices import choose_device
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from implicit_blocks.decoding import generate
from implicit_blocks.decoding.prompts import check_model, check_prompts
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.language import Language, language_of
from implicit_blocks.serving.scores import log_probabilities

PAGE = Path(__file__).with_name("static") / "index.html"
_MARK = "<script>"
ALTERNATIVES = 5
"""The number of most likely tokens that a report shows."""
MOST_TOKENS = 4096
"""Maximum number of tokens of a report, whose logits exist at the same time."""


@dataclass(frozen=True)
class Inspection:
    """The report of a text.

    ``tokens`` has a mapping for each token: ``token`` (its text), ``token_id``, ``iterations``, ``residual``
    and ``converged`` of the search that predicts it, ``curve`` (the residual of each iteration),
    ``alternatives`` (the most likely tokens with their log-probabilities), ``lens`` (the most likely token
    after 1, 2, 4, … iterations), and ``generated``. No search predicts the first token. In a notebook the
    report shows itself.
    """

    title: str
    tokens: Sequence[dict[str, Any]]

    @property
    def html(self) -> str:
        """The report as one page that loads nothing."""
        data = json.dumps({"title": self.title, "tokens": self.tokens}, allow_nan=False)
        data = data.replace("<", "\\u003c")  # nothing in a text ends the script
        element = f'<script type="application/json" id="report-data">{data}</script>\n'
        return PAGE.read_text(encoding="utf-8").replace(_MARK, f"{element}{_MARK}", 1)

    def save(self, path: str | Path) -> None:
        """Write the report as an HTML file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 32rem; border: 0"></iframe>'


def inspect(
    source: Any,
    text: str | Sequence[int],
    *,
    max_new_tokens: int = 0,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    tokenizer: str | Path | None = None,
    spec: str | None = None,
    device: str = "auto",
) -> Inspection:
    """Return a report of the searches for a text, and for its greedy continuation.

    ```python
    inspect("runs/first", "0 3 2 5").save("report.html")
    ```

    All tokens are solved together in one window.

    Args:
        source: a trained model, or what ``load_model`` reads.
        text: the text, or its tokens.
        max_new_tokens: number of tokens that continue the text.
        tolerance: of the searches; None: the spec's.
        max_iterations: of the searches; None: the spec's.
        tokenizer: a ``tokenizer.json``, a folder with one, or ``bytes``; None: that of the source, if known.
        spec: the spec of the model, where the source has none.
        device: the device of a model that is loaded.

    Raises:
        ValueError: as for ``load_model`` and ``generate``; an empty text, or one of too many tokens; text for
            a model without a tokenizer.

    """
    model, found = source, None if tokenizer is None else Path(tokenizer)
    if isinstance(source, str | Path):
        model = load_model(source, spec=spec).to(choose_device(device))
        found = found if found is not None else tokenizer_of(Path(source))
    check_model(model)
    language = language_of(found, vocab_size=model.spec.vocab_size)
    tokens = language.encode(text) if isinstance(text, str) else list(text)
    if not tokens:
        raise ValueError("the text is empty; give at least one token")
    device_ids = torch.tensor([tokens], device=model.embedding.weight.device)
    limit = MOST_TOKENS - max_new_tokens
    check_prompts(device_ids, vocab_size=model.spec.vocab_size, max_length=limit, limit="a report")
    options = SearchOptions(tolerance=tolerance, max_iterations=max_iterations)
    known = len(tokens)
    if max_new_tokens:
        made = generate(
            model,
            [tokens],
            max_new_tokens=max_new_tokens,
            stop_token_ids=[token for token in language.stop_token_ids if token < model.spec.vocab_size],
            tolerance=tolerance,
            max_iterations=max_iterations,
        )
        tokens = [*tokens, *made.tokens[0, : int(made.lengths[0])].tolist()]
    reports = list(_reports(model, language, tokens, options))
    for place, report in enumerate(reports):
        report["generated"] = place >= known
    name = source if isinstance(source, str | Path) else type(model).__name__
    return Inspection(f"Iterations per token: {Path(name).name}", reports)


@torch.no_grad()
def _reports(
    model: Any, language: Language, tokens: Sequence[int], options: SearchOptions
) -> Iterator[dict[str, Any]]:
    yield _report(language, tokens[0])
    if len(tokens) < 2:
        return
    ids = torch.tensor([tokens[:-1]], device=model.embedding.weight.device)
    calls: tuple[int, ...] = ()
    implicit = isinstance(model, ImplicitLM)
    if implicit:
        _, stopping = model.search_config(options)
        calls = tuple(1 << power for power in range(stopping.max_iterations.bit_length()))
        options = SearchOptions(
            tolerance=options.tolerance, max_iterations=options.max_iterations, trajectory=calls
        )
    read = {"ids_BL": ids} if model.needs_token_ids else {}
    encoded = model.encode(model.embedding(ids), search=options, trace=implicit, **read)

    def scored(hidden_BLD: torch.Tensor, count: int) -> Any:
        logits = model.predict(hidden_BLD[0])[:, : model.spec.vocab_size]
        return log_probabilities(logits, tokens[1:], count)

    final = scored(encoded.hidden_BLD, ALTERNATIVES)
    iterates = {
        call: scored(encoded.iterates[call].hidden_BLD, 1) for call in calls if call in encoded.iterates
    }
    solution = encoded.solution
    for place, score in enumerate(final):
        report = _report(language, tokens[place + 1])
        report["alternatives"] = {language.token(token): value for token, value in score.most_likely}
        if solution is not None:
            report |= _search(solution, place)
            report["lens"] = [
                {"iterations": call, "token": language.token(token), "log_probability": value}
                for call, scores in iterates.items()
                if call <= report["iterations"]
                for token, value in scores[place].most_likely
            ]
        yield report


def _report(language: Language, token: int) -> dict[str, Any]:
    return {
        "token": language.token(token),
        "token_id": int(token),
        "alternatives": {},
        "iterations": None,
        "residual": None,
        "converged": None,
        "curve": [],
        "lens": [],
    }


def _search(solution: Any, place: int) -> dict[str, Any]:
    """Return the report of the search at a token, or of the row where tokens are not reported."""
    by_token = solution.token_iterations is not None
    names = ("iterations", "residual", "converged")
    kinds = (int, float, bool)
    values = [
        kind(getattr(solution, f"token_{name}")[0, place] if by_token else getattr(solution, name)[0])
        for name, kind in zip(names, kinds, strict=True)
    ]
    found = dict(zip(names, values, strict=True))
    if not math.isfinite(found["residual"]):
        found["residual"] = None
    curve: list[float] = []
    if solution.trace is not None:
        trace = solution.trace[:, 0, place] if solution.trace.ndim == 3 else solution.trace[:, 0]
        curve = trace[: found["iterations"]].tolist()
    return {**found, "curve": [value if math.isfinite(value) else None for value in curve]}
