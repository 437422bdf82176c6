"""Slots whose procedures are recorded: what that must not hold, and must not leave out."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

from implicit_blocks.cuda import capture as recording
from implicit_blocks.cuda.procedures import CapturedGraphs
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.search.options import SearchOptions


class Graph:
    """Stands for a CUDA graph where there is no GPU: what is recorded is computed, and replays do nothing."""

    def replay(self):
        pass


@pytest.fixture
def captured(monkeypatch):
    """Give slots whose procedures are recorded as far as a CPU can."""

    @contextmanager
    def capture(graph, **options):
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(recording, "clear_cublas_workspaces", lambda: None)

    def made(model):
        decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=24)
        decoder.batch = SlotBatch(
            model, max_batch_size=2, max_seq_len=24, options=SearchOptions(), graphs=True
        )
        decoder.batch.fused = None
        return decoder

    return made


def test_lanes_go_without_the_collector(captured, tiny_model, family):
    """Their keys and graphs are gigabytes, of which Python's collector sees a few hundred objects."""
    decoder = captured(tiny_model(family, tolerance=1e-2))
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    for _ in range(4):  # a replay does nothing here: the search would never end
        decoder.step()
    assert any(decoder.batch.captured.graphs.values())
    known = [ref(decoder), ref(decoder.batch)]
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert [each() for each in known] == [None, None]
    finally:
        gc.enable()


def test_what_a_recording_failed_in_takes_no_other(monkeypatch, caplog):
    handles, pools, broken = iter(range(1, 9)), [], [True]

    @contextmanager
    def capture(graph, *, pool, **options):
        pools.append(pool)
        yield
        if broken.pop():
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(recording, "clear_cublas_workspaces", lambda: None)
    captured, done = CapturedGraphs(), []
    for name in "abcabca":
        if len(pools) == 1 and not broken:
            broken += [False, False]
        captured.do(name, 2, lambda name=name: done.append(name))
    assert pools == [(0, 1), (0, 2), (0, 2)]
    assert [graph is None for graph in captured.graphs.values()] == [True, False, False]
    assert "".join(done) == "abcaabca"  # the broken one is tried, and then launched; replays do nothing here
    assert "a of 2 slots cannot be captured" in caplog.text


def test_modules_with_hooks_are_called(captured, tiny_model, caplog):
    model, called = tiny_model("mamba2", tolerance=1e-2), []
    model.backbone.norm.register_forward_hook(lambda *_: called.append(1))
    decoder = captured(model)
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    for _ in range(12):
        decoder.step()
    assert decoder.batch.captured is None
    assert len(called) > 4
    assert "modules of the model have hooks" in caplog.text
