"""Captures: leaf parameters of their own, cuBLAS workspaces, garbage collection."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from implicit_blocks.cuda import capture as capturing
from implicit_blocks.cuda.capture import temporary_leaves


@pytest.fixture
def module():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    made[2].weight = made[0].weight  # one parameter in two places
    made[2].bias.requires_grad_(False)
    return made


def test_temporary_leaves_share_memory_and_are_temporary(module):
    before = list(module.parameters())
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(module(x).square().sum(), before[0])
    with temporary_leaves(module):
        inside = list(module.parameters())
        assert [a.data_ptr() for a in inside] == [b.data_ptr() for b in before]
        assert [a.requires_grad for a in inside] == [b.requires_grad for b in before]
        assert all(a is not b and a.is_leaf for a, b in zip(inside, before, strict=True))
        assert module[0].weight is module[2].weight
        found = torch.autograd.grad(module(x).square().sum(), inside[0])
    torch.testing.assert_close(found, expected)
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_temporary_leaves_restores_parameters_after_an_error(module):
    before = list(module.parameters())
    with pytest.raises(RuntimeError), temporary_leaves(module):
        raise RuntimeError
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_capture_clears_cublas_workspaces_before_and_after(monkeypatch):
    """A workspace shared by several graphs could overlap activations that one of them saved for backward."""
    done = []

    @contextmanager
    def capture(graph, **options):
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(capturing, "clear_cublas_workspaces", lambda: done.append("clear"))
    with capturing.capture(None, (0, 1)):
        done.append("launch")
    assert done == ["clear", "begin", "launch", "end", "clear"]
    done.clear()
    with pytest.raises(ZeroDivisionError), capturing.capture(None, (0, 1)):
        raise ZeroDivisionError
    assert done == ["clear", "begin", "clear"]


def test_capture_disables_garbage_collection(monkeypatch):
    """CUDA does not permit destroying an unreachable graph during a capture, and ends the capture."""

    @contextmanager
    def capture(graph, **options):
        enabled.append(gc.isenabled())
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(capturing, "clear_cublas_workspaces", lambda: None)
    enabled = []
    with pytest.raises(ZeroDivisionError), capturing.capture(None, (0, 1)):
        raise ZeroDivisionError
    assert enabled == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing.capture(None, (0, 1)):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
