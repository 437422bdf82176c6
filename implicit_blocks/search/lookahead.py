"""Look-ahead: whether to launch the next call of the map before its last status is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from implicit_blocks.specs import Stopping

LookAhead = Callable[[Sequence[float], Stopping], bool]
"""Given the lowest deciding residual of each call so far, whether the next one is above the tolerance too.

Asked while all elements are active. A call that was launched early in vain is discarded.
"""


def expects_all_active(lowest: Sequence[float], stopping: Stopping) -> bool:
    """Whether all elements are expected to stay active, as residuals fall by a similar factor in each call.

    Before the first call, a relative residual of 1 is expected: ``f(z)`` is as far from ``z`` as from 0.
    """
    start = [5.0, 1.0] if stopping.norm == "relative" else []
    history = [*start, *lowest[-2:]]
    if len(history) < 2:
        return False
    before, last = history[-2:]
    return before > 0 and last * min(1.0, last / before) > 2 * stopping.tolerance
