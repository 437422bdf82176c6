"""The processes of a run, as checkpoints and signals see them: works alike with one and with several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def several() -> bool:
    """Whether a process group connects this process with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if several() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if several() else 1


def own_group() -> dist.ProcessGroup | None:
    """Return a new group over all processes that talks between CPUs; None where there is one process.

    Every rank must call this at the same point. What a thread in the background sends must not get between
    the training's own messages: it needs a group to itself.
    """
    return dist.new_group(backend="gloo") if several() else None


def first_says(action: Callable[[], T]) -> T:
    """Carry out ``action`` on rank 0 and return its result, or raise what it raised, on every rank."""
    if not several():
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
