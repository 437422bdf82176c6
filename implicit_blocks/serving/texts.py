"""The texts of one request while they are generated: tokens become pieces of text, ended by stop strings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from implicit_blocks._utils.stop_strings import StopScanner
from implicit_blocks.serving.errors import ApiError
from implicit_blocks.serving.jobs import Event, Failed, GeneratedToken, Job, LogProbability, PromptRead
from implicit_blocks.serving.language import Language


class Runner(Protocol):
    """What runs texts: an ``Engine``."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue texts, all or none."""

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End texts early."""


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
        self._stream = language.stream(job.prompt)
        self._length = self._released = len(echo or "")
        """The number of characters of the tokens so far, with and without those withheld by the scanner."""
        self._scores: deque[ScoredToken] = deque()
        """The scores of tokens whose text may belong to a stop string."""

    def piece(self, event: PromptRead | GeneratedToken) -> Piece:
        """Return what an event adds."""
        if isinstance(event, PromptRead):
            return self._prompt(event)
        part = Piece(tokens=[event])
        self.completion_tokens += 1
        if event.iterations is not None:
            self.searched = True
            self.iterations += event.iterations
            self.unconverged += event.converged is False
        ends = event.token in self.job.stop_token_ids
        if event.score is not None:
            self._scores.append(ScoredToken(event.token, self._length, event.score))
        new = "" if ends else self._stream.push(event.token)
        if event.last:
            new += self._stream.finish()
        self._length += len(new)
        part.text, stopped = self._scanner.push(new)
        if stopped:
            self.finish_reason = "stop"
        elif event.last:
            part.text += self._scanner.finish()
            self.finish_reason = "stop" if ends else "length"
        self._released += len(part.text)
        free = not self._scanner.stops or (event.last and not stopped)
        while self._scores and (free or self._scores[0].offset < self._released):
            part.scores.append(self._scores.popleft())
        return part

    def _prompt(self, event: PromptRead) -> Piece:
        self.prompt_iterations = event.iterations
        part = Piece(text=self.echo or "")
        if event.scores is not None and self.echo is not None:
            offset = 0
            stream = self.language.stream(())
            for token, score in zip(self.job.prompt, (None, *event.scores), strict=True):
                part.scores.append(ScoredToken(token, min(offset, len(self.echo)), score))
                offset += len(stream.push(token))
        if self.job.max_tokens == 0:
            self.finish_reason = "length"
        return part


class Texts:
    """All texts of one request.

    Args:
        runner: runs them.
        texts: the texts, whose jobs share one queue.
        timeout: seconds after which the request is ended.

    """

    def __init__(self, runner: Runner, texts: Sequence[Text], *, timeout: float) -> None:
        self.runner, self.texts, self.timeout = runner, texts, timeout
        self.jobs = [text.job for text in texts]
        self.events = self.jobs[0].events
        self._running = {id(text.job): text for text in texts}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self) -> None:
        """Queue the texts, and the error that ends them when the time is up.

        Raises:
            ApiError: as ``Engine.submit``.

        """
        self.runner.submit(self.jobs)
        self._timer = asyncio.get_running_loop().call_later(self.timeout, self._expire)

    def close(self) -> None:
        """End the texts that have not ended: the client has gone, or the request has failed."""
        if self._timer is not None:
            self._timer.cancel()
        self.runner.cancel([text.job for text in self.texts if not text.job.finished])

    def _expire(self) -> None:
        late = ApiError(
            504,
            f"the request was ended after {self.timeout:g} seconds; ask for fewer tokens, or raise the "
            "server's --timeout",
            code="timeout",
        )
        self.events.put_nowait([(text.job, Failed(late)) for text in self._running.values()])

    async def pieces(self) -> AsyncIterator[list[tuple[Text, Piece]]]:
        """Yield a piece of each text that continues, as soon as it is known, until all have ended.

        Raises:
            ApiError: a text failed, or 504 if the time is up.

        """
        running = self._running
        while running:
            found: dict[Text, Piece] = {}
            for job, event in await self._next():
                text = running.get(id(job))
                if text is None:  # it has ended by a stop string, and the decoder was a step ahead
                    continue
                if isinstance(event, Failed):
                    raise event.error
                found.setdefault(text, Piece()).append(text.piece(event))
                if text.finish_reason is not None:
                    del running[id(job)]
                    if not (isinstance(event, GeneratedToken) and event.last):
                        self.runner.cancel([job])
            yield list(found.items())

    async def _next(self) -> list[tuple[Job, Event]]:
        """Wait for events, and return them with those that have arrived since."""
        events = await self.events.get()
        while not self.events.empty():
            events += self.events.get_nowait()
        return events

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens and iterations of the request."""
        prompts = {id(text.job.prompt): len(text.job.prompt) for text in self.texts}
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
