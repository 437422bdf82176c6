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
