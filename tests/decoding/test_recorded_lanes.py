"""Lanes whose procedures are recorded: what that must not hold, and must not leave out."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

from implicit_blocks import recording
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.lane_batch import LaneBatch
from implicit_blocks.search_options import SearchOptions


class Graph:
    """Stands for a CUDA graph where there is no GPU: what is recorded is computed, and replays do nothing."""

    def replay(self):
        pass


@pytest.fixture
def recorded(monkeypatch):
    """Give lanes whose procedures are recorded as far as a CPU can."""

    @contextmanager
    def capture(graph, **options):
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(recording, "forget_work_spaces", lambda: None)

    def made(model):
        decoder = ContinuousDecoder(model, lanes=2, capacity=24)
        decoder.batch = LaneBatch(model, lanes=2, capacity=24, options=SearchOptions(), graphs=True)
        decoder.batch.fused = None
        return decoder

    return made


def test_lanes_go_without_the_collector(recorded, tiny_model, family):
    """Their keys and graphs are gigabytes, of which Python's collector sees a few hundred objects."""
    decoder = recorded(tiny_model(family, tolerance=1e-2))
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    for _ in range(4):  # a replay does nothing here: the search would never end
        decoder.step()
    assert any(each.graph is not None for each in decoder.batch._recorded.values())
    known = [ref(decoder), ref(decoder.batch)]
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert [each() for each in known] == [None, None]
    finally:
        gc.enable()


def test_modules_with_hooks_are_called(recorded, tiny_model, caplog):
    model, called = tiny_model("mamba2", tolerance=1e-2), []
    model.backbone.norm.register_forward_hook(lambda *_: called.append(1))
    decoder = recorded(model)
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    list(decoder.run())
    assert not decoder.batch._recorded
    assert len(called) > 4
    assert "modules of the model have hooks" in caplog.text
