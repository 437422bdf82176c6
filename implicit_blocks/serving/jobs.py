"""What the HTTP side of a server and the worker of a model exchange: orders, and reports of events.

Both may be in different processes, so everything here can be pickled and imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple

from implicit_blocks.serving.errors import ApiError

# ------------------------------------------------------------------------------------ to the worker


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How tokens are chosen: the parameters of sampling, and those that change logits before it.

    ``temperature`` 0 selects the most likely token. ``bias`` has tokens and what is added to their logits.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """A text to generate: its prompt and options.

    ``number`` is unique among the texts of a worker, and ``name`` is that of the request in errors.
    ``logprobs`` is the number of most likely tokens to report per token, None for no log-probabilities.
    ``score_prompt`` asks for the log-probabilities of the prompt's tokens. With ``max_tokens`` 0 the text
    ends when its prompt is scored.
    """

    number: int
    name: str
    prompt: Sequence[int]
    max_tokens: int
    choice: Choice = field(default_factory=Choice)
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    tolerance: float | None = None
    max_iterations: int | None = None
    logprobs: int | None = None
    score_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class InspectionOrder:
    """A text whose searches are reported, token by token."""

    number: int
    name: str
    prompt: Sequence[int]
    continuation: Sequence[int]
    tolerance: float | None
    max_iterations: int | None


@dataclass(frozen=True)
class Submit:
    """Texts to generate."""

    orders: Sequence[Order]


@dataclass(frozen=True)
class Cancel:
    """Numbers of texts and inspections to end."""

    numbers: Sequence[int]


Message = Submit | Cancel | InspectionOrder | None
"""What a worker receives; None: end."""

# ------------------------------------------------------------------------------------ from the worker


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What the HTTP side knows of a model.

    ``tolerance`` and ``max_iterations`` are those of its searches, None where there are none.
    """

    kind: Literal["implicit", "explicit", "transformers"]
    vocab_size: int
    accepts_limits: bool = False
    tolerance: float | None = None
    max_iterations: int | None = None


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
    """A generated token of the text ``number``, whether it is the last one, and the report of its search.

    ``when`` is the time of its step, by ``time.monotonic``, a clock that processes share. The report is None
    in explicit models.
    """

    number: int
    when: float
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


@dataclass(frozen=True)
class Ended:
    """A text ended without a last token: it was cancelled, or only its prompt was scored."""

    cancelled: bool


Event = PromptRead | GeneratedToken | Failed | Ended
Report = dict[str, Any]


@dataclass
class Batch:
    """What a worker reports at a time.

    The events of a text occurred in this order: ``prompts``, ``tokens``, ``ends``.
    """

    prompts: list[tuple[int, PromptRead]] = field(default_factory=list)
    tokens: list[Sequence[Any]] = field(default_factory=list)
    """Those of each step: when, and columns with the numbers of the texts and the other fields of
    ``GeneratedToken``, which are made and pickled several times faster than rows."""
    ends: list[tuple[int, Failed | Ended]] = field(default_factory=list)
    reports: list[tuple[int, Report | ApiError | None]] = field(default_factory=list)
    """Reports of inspections: of one token, the error that ends them, or None at their end."""
    busy_slots: int = 0
    failures: int = 0
    """Failures of the decoder since the last batch."""
    broken: str | None = None
    """Why the decoder cannot continue, None while it can."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not (self.prompts or self.tokens or self.ends or self.reports or self.failures)

    def generated(self) -> Iterator[GeneratedToken]:
        """Yield the tokens."""
        for when, numbers, *columns in self.tokens:
            yield from map(GeneratedToken, numbers, repeat(when), *columns)


# ------------------------------------------------------------------------------------ on the HTTP side

Events = asyncio.Queue[tuple["Job", list[Event]]]
"""Receives the events of the texts of a request, some of one text at a time."""


@dataclass(kw_only=True, eq=False)
class Job:
    """A text as its request sees it: its order, and what is known of it so far.

    ``index`` numbers the texts of a request, which share one queue of events.
    """

    order: Order
    index: int
    events: Events
    undelivered: list[Event] = field(default_factory=list)
    """Events that are not yet in the queue."""
    submitted: float = 0.0
    """When the text was queued, by ``time.monotonic``."""
    waiting: bool = True
    """Whether it waits for a slot."""
    last_token: float | None = None
    """When its last token was made."""
    finished: bool = False
    """Whether the worker is done with the text."""
