"""The unit of work of a server: one text to generate or to score, and what is known of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from implicit_blocks.decoding import Sampling
from implicit_blocks.decoding.processors import LogitsProcessor
from implicit_blocks.serving.errors import ApiError


@dataclass(frozen=True)
class LogProbability:
    """The log-probability of a token, in nats, and the most likely tokens with theirs, the highest first."""

    token: int
    value: float
    most_likely: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class PromptRead:
    """The prompt of a text has been solved; ``iterations`` is the number of its search, None if unknown.

    ``scores`` are those of its tokens from the second one on, None if they were not requested.
    """

    iterations: int | None = None
    scores: Sequence[LogProbability] | None = None


class GeneratedToken(NamedTuple):  # which is made faster than a frozen dataclass
    """A generated token, whether it is the last one, and the report of its search.

    The report is None in explicit models, and ``residual`` also where it is not finite.
    """

    token: int
    last: bool
    iterations: int | None = None
    residual: float | None = None
    converged: bool | None = None
    score: LogProbability | None = None


@dataclass(frozen=True)
class Failed:
    """A text ended by an error."""

    error: ApiError


Event = PromptRead | GeneratedToken | Failed


@dataclass(kw_only=True, eq=False)
class Job:
    """A text to generate: its prompt, options, and the queue that receives its events, some at a time.

    ``logprobs`` is the number of most likely tokens to report per token, None for no log-probabilities.
    ``score_prompt`` asks for the log-probabilities of the prompt's tokens. With ``max_tokens`` 0 the text
    ends when its prompt is scored. ``index`` numbers the texts of a request, which share one queue.
    """

    name: str
    index: int
    prompt: Sequence[int]
    max_tokens: int
    events: asyncio.Queue[list[tuple[Job, Event]]]
    sampling: Sampling = field(default_factory=Sampling)
    logits_processor: Sequence[LogitsProcessor] = ()
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    tolerance: float | None = None
    max_iterations: int | None = None
    logprobs: int | None = None
    score_prompt: bool = False
    submitted: float = 0.0
    """When the text was queued, by ``time.monotonic``."""
    waiting: bool = True
    """Whether it waits for a slot."""
    last_token: float | None = None
    """When its last token was made."""
    finished: bool = False
    """Whether the decoder is done with the text; set in the decoder's thread."""
