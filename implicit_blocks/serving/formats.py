"""The bodies of responses, as OpenAI's API has them, with the iterations of the searches in addition."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from implicit_blocks.serving.jobs import GeneratedToken
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.texts import Piece, ScoredToken, Text, Texts


class Format(ABC):
    """The responses of one request.

    Args:
        name: the identifier of the request.
        model: the name of the model.
        language: gives the text of single tokens.
        iterations: whether choices report the search of each token.

    """

    kind: str
    chunk_kind: str

    def __init__(self, name: str, model: str, language: Language, *, iterations: bool) -> None:
        self.name, self.model, self.language, self.iterations = name, model, language, iterations
        self.created = int(time.time())

    def whole(self, texts: Texts, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the body of a response that is not streamed, from the whole of each text."""
        choices = [self._choice(text, piece) for text, piece in zip(texts.texts, pieces, strict=True)]
        return {**self._head(self.kind), "choices": choices, "usage": texts.usage()}

    def opening(self, text: Text) -> dict[str, Any] | None:
        """Return the first chunk of a text, None if there is none."""
        return None

    def chunk(self, text: Text, piece: Piece) -> dict[str, Any] | None:
        """Return the chunk of a piece, None if it has nothing that the client asked for."""
        reports = self.iterations and piece.tokens
        if not (piece.text or piece.scores or reports or text.finish_reason):
            return None
        return {**self._head(self.chunk_kind), "choices": [self._delta(text, piece)]}

    def closing(self, texts: Texts) -> dict[str, Any]:
        """Return the chunk with the usage, at the end of a stream."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": texts.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _common(self, text: Text, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": text.job.index, "finish_reason": text.finish_reason}
        if self.iterations:
            choice["token_reports"] = [self._report(new) for new in piece.tokens]
        return choice

    def _report(self, new: GeneratedToken) -> dict[str, Any]:
        return {
            "token": self.language.token(new.token),
            "token_id": new.token,
            "iterations": new.iterations,
            "residual": new.residual,
            "converged": new.converged,
        }

    @abstractmethod
    def _choice(self, text: Text, piece: Piece) -> dict[str, Any]:
        """Return the choice of a whole text."""

    @abstractmethod
    def _delta(self, text: Text, piece: Piece) -> dict[str, Any]:
        """Return the choice of a chunk."""


class CompletionFormat(Format):
    """The responses of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def _choice(self, text: Text, piece: Piece) -> dict[str, Any]:
        scores = self._scores(piece.scores) if text.job.order.logprobs is not None else None
        return {**self._common(text, piece), "text": piece.text, "logprobs": scores}

    _delta = _choice

    def _scores(self, scores: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self.language.token(scored.token) for scored in scores],
            "token_logprobs": [None if scored.score is None else scored.score.value for scored in scores],
            "top_logprobs": [self._most_likely(scored) for scored in scores],
            "text_offset": [scored.offset for scored in scores],
        }

    def _most_likely(self, scored: ScoredToken) -> dict[str, float] | None:
        if scored.score is None:
            return None
        found: dict[str, float] = {}
        for token, value in (*scored.score.most_likely, (scored.token, scored.score.value)):
            found.setdefault(self.language.token(token), value)
        return found


class ChatFormat(Format):
    """The responses of ``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, text: Text) -> dict[str, Any]:
        """Return the chunk with the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": text.job.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def _choice(self, text: Text, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        return {**self._common(text, piece), "message": message, "logprobs": self._scores(text, piece)}

    def _delta(self, text: Text, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {**self._common(text, piece), "delta": delta, "logprobs": self._scores(text, piece)}

    def _scores(self, text: Text, piece: Piece) -> dict[str, Any] | None:
        if text.job.order.logprobs is None:
            return None
        content = []
        for scored in piece.scores:
            assert scored.score is not None
            most = [self._entry(token, value) for token, value in scored.score.most_likely]
            content.append({**self._entry(scored.token, scored.score.value), "top_logprobs": most})
        return {"content": content}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.language.token(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8"))}
