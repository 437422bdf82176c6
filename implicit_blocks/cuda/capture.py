"""What a capture of CUDA graphs needs around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is launched within, in the autocast mode of the caller.

    A graph's work spaces of cuBLAS are its own. torch keeps one a thread and stream, which all captures
    would share: the first to need one takes it from memory of its own pool, where at another time what its
    forward pass left for backward may stand, and every later graph writes there.
    """
    # Other threads, such as those that load data, may go on.
    with ExitStack() as stack:
        clear_cublas_workspaces()
        stack.callback(clear_cublas_workspaces)
        stack.enter_context(forgetting_casts())
        stack.enter_context(gc_disabled())
        stack.enter_context(torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"))
        yield


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep Python's collector from running.

    What it finds may be graphs that nothing leads to any more, or a kernel's module: to destroy one while
    another is captured is "not permitted when stream is capturing", and ends the capture. torch collected
    before each until 2.8.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def forgetting_casts() -> Iterator[None]:
    """Have autocast remember no weight's cast: it would outlive what a graph captured of it.

    What is called to be captured next is called within, too. Compiled code depends on it: that of a call
    outside would be compiled again in the middle of the capture, which may not survive that.
    """
    if not torch.is_autocast_enabled("cuda"):
        yield
        return
    with torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False):
        yield


def clear_cublas_workspaces() -> None:
    """Give back the memory that torch keeps for cuBLAS, for all threads and streams; it is taken anew."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def leaves_of_its_own(module: nn.Module) -> Iterator[None]:
    """Have a module's parameters stood for by other leaves of autograd, on the same memory.

    A leaf hands its gradient on in the stream of its first use, and remembers that as long as any graph of
    autograd knows it, such as that of a pass whose backward is to come, or as DDP lives. In a capture that
    is another stream than the captured one, and ends it.
    """
    others: dict[nn.Parameter, nn.Parameter] = {}
    places = [(part._parameters, name) for part in module.modules() for name in part._parameters]
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
