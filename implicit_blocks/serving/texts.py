"""The texts of one request while they are generated: tokens become pieces of text, ended by stop strings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.stop_strings import StopScanner
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import (
    Event,
    Events,
    Failed,
    GeneratedToken,
    Job,
    LogProbability,
    PromptRead,
)
from implicit_blocks.serving.language import Language

if TYPE_CHECKING:
    from implicit_blocks.serving.engine import Engine


@dataclass(frozen=True)
class ScoredToken:
    """The log-probability of a token, None for the first one of a prompt, and where its text begins."""

    token: int
    offset: int
    score: LogProbability | None


@dataclass
class Piece:
    """What one or several events add to a text."""

    text: str = ""
    scores: list[ScoredToken] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)

    def append(self, other: Piece) -> None:
        """Add the next piece of the same text."""
        self.text += other.text
        self.scores += other.scores
        self.tokens += other.tokens


class Text:
    """One text of a request.

    Args:
        job: its job.
        language: converts its tokens.
        stops: its stop strings.
        echo: the text of the prompt, with which the text begins; None: without it.

    """

    def __init__(self, job: Job, language: Language, *, stops: Sequence[str], echo: str | None) -> None:
        self.job, self.language, self.echo = job, language, echo
        self.finish_reason: str | None = None
        self.completion_tokens = self.iterations = self.unconverged = 0
        self.prompt_iterations: int | None = None
        self.searched = False
        self._scanner = StopScanner(stops)
        self._stream = language.stream(job.order.prompt)
        self._length = self._released = len(echo or "")
        """The number of characters of the tokens so far, with and without those withheld by the scanner."""
        self._scores: deque[ScoredToken] = deque()
        """The scores of tokens whose text may belong to a stop string."""

    def piece(self, events: Sequence[Event]) -> Piece:
        """Return what events add, up to the end of the text.

        Raises:
            ApiError: the text failed.

        """
        part = Piece()
        tokens: list[GeneratedToken] = []
        for event in events:
            if isinstance(event, GeneratedToken):
                tokens.append(event)
            elif isinstance(event, PromptRead):
                part.append(self._prompt(event))
            elif isinstance(event, Failed):
                raise event.error
        if self._scanner.stops or self.job.order.logprobs is not None:  # each token has its place in the text
            for new in tokens:
                self._extend(part, [new])
                if self.finish_reason is not None:
                    break
        elif tokens:
            self._extend(part, tokens)
        return part

    def _extend(self, part: Piece, tokens: list[GeneratedToken]) -> None:
        """Add tokens; those with scores, and those that may complete a stop string, one at a time."""
        last = tokens[-1]
        part.tokens += tokens
        self.completion_tokens += len(tokens)
        if last.iterations is not None:
            self.searched = True
            self.iterations += sum(new.iterations or 0 for new in tokens)
            self.unconverged += sum(new.converged is False for new in tokens)
        ids = [new.token for new in tokens]
        ends = last.token in self.job.order.stop_token_ids
        if last.score is not None:
            self._scores.append(ScoredToken(last.token, self._length, last.score))
        new = self._stream.push(ids[:-1] if ends else ids)
        if last.last:
            new += self._stream.finish()
        self._length += len(new)
        text, stopped = self._scanner.push(new)
        if stopped:
            self.finish_reason = "stop"
        elif last.last:
            text += self._scanner.finish()
            self.finish_reason = "stop" if ends else "length"
        part.text += text
        self._released += len(text)
        free = not self._scanner.stops or (last.last and not stopped)
        while self._scores and (free or self._scores[0].offset < self._released):
            part.scores.append(self._scores.popleft())

    def _prompt(self, event: PromptRead) -> Piece:
        self.prompt_iterations = event.iterations
        part = Piece(text=self.echo or "")
        if event.scores is not None and self.echo is not None:
            offset = 0
            stream = self.language.stream(())
            for token, score in zip(self.job.order.prompt, (None, *event.scores), strict=True):
                part.scores.append(ScoredToken(token, min(offset, len(self.echo)), score))
                offset += len(stream.push([token]))
        if self.job.order.max_tokens == 0:
            self.finish_reason = "length"
        return part


class Texts:
    """All texts of one request.

    Args:
        engine: runs them.
        texts: the texts, whose jobs share one queue.
        timeout: seconds after which the request is ended.

    """

    def __init__(self, engine: Engine, texts: Sequence[Text], *, timeout: float) -> None:
        self.engine, self.texts, self.timeout = engine, texts, timeout
        self.jobs = [text.job for text in texts]
        self.events: Events = self.jobs[0].events
        self._running = {id(text.job): text for text in texts}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self) -> None:
        """Queue the texts, and the error that ends them when the time is up.

        Raises:
            ApiError: as ``Engine.submit``.

        """
        self.engine.submit(self.jobs)
        self._timer = asyncio.get_running_loop().call_later(self.timeout, self._expire)

    def close(self) -> None:
        """End the texts that have not ended: the client has gone, or the request has failed."""
        if self._timer is not None:
            self._timer.cancel()
        self.engine.cancel(self.jobs)

    def leave(self) -> None:
        """End ``pieces``: the client has gone."""
        self._running.clear()
        self.events.put_nowait((self.jobs[0], []))

    def _expire(self) -> None:
        late = ApiError(
            504,
            f"the request was ended after {self.timeout:g} seconds; ask for fewer tokens, or raise the "
            "server's --timeout",
            code="timeout",
        )
        for text in self._running.values():
            self.events.put_nowait((text.job, [Failed(late)]))

    @property
    def ended(self) -> bool:
        """Whether all texts have ended, or the client has gone."""
        return not self._running

    async def pieces(self) -> AsyncIterator[list[tuple[Text, Piece]]]:
        """Yield a piece of each text that continues, as soon as it is known, until all have ended.

        Raises:
            ApiError: a text failed, or 504 if the time is up.

        """
        running = self._running
        while running:
            found: dict[Text, Piece] = {}
            arrived = [await self.events.get()]
            while not self.events.empty():
                arrived.append(self.events.get_nowait())
            for job, events in arrived:
                text = running.get(id(job))
                if text is None:  # it has ended by a stop string, and the decoder was ahead
                    continue
                found.setdefault(text, Piece()).append(text.piece(events))
                if text.finish_reason is not None:
                    del running[id(job)]
                    self.engine.cancel([job])
            yield list(found.items())

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens and iterations of the request."""
        prompts = {id(text.job.order.prompt): len(text.job.order.prompt) for text in self.texts}
        prompt, completion = sum(prompts.values()), sum(text.completion_tokens for text in self.texts)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if any(text.searched for text in self.texts):
            usage["iterations"] = sum(text.iterations for text in self.texts)
            usage["unconverged_tokens"] = sum(text.unconverged for text in self.texts)
        read = [text.prompt_iterations for text in self.texts if text.prompt_iterations is not None]
        if read:
            usage["prompt_iterations"] = sum(read)
        return usage
