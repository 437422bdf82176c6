"""Searches that begin with a cheaper approximation of the map, and end with the map itself.

Far from the fixed point the error of an approximation does not matter. Matrix products in 8-bit floats change
the map's value by a few percent: the first stage stops at a residual of ``BEGIN_FINE``, or of the tolerance
if that is larger, and one call before the limit of iterations at the latest. The second stage is a new search
from there with the map itself: only its calls count as converged or as the best value, and its solver has no
memory of the other map.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks.interfaces import LowPrecisionMap
from implicit_blocks.solution import Solution

if TYPE_CHECKING:
    from implicit_blocks.search.search import Search

_LOG = logging.getLogger(__name__)

BEGIN_FINE = 0.1
"""Residual at which a search continues with the map itself: about three times the approximation's error."""


def search_in_two_stages(search: Search, f: LowPrecisionMap, z0: Tensor) -> Solution:
    """Search with the approximation first, then with ``f``: at most ``max_iterations`` calls together.

    The search is one stage where there is no approximation, with a single call, and, with the reason in the
    log once, with options that observe the iterates of one map.
    """
    given = {
        "trajectory": search.trajectory,
        "moving_average": search.moving_average,
        "exit": search.exit,
        "commit_prefix": search.commit_prefix,
    }
    observed = [name for name, value in given.items() if value not in (None, ())]
    if observed:
        _report_once(observed[0])
    low = None if observed or search.stopping.max_iterations < 2 else f.low_precision()
    if low is None:
        return search.loop(f, z0).run()
    most, tolerance = search.stopping.max_iterations, max(BEGIN_FINE, search.stopping.tolerance)
    early = search.stopping.model_copy(update={"tolerance": tolerance, "max_iterations": most - 1})
    first = replace(search, stopping=early).loop(low, z0)
    coarse = first.run()
    late = search.stopping.model_copy(update={"max_iterations": most - first.calls})
    lost = coarse.diverged if coarse.token_diverged is None else coarse.token_diverged
    start = torch.where(lost.view(*lost.shape, *[1] * (z0.ndim - lost.ndim)), z0, coarse.z)
    found = replace(search, stopping=late).loop(f, start).run()
    return _with_calls_of(coarse, found)


def _with_calls_of(coarse: Solution, found: Solution) -> Solution:
    """Return the second stage's solution with the calls of both."""
    tokens, more, trace = found.token_iterations, coarse.token_iterations, found.trace
    if trace is not None and coarse.trace is not None:
        trace = torch.cat((coarse.trace, trace))
    return replace(
        found,
        iterations=found.iterations + coarse.iterations,
        token_iterations=tokens if tokens is None or more is None else tokens + more,
        trace=trace,
    )


@cache
def _report_once(option: str) -> None:
    _LOG.warning("searches with %s use full precision from their first call on", option)
