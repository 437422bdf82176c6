"""A fixed number of loops: the map is applied n times, undamped, without a stopping rule.

Looped models are trained and evaluated in this way: Geiping et al., "Scaling up Test-Time Compute with Latent
Reasoning: A Recurrent Depth Approach", 2025.

Shape legend: B batch, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, SteppingMap
from implicit_blocks.search.agreement import Agreement, fixed_budget
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count

Count = int | Tensor


@dataclass(frozen=True, eq=False)
class LoopCounts:
    """How many loops each row or token takes, and how many of them are differentiated.

    Args:
        total: number of loops, at least 1: one for all, or int64 per row (B,) or per token (B, L).
        differentiated: how many of them are differentiated, the last ones, from 0 to ``total``: one number,
            or a tensor of ``total``'s shape; None: the gradient estimator decides.

    Tensors are kept on the host. One on a GPU is copied there once, which waits for the device; nothing else
    does, and plain numbers never wait.

    Raises:
        ValueError: another type or shape, or a number out of its range.

    """

    total: Count
    differentiated: Count | None = None

    def __post_init__(self) -> None:
        for name in ("total", "differentiated"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                object.__setattr__(self, name, _on_host(name, value))
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r}; give an integer, or an int64 tensor (B,) or (B, L)")
        if (least := _minimum(self.total)) < 1:
            raise ValueError(f"the total number of loops is {least}; choose at least 1")
        if self.differentiated is None:
            return
        shapes = [
            tuple(count.shape) for count in (self.total, self.differentiated) if isinstance(count, Tensor)
        ]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"total has shape {shapes[0]} and differentiated {shapes[1]}; give both the same shape"
            )
        if (fewest := _minimum(self.differentiated)) < 0:
            raise ValueError(
                f"the number of differentiated loops is {fewest}; choose from 0 to the total number"
            )
        if (excess := _maximum(self.differentiated - self.total)) > 0:
            raise ValueError(
                f"differentiated exceeds the total number of loops by {excess}; choose from 0 to the total"
            )

    @classmethod
    def of(cls, loops: Count | tuple[int, int] | LoopCounts) -> LoopCounts:
        """Return the counts of n loops, also (B,) or (B, L), or of (n, k) with the last k differentiated."""
        if isinstance(loops, LoopCounts):
            return loops
        return cls(*loops) if isinstance(loops, tuple) else cls(loops)

    @property
    def maximum(self) -> int:
        """The largest total number of loops."""
        return _maximum(self.total)

    def split(self, last: int | None = None) -> tuple[Count, Count]:
        """Return the numbers of loops without and with gradients; they add up to ``total``.

        Args:
            last: how many loops are differentiated, all of those that there are if there are fewer; None:
                all loops. ``differentiated``, where given, takes precedence.

        Raises:
            ValueError: ``last`` is below 1.

        """
        if last is not None:
            require_count("last", last)
        total, chosen = self.total, self.differentiated
        if chosen is None:
            chosen = total if last is None else _at_most(total, last)
        return total - chosen, chosen

    def one_less(self, last: int | None = None) -> LoopCounts:
        """Return the counts before the last loop, which the caller takes for all elements; ``last`` as above.

        Raises:
            ValueError: elements have different numbers of loops, or one loop.

        """
        _, differentiated = self.split(last)
        if isinstance(self.total, Tensor) or isinstance(differentiated, Tensor):
            raise ValueError(
                "tokens with different numbers of loops cannot be committed together; give one number of "
                "loops for all"
            )
        return LoopCounts(self.total - 1, max(differentiated - 1, 0))

    def select_rows(self, rows: Tensor) -> LoopCounts:
        """Return the counts of the rows with these indices, (R,) int64."""
        return self._apply(lambda count: count[rows.cpu()])

    def cut(self, first: int, stop: int) -> LoopCounts:
        """Return the counts of the tokens from ``first`` up to ``stop``; counts per row stay the same."""
        return self._apply(lambda count: count[:, first:stop] if count.ndim == 2 else count)

    def check_shape(self, z: Tensor) -> None:
        """Check that the counts fit points ``z`` (B, …) or (B, L, …).

        Raises:
            ValueError: there is another number of rows or tokens.

        """
        for name in ("total", "differentiated"):
            count = getattr(self, name)
            if isinstance(count, Tensor) and (count.shape != z.shape[: count.ndim] or count.ndim == z.ndim):
                raise ValueError(
                    f"{name} of the loops has shape {tuple(count.shape)}, but the points have shape "
                    f"{tuple(z.shape)}; give one number per row (B,) or per token (B, L)"
                )

    def _apply(self, change: Callable[[Tensor], Tensor]) -> LoopCounts:
        total, chosen = (
            change(count) if isinstance(count, Tensor) else count
            for count in (self.total, self.differentiated)
        )
        assert total is not None
        return LoopCounts(total, chosen)


class Looped(NamedTuple):
    """The result of a number of loops."""

    z: Tensor
    """The last point of each element, (B, …)."""
    before: Tensor
    """The point of which ``z`` is the value, (B, …), for each element that took part in a loop."""
    trajectory: dict[int, Tensor]
    """The chosen iterates, by their number of loops; those that no element reached are left out."""
    trace: Tensor | None
    """The residuals of all loops, (loops, B) or (loops, B, L), NaN where an element took no part."""


def run_loops(
    f: Map,
    z0: Tensor,
    loops: LoopCounts,
    *,
    last: int | None = None,
    valid: Tensor | None = None,
    trajectory: Sequence[int] = (),
    agree: Agreement | None = None,
    report: Callable[..., Solution] | None = None,
) -> Looped:
    """Apply ``f`` as often as ``loops`` says: first without gradients, then the last loops with them.

    Each of the two parts runs to the maximum over the batch. An element that has taken the loops of a part is
    frozen until the part ends; the tokens of its row still read its value. The point is detached between the
    parts. Where gradients are disabled, so is the second part.

    A ``SteppingMap`` takes the differentiated loops but the last in one call of ``damped_steps``, where all
    elements take the same number and no iterate is collected.

    Args:
        f: the map.
        z0: the start, (B, …).
        loops: the numbers of loops.
        last: how many of them are differentiated (``LoopCounts.split``); None: all.
        valid: (B, L) bool, False at padding, which keeps its start.
        trajectory: numbers of loops t ≥ 1 whose points are collected, each with the gradient it has. An
            element that takes fewer loops has its last point there.
        agree: asked before each loop whether the part may end, where processes may have different numbers
            per row but must call ``f`` equally often; numbers for all rows must be equal on all processes.
        report: measures each loop for the trace, as ``Search.report`` does; None: no trace.

    Raises:
        ValueError: the loops have another number of rows or tokens than ``z0``; or the processes may have
            different numbers and do not communicate (``fixed_budget``).

    """
    loops.check_shape(z0)
    if agree is fixed_budget and any(isinstance(count, Tensor) for count in loops.split(last)):
        raise ValueError(
            "the numbers of loops are tensors, which may differ between processes, but with fixed_budget no "
            "process knows the numbers of the others; give one number for all rows, or let processes agree"
        )
    without, differentiated = (_merged(count, agree) for count in loops.split(last))
    path = _Path(f, z0, valid, set(trajectory), report)
    # Another process may have loops of the first part where this one has none.
    if _maximum(without) or (isinstance(without, Tensor) and agree is not None):
        with torch.no_grad():
            path.z = path.before = z0.detach()
            path.f = lambda z: f(z).detach()  # forward-mode differentiation ignores no_grad
            path.run(without, agree)
            path.f = f
        if isinstance(without, Tensor) and _minimum(without) == 0:
            # These elements begin with their differentiated loops.
            path.z = path.before = _where(without > 0, path.z, z0)
    stepping = isinstance(f, SteppingMap) and torch.is_grad_enabled()
    if stepping and isinstance(differentiated, int) and not trajectory and report is None:
        path.steps(differentiated)
    else:
        path.run(differentiated, agree)
    return Looped(path.z, path.before, path.iterates(), torch.stack(path.residuals) if report else None)


@dataclass
class _Path:
    """The points of one run."""

    f: Map
    z: Tensor
    valid: Tensor | None
    chosen: set[int]
    report: Callable[..., Solution] | None

    def __post_init__(self) -> None:
        self.before = self.z
        self.found: dict[int, Tensor] = {}
        self.residuals: list[Tensor] = []
        self.taken: Count = 0  # loops of each element so far

    def run(self, count: Count, agree: Agreement | None) -> None:
        """Take ``count`` more loops."""
        for active in _loops(count, agree):
            fz = self._kept(self.f(self.z))
            if self.report is not None:
                residual = self.report(self.z, fz, iterations=1).finest_residual
                if active is not None:
                    mask = active if active.ndim <= residual.ndim else active.any(1)
                    residual = _where(mask, residual, torch.full_like(residual, torch.nan))
                self.residuals.append(residual)
            if active is None:
                self.before, self.z = self.z, fz
                self.taken = self.taken + 1
            else:
                self.before, self.z = _where(active, self.z, self.before), _where(active, fz, self.z)
                self.taken = self.taken + active.long()
            self._collect(active)

    def steps(self, count: int) -> None:
        """Take ``count`` more loops, all but the last of them in one call of ``damped_steps``."""
        f, start = self.f, self.z
        assert isinstance(f, SteppingMap)
        if count == 0:
            return
        self.before = start if count == 1 else self._kept(f.damped_steps(start, count=count - 1, damping=1.0))
        self.z = self._kept(f(self.before))

    def _kept(self, z: Tensor) -> Tensor:
        return z if self.valid is None else _where(self.valid, z, self.z)

    def _collect(self, active: Tensor | None) -> None:
        """Store the chosen iterates that elements have just reached."""
        if isinstance(self.taken, int):
            if self.taken in self.chosen:
                self.found[self.taken] = self.z
            return
        for t in self.chosen:
            reached = self.taken == t if active is None else (self.taken == t) & active
            if bool(reached.any()):
                self.found[t] = _where(reached, self.z, self.found.get(t, self.z))

    def iterates(self) -> dict[int, Tensor]:
        """Return the chosen iterates, with the last point of elements that took fewer loops."""
        taken, found = self.taken, dict(sorted(self.found.items()))
        if isinstance(taken, int):
            return found
        return {t: _where(taken < t, self.z, value) for t, value in found.items()}


def _loops(count: Count, agree: Agreement | None) -> Iterator[Tensor | None]:
    """Yield the elements that take part in each loop, on the host; None: all."""
    if isinstance(count, int):
        for _ in range(count):
            yield None
        return
    least, most, done = _minimum(count), _maximum(count), 0
    while not (done >= most if agree is None else agree(done >= most)):
        yield None if done < least else count > done
        done += 1


def _where(mask: Tensor, z: Tensor, other: Tensor) -> Tensor:
    """Return ``z`` where the mask (B,) or (B, L) is True, and ``other`` elsewhere; both (B, …)."""
    mask = mask.view(*mask.shape, *[1] * (z.ndim - mask.ndim))
    return torch.where(mask.to(z.device, non_blocking=True), z, other)


def _on_host(name: str, count: Tensor) -> Tensor:
    """Return a tensor of counts on the host.

    Raises:
        ValueError: another type or shape.

    """
    if count.dtype != torch.int64 or count.ndim not in (1, 2) or not count.numel():
        raise ValueError(
            f"{name} is a tensor of shape {tuple(count.shape)} of {count.dtype}; give an int64 tensor, one "
            "number per row (B,) or per token (B, L)"
        )
    return count.detach().cpu()


def _merged(count: Count, agree: Agreement | None) -> Count:
    """Return one number for equal ones, unless other processes may have others."""
    return _minimum(count) if agree is None and _minimum(count) == _maximum(count) else count


def _at_most(count: Count, limit: int) -> Count:
    return count.clamp(max=limit) if isinstance(count, Tensor) else min(count, limit)


def _minimum(count: Count) -> int:
    return int(count.min()) if isinstance(count, Tensor) else count


def _maximum(count: Count) -> int:
    return int(count.max()) if isinstance(count, Tensor) else count
