"""Tokens in flight: what wavefront decoding keeps of each slot's window of provisional tokens.

Shape legend: S slots, R of them in a call, W tokens in flight, C core width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Solver
from implicit_blocks.search.state import initial_scale


class Flight(NamedTuple):
    """The windows of slots, (S, W, …); the first ``count_S`` tokens of a window are in flight.

    The first token of a window is final, as its predecessor is committed; the others are provisional. The
    token whose predecessors are all solved is the *head*: its search is that of sequential decoding if it
    also began as the head (``clean``).
    """

    tokens: Tensor
    """int64: the tokens."""
    next: Tensor
    """int64: the token chosen after the token; final once the token has converged."""
    z: Tensor
    """(S, W, C): the point of the next call of the map; the solution of tokens that are ``done``."""
    best: Tensor
    """(S, W, C): the value with the lowest residual since the token is the head."""
    lowest: Tensor
    """That residual."""
    residual: Tensor
    """The residual of the last call; not finite if the token has diverged."""
    scale: Tensor
    """The largest norm of the map's values (``implicit_blocks.search.state.initial_scale``)."""
    iterations: Tensor
    """int64: the number of calls since the token began."""
    as_head: Tensor
    """int64: the number of calls since the token is the head."""
    fresh: Tensor
    """bool: the token begins, or begins anew, in the next call."""
    clean: Tensor
    """bool: the token began as the head."""
    within: Tensor
    """The residual of the last call, or inf unless it and those before it were within the tolerance."""
    done: Tensor
    """bool: the token is solved, and committed by the next call; only the first tokens are."""
    converged: Tensor
    """bool: the token is within the tolerance."""
    solver: Any
    """The solver's state."""

    @classmethod
    def empty(cls, solver: Solver, *, tokens: int, like_SC: Tensor) -> Flight:
        """Return windows without tokens; ``like_SC`` has a point of each slot."""
        slots, width = like_SC.shape
        points = like_SC.new_zeros(slots, tokens, width)
        precision = torch.promote_types(like_SC.dtype, torch.float32)
        numbers = points.new_zeros(slots, tokens, dtype=precision)
        counts = points.new_zeros(slots, tokens, dtype=torch.int64)
        flags = torch.zeros_like(counts, dtype=torch.bool)
        state = pytree.tree_map(
            lambda leaf: leaf.unflatten(0, (slots, tokens)).clone(), solver.init(points.flatten(0, 1))
        )
        return cls(
            tokens=counts,
            next=counts.clone(),
            z=points,
            best=points.clone(),
            lowest=numbers,
            residual=numbers.clone(),
            scale=initial_scale(points, (slots, tokens))[0],
            iterations=counts.clone(),
            as_head=counts.clone(),
            fresh=flags,
            clean=flags.clone(),
            within=numbers.clone(),
            done=flags.clone(),
            converged=flags.clone(),
            solver=state,
        )

    def take(self, rows_R: Tensor | None, tokens: int) -> Flight:
        """Return the first ``tokens`` tokens of these slots, or a view of those of all slots."""

        def part(whole: Tensor) -> Tensor:
            return whole[:, :tokens] if rows_R is None else whole[rows_R, :tokens]

        return _applied(part, self)

    def put(self, rows_R: Tensor | None, part: Flight) -> None:
        """Store the first tokens of these slots."""
        pairs = zip(pytree.tree_leaves(tuple(self)), pytree.tree_leaves(tuple(part)), strict=True)
        for whole, new in pairs:
            if whole is new:
                continue
            if rows_R is None:
                whole[:, : new.shape[1]] = new
            else:
                whole[rows_R, : new.shape[1]] = new

    def shifted(self, steps_R: Tensor) -> Flight:
        """Return the windows after the first ``steps_R`` tokens; the last tokens are repeated."""
        tokens = self.tokens.shape[1]
        places = torch.arange(tokens, device=steps_R.device) + steps_R[:, None]
        places = places.clamp(max=tokens - 1)

        def move(whole: Tensor) -> Tensor:
            index = places.view(*places.shape, *[1] * (whole.ndim - 2))
            return whole.gather(1, index.expand(-1, -1, *whole.shape[2:]))

        return _applied(move, self)


def _applied(function: Any, flight: Flight) -> Flight:
    return Flight(*pytree.tree_map(function, tuple(flight)))
