"""Slots with captured procedures, simulated on the CPU: lifetimes, failed captures, hooks."""

from __future__ import annotations

import gc
import re
from contextlib import contextmanager
from weakref import ref

import pytest
import torch

from implicit_blocks.cuda import capture as capturing
from implicit_blocks.cuda.procedures import CapturedGraphs
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.search.options import SearchOptions


class Graph:
    """Replaces a CUDA graph on the CPU: a capture computes eagerly, and a replay does nothing."""

    def replay(self):
        pass


@pytest.fixture
def captured(monkeypatch):
    """Return a function that builds a decoder whose captures are simulated on the CPU."""

    @contextmanager
    def capture(graph, **options):
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(capturing, "clear_cublas_workspaces", lambda: None)

    def build(model):
        decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=24, max_in_flight=1)
        decoder.batch = SlotBatch(
            model, max_batch_size=2, max_seq_len=24, options=SearchOptions(), graphs=True
        )
        decoder.batch.fused = None
        return decoder

    return build


def test_captured_slots_are_freed_by_reference_counting(captured, tiny_model, family):
    """Keys and graphs take gigabytes, but only a few hundred objects of Python's garbage collector."""
    decoder = captured(tiny_model(family, tolerance=1e-2))
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    for _ in range(4):  # not until the end: replays do nothing, so the search never stops
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


def test_a_memory_pool_is_not_reused_after_a_failed_capture(monkeypatch, caplog):
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
    monkeypatch.setattr(capturing, "clear_cublas_workspaces", lambda: None)
    captured, done = CapturedGraphs(), []
    for name in "abcabca":
        if len(pools) == 1 and not broken:
            broken += [False, False]
        captured.do(name, 2, lambda name=name: done.append(name))
    assert pools == [(0, 1), (0, 2), (0, 2)]
    assert [graph is None for graph in captured.graphs.values()] == [True, False, False]
    assert "".join(done) == "abcaabca"  # a failed capture runs eagerly afterwards; replays do nothing here
    assert re.search("a of 2 slots .*captured", caplog.text)


def test_models_with_hooks_decode_eagerly(captured, tiny_model, caplog):
    model, called = tiny_model("mamba2", tolerance=1e-2), []
    model.backbone.norm.register_forward_hook(lambda *_: called.append(1))
    decoder = captured(model)
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=4))
    for _ in range(12):
        decoder.step()
    assert decoder.batch.captured is None
    assert len(called) > 4
    assert "hooks" in caplog.text
