"""Depths: the number of loops of the core in a step of training.

Random depths: J. Geiping et al., "Scaling up test-time compute with latent reasoning", 2025 (Huginn:
log-normal Poisson, one number per batch); Parcae, 2026 (Poisson, one number per sequence).

Shape legend: B batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn

from implicit_blocks.depths import FixedDepthSpec, RandomDepthSpec
from implicit_blocks.ops.noise import uniform_at
from implicit_blocks.registry import build
from implicit_blocks.specs import DepthSpec

__all__ = ["Depth", "FixedDepth", "RandomDepth", "UntilConverged", "following_depth"]


class Depth(nn.Module, ABC):
    """Base of the depths; a module, so that a checkpoint contains the state of its numbers.

    The state is the buffer ``draws``, which only random depths need. A depth that follows a random one in a
    later phase of a run keeps it (``continue_from``).

    Args:
        spec: the kind's spec.

    """

    def __init__(self, spec: DepthSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("draws", None)

    def continue_from(self, previous: Depth) -> None:
        """Copy the counter of the depth that this one replaces."""
        draws = previous._buffers["draws"]
        if draws is not None:
            self.register_buffer("draws", draws)

    def count_draws(self) -> None:
        """Add the buffer ``draws``, which random depths count in, if there is none."""
        if self._buffers["draws"] is None:
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def sample(self, batch_size: int, device: torch.device | str) -> int | Tensor | None:
        """Return the number of loops of this step: of all sequences, or of each, (B,) int64 on the device.

        None: the stopping rule ends the loop, as always in evaluation.
        """

    def extra_repr(self) -> str:
        """Return the spec's fields."""
        return repr(self.spec)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        # Weights may come from a model with another depth: the counter is neither required nor refused.
        name, own = prefix + "draws", self._buffers["draws"]
        if own is None:
            state_dict.pop(name, None)
        elif name not in state_dict:
            state_dict[name] = torch.zeros((), dtype=torch.int64) if own.is_meta else own
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


class UntilConverged(Depth):
    """The stopping rule ends the loop."""

    def sample(self, batch_size: int, device: torch.device | str) -> None:
        """Return None."""
        return None


class FixedDepth(Depth):
    """The same number of loops in every step of training."""

    spec: FixedDepthSpec

    def sample(self, batch_size: int, device: torch.device | str) -> int | None:
        """Return the spec's number; None in evaluation."""
        return self.spec.loops if self.training else None


class RandomDepth(Depth):
    """Random numbers of loops, a function of the spec's seed, the step and the row of the batch.

    The step is the buffer ``draws``, which every sample in training increases by 1. Checkpoints contain it,
    so that a resumed run continues with the numbers of an uninterrupted one. All ranks have the same numbers
    without communication, as long as they sample equally often: row ``i`` has the same number on each rank.

    A copy of ``draws`` on the host avoids waiting for the device in every step. The buffer is read again
    after loading a state dict, after a change of device, and after writes in place, which torch counts in the
    tensor's version.
    """

    spec: RandomDepthSpec
    draws: Tensor

    def __init__(self, spec: RandomDepthSpec) -> None:
        super().__init__(spec)
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self._draws: int | None = None
        self._version = 0

    def sample(self, batch_size: int, device: torch.device | str) -> int | Tensor | None:
        """Return the next number, or one for each sequence, (B,) int64; None in evaluation."""
        if not self.training:
            return None
        draw = self._next_draw()
        if self.spec.per == "batch":
            return self._loops(draw, 0)
        loops = torch.tensor([self._loops(draw, row) for row in range(batch_size)], dtype=torch.int64)
        if torch.device(device).type != "cuda":
            return loops.to(device)
        return loops.pin_memory().to(device, non_blocking=True)

    def reset_parameters(self) -> None:
        """Set ``draws`` to 0."""
        self.draws.zero_()
        self._draws = None

    def _next_draw(self) -> int:
        if self.draws.is_meta:  # shapes are traced; nothing is counted
            return 0
        known = self._draws if self.draws._version == self._version else None
        draw = int(self.draws) if known is None else known
        self.draws.fill_(draw + 1)
        self._draws, self._version = draw + 1, self.draws._version
        return draw

    def _loops(self, draw: int, row: int) -> int:
        numbers = count()
        return self.spec.draw(lambda: uniform_at(self.spec.seed, draw, row, next(numbers)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._draws = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        self._draws = None
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


def following_depth(
    previous: Depth | None, spec: DepthSpec, *, device: torch.device, training: bool
) -> Depth:
    """Return the depth of a spec, which takes over the count of random depths from the one before.

    Args:
        previous: the depth before, which is kept if it has the same spec; None: none.
        spec: of the depth.
        device: of the count.
        training: the mode, as of ``nn.Module.train``.

    """
    if previous is not None and previous.spec == spec:
        return previous
    depth: Depth = build(spec)
    depth = depth.to(device).train(training)
    if previous is not None:
        depth.continue_from(previous)
    return depth
