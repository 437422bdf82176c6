"""What a server counts, in Prometheus' format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from implicit_blocks.serving.jobs import GeneratedToken, Job

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITERATIONS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_WINDOW = 10.0
"""Seconds over which the rate of tokens is averaged."""

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class TokenHistogram(Collector):
    """A histogram that one thread fills, once per generated token.

    An observation takes a tenth of the time of that of ``prometheus_client.Histogram``, which locks a counter
    for each bucket.

    Args:
        name: without the endings of its samples.
        documentation: what is observed.
        buckets: the upper bounds, ascending.
        registry: where it is registered.

    """

    def __init__(
        self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self.name, self.documentation, self.buckets = name, documentation, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        self._counts[bisect_left(self.buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the samples, as a scrape reads them."""
        bounds = (*map(floatToGoString, self.buckets), "+Inf")
        counts = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self.name, self.documentation, buckets=counts, sum_value=self._sum)


class Metrics:
    """The counters of one server, in a registry of its own.

    Args:
        slots: the number of slots of the decoder.

    """

    def __init__(self, slots: int) -> None:
        self.registry = registry = CollectorRegistry()

        def named(kind: type[_Metric], name: str, documentation: str, *labels: str, **more: Any) -> _Metric:
            return kind(f"implicit_blocks_{name}", documentation, labels, registry=registry, **more)

        def by_token(name: str, documentation: str, buckets: Sequence[float]) -> TokenHistogram:
            return TokenHistogram(
                f"implicit_blocks_{name}", documentation, buckets=buckets, registry=registry
            )

        self.requests = named(Counter, "requests", "HTTP requests by path and status", "path", "status")
        self.request_seconds = named(
            Histogram, "request_seconds", "Duration of requests, streams included", "path", buckets=_SECONDS
        )
        self.refused = named(Counter, "refused", "Requests refused by a full queue")
        self.cancelled = named(Counter, "cancelled", "Texts ended early, by clients, stop strings, or time")
        self.failures = named(Counter, "decoder_failures", "Failures of the decoder")
        self.waiting = named(Gauge, "queue", "Texts that wait for a slot")
        self.busy_slots = named(Gauge, "busy_slots", "Slots with a text")
        self.slots = named(Gauge, "slots", "Slots of the decoder")
        self.slots.set(slots)
        self.prompt_tokens = named(Counter, "prompt_tokens", "Tokens of solved prompts")
        self.tokens = named(Counter, "tokens", "Generated tokens")
        self.tokens_per_second = named(
            Gauge, "tokens_per_second", f"Generated tokens over the last {_WINDOW:.0f} s"
        )
        self.tokens_per_second.set_function(self._rate)
        self.unconverged = named(
            Counter, "unconverged_tokens", "Generated tokens whose search did not converge"
        )
        self.iterations = by_token("iterations", "Iterations per generated token", _ITERATIONS)
        self.first_token_seconds = by_token("first_token_seconds", "Time to the first token", _SECONDS)
        self.between_tokens_seconds = by_token(
            "between_tokens_seconds", "Time between the tokens of a text", _SECONDS
        )
        self._recent: deque[tuple[float, int]] = deque()

    def token(self, new: GeneratedToken, job: Job) -> None:
        """Observe a generated token of ``job``, whose ``last_token`` is the time of the one before it."""
        if new.iterations is not None:
            self.iterations.observe(new.iterations)
        if new.converged is False:
            self.unconverged.inc()
        if job.last_token is None:
            self.first_token_seconds.observe(new.when - job.submitted)
        else:
            self.between_tokens_seconds.observe(new.when - job.last_token)

    def count(self, tokens: int, now: float) -> None:
        """Count the tokens that arrived at a time."""
        if not tokens:
            return
        self.tokens.inc(tokens)
        if self._recent and now - self._recent[-1][0] < 0.1:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + tokens)
        else:
            self._recent.append((now, tokens))
            while self._recent and now - self._recent[0][0] > _WINDOW:
                self._recent.popleft()

    def _rate(self) -> float:
        now = time.monotonic()
        return sum(count for when, count in list(self._recent) if now - when <= _WINDOW) / _WINDOW

    def text(self) -> bytes:
        """Return all metrics, as a scrape reads them."""
        return generate_latest(self.registry)
