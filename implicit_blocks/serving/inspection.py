"""Reports of a text as a page: the searches token by token, alone or beside those of another model."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from implicit_blocks._utils.devices import choose_device
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from implicit_blocks.decoding import generate
from implicit_blocks.decoding.prompts import check_model, check_prompts
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.serving.bundle import document
from implicit_blocks.serving.language import Language, language_of
from implicit_blocks.serving.reports import MOST_TOKENS, token_reports
from implicit_blocks.serving.word_problem import WordProblem, group_card, word_problem_of


@dataclass(frozen=True)
class Answer:
    """The report of one model: a label, its tolerance, and a mapping for each token.

    A mapping has ``token`` (its text), ``token_id`` and ``generated``; ``iterations``, ``residual`` and
    ``converged`` of the search that predicts the token; ``curve`` (the residual of each iteration),
    ``alternatives`` (tokens with their log-probabilities at the output, the highest first), ``lens`` (the
    most likely token after chosen numbers of iterations, with the log-probabilities of all alternatives) and
    ``prediction``. No search predicts the first token. A model of a word problem predicts at each token the
    product so far: its mappings are of the searches at the tokens, and add ``product`` and ``right``.
    """

    label: str
    tolerance: float | None
    tokens: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Inspection:
    """The report of a text, which shows itself in a notebook.

    ``answers`` has the report of the model, and that of a comparison if there is one.
    """

    title: str
    answers: Sequence[Answer]
    word_problem: dict[str, Any] | None = None

    @property
    def tokens(self) -> Sequence[dict[str, Any]]:
        """The tokens of the first answer."""
        return self.answers[0].tokens

    @property
    def html(self) -> str:
        """The report as one HTML page without external resources."""
        answers = [vars(answer) for answer in self.answers]
        return document({"title": self.title, "answers": answers, "word_problem": self.word_problem})

    def save(self, path: str | Path) -> None:
        """Write the report as an HTML file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        page = html.escape(self.html, quote=True)
        style = "width: 100%; height: 40rem; border: 0"
        return f'<iframe title="{html.escape(self.title)}" srcdoc="{page}" style="{style}"></iframe>'


def inspect(
    source: Any,
    text: str | Sequence[int],
    *,
    max_new_tokens: int = 0,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    compare: Any = None,
    compare_tolerance: float | None = None,
    tokenizer: str | Path | None = None,
    spec: str | None = None,
    device: str = "auto",
) -> Inspection:
    """Return a report of the searches for a text, and for its greedy continuation.

    ```python
    inspect("runs/first", "0 3 2 5").save("report.html")
    inspect("runs/books", "It was", max_new_tokens=32, compare="runs/books_explicit")
    ```

    The text is solved in one window, and each further token alone, as ``generate`` does.

    Args:
        source: a trained model, or what ``load_model`` reads.
        text: the text, or its tokens.
        max_new_tokens: number of tokens that continue the text.
        tolerance: of the searches; None: the spec's.
        max_iterations: of the searches; None: the spec's.
        compare: another model beside the first one, as ``source``.
        compare_tolerance: tolerance of the comparison, which is of the same model without ``compare``.
        tokenizer: a ``tokenizer.json``, a folder with one, or ``bytes``; None: that of the source, if known.
        spec: the spec of the model, where the source has none.
        device: the device of a model that is loaded.

    Raises:
        ValueError: as for ``load_model`` and ``generate``; an empty text, or one of too many tokens; text for
            a model without a tokenizer; a tolerance to compare with for a model that does not search.

    """
    first = _Subject.of(source, tokenizer=tokenizer, spec=spec, device=device)
    options = SearchOptions(tolerance=tolerance, max_iterations=max_iterations)
    answers = [first.answer(text, max_new_tokens, options)]
    if compare is not None or compare_tolerance is not None:
        other = first
        if compare is not None:
            other = _Subject.of(compare, tokenizer=tokenizer, spec=None, device=device)
        if compare_tolerance is not None:
            if not isinstance(other.model, ImplicitLM):
                raise ValueError(
                    f"compare_tolerance is {compare_tolerance}, but {other.name} is an explicit model, which "
                    "does not search; leave it out"
                )
            options = replace(options, tolerance=compare_tolerance)
        answers.append(other.answer(text, max_new_tokens, options))
    return Inspection(f"Iterations per token: {first.name}", answers, group_card(first.problem))


@dataclass(frozen=True)
class _Subject:
    """A model to report on."""

    name: str
    model: LanguageModel
    language: Language
    problem: WordProblem | None

    @classmethod
    def of(cls, source: Any, *, tokenizer: str | Path | None, spec: str | None, device: str) -> _Subject:
        model, found = source, None if tokenizer is None else Path(tokenizer)
        problem = None
        if isinstance(source, str | Path):
            model = load_model(source, spec=spec).to(choose_device(device))
            found = found if found is not None else tokenizer_of(Path(source))
            problem = word_problem_of(Path(source))
        check_model(model)
        language = language_of(found, vocab_size=model.spec.vocab_size)
        name = Path(source).resolve().name if isinstance(source, str | Path) else type(model).__name__
        return cls(name, model, language, problem)

    def answer(self, text: str | Sequence[int], max_new_tokens: int, options: SearchOptions) -> Answer:
        """Return the report of a text and its continuation."""
        model, language = self.model, self.language
        prompt = language.encode(text) if isinstance(text, str) else list(text)
        if not prompt:
            raise ValueError("the text is empty; give at least one token")
        ids = torch.tensor([prompt], device=model.embedding.weight.device)
        limit = MOST_TOKENS - max_new_tokens
        check_prompts(ids, vocab_size=model.spec.vocab_size, max_length=limit, limit="a report")
        continuation: list[int] = []
        if max_new_tokens:
            generated = generate(
                model,
                [prompt],
                max_new_tokens=max_new_tokens,
                stop_token_ids=[token for token in language.stop_token_ids if token < model.spec.vocab_size],
                tolerance=options.tolerance,
                max_iterations=options.max_iterations,
            )
            continuation = generated.tokens[0, : int(generated.lengths[0])].tolist()
        reports = token_reports(model, language, prompt, continuation, options, problem=self.problem)
        tolerance = None
        if isinstance(model, ImplicitLM):
            tolerance = model.search_config(options)[1].tolerance
        label = self.name if tolerance is None else f"{self.name}, tolerance {tolerance:g}"
        return Answer(label, tolerance, list(reports))
