"""The environment in which CUDA graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the launches of the ``with`` block, in the autocast mode of the caller.

    Each graph gets its own cuBLAS workspaces. torch keeps one workspace per thread and stream, which all
    captures would share: the first capture that needs it allocates it in the memory pool of its graph, where
    the activations of that graph may be later, and every later graph writes there.
    """
    # Thread-local: other threads, such as data loaders, may use CUDA during the capture.
    with ExitStack() as stack:
        clear_cublas_workspaces()
        stack.callback(clear_cublas_workspaces)
        stack.enter_context(cast_cache_disabled())
        stack.enter_context(gc_disabled())
        stack.enter_context(torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"))
        yield


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector.

    It may destroy unreachable graphs or the module of a kernel, which is "not permitted when stream is
    capturing" and ends the capture. torch collected before each capture until 2.8.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def cast_cache_disabled() -> Iterator[None]:
    """Disable autocast's weight cache, whose entries would outlive the memory that a graph captured them in.

    The eager call before a capture must run in this mode too. Compiled code depends on the mode: code
    compiled outside would be compiled again during the capture, which may fail.
    """
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


def clear_cublas_workspaces() -> None:
    """Free torch's cuBLAS workspaces of all threads and streams; the next product allocates them again."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def temporary_leaves(*modules: nn.Module) -> Iterator[None]:
    """Replace the modules' parameters by other autograd leaves on the same memory.

    A leaf accumulates its gradient in the stream of its first use, which it keeps as long as an autograd
    graph refers to it: that of a pass whose backward is still to run, or of DDP. During a capture that stream
    differs from the captured one, which ends the capture.
    """
    others: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (part._parameters, name)
        for module in modules
        for part in module.modules()
        for name in part._parameters
    ]
    before = [parameters[name] for parameters, name in places]
    for (parameters, name), parameter in zip(places, before, strict=True):
        if parameter is not None:
            if parameter not in others:
                others[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            parameters[name] = others[parameter]
    try:
        yield
    finally:
        for (parameters, name), parameter in zip(places, before, strict=True):
            parameters[name] = parameter
