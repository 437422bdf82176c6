"""The progress line of the tokenization."""

from __future__ import annotations

import io

import pytest

from trainer.data.tokenizing import progress


def test_throughput_excludes_resumed_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    stream = io.StringIO()
    shown = progress.TokenizationProgress(stream)
    for share in (0.0, 0.5, 1.0):  # a tokenizer is trained on the same text first, which takes 1000 seconds
        shown.report(share, 0, 0)
        now += 500.0
    shown.report(0.0, 0, 0)
    now += 20.0
    shown.report(0.25, 4, 2_000_000)
    line = stream.getvalue().splitlines()[-1]
    assert "100.0k tok/s" in line
    assert "ETA 1m00s" in line


def test_throughput_of_a_split_begins_with_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    stream = io.StringIO()
    shown = progress.TokenizationProgress(stream)
    for share, tokens in ((0.5, 0), (1.0, 4_000_000)):
        shown.report(share, 1, tokens)
        now += 20.0
    for tokens in (300_000, 500_000):  # a small validation split, read as a whole before its first report
        shown.report(1.0, 1, tokens)
        now += 20.0
    rates = [line.split("tokens")[1].split()[0] for line in stream.getvalue().splitlines()]
    assert rates == ["200.0k", "0", "10.0k"]
