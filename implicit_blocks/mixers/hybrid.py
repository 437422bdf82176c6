"""Hybrid layers: several mixers in parallel, such as attention and a state-space mixer.

X. Dong et al., "Hymba: A Hybrid-head Architecture for Small Language Models", 2024; J. Zuo et al.,
"Falcon-H1", 2025. In both, all mixers of a layer read the same normed tokens; here, as in Falcon-H1, their
outputs are added, without further norms or gains.

Shape legend: B batch, L tokens of the window, D model width, U injection width (the sum of the mixers'),
R slots in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks.interfaces import Mixer, SlotStates, State
from implicit_blocks.registry import build
from implicit_blocks.specs import HybridSpec
from implicit_blocks.windows import Window


class Hybrid(Mixer):
    """``Σ_i mixer_i(z, u_i)``: each mixer has its part of the injection and its own state.

    An optional capability (truncation, slots) requires that all mixers have it; the sum is causal if all
    mixers are.

    Args:
        spec: the specs of the mixers.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: HybridSpec, *, d_model: int) -> None:
        super().__init__()
        spec.check(d_model)
        self.mixers = nn.ModuleList(build(part, d_model=d_model) for part in spec.mixers)
        self.truncates = all(mixer.truncates for mixer in self._each())  # type: ignore[misc]  # known by instance
        self.causal = all(mixer.causal for mixer in self._each())
        self.needs_token_ids = any(mixer.needs_token_ids for mixer in self._each())

    def _each(self) -> list[Mixer]:
        return list(self.mixers)  # type: ignore[arg-type]  # all of them are Mixers

    def _parts_of(self, u_BLU: Tensor | None) -> Sequence[Tensor | None]:
        """Split the injection, (B, L, U) or a table (V, U), by the mixers' widths."""
        if u_BLU is None:
            return [None] * len(self.mixers)
        parts: tuple[Tensor, ...] = u_BLU.split([mixer.injection_width for mixer in self._each()], dim=-1)
        return parts

    @property
    def injection_width(self) -> int:
        """Sum of the mixers' widths."""
        return sum(mixer.injection_width for mixer in self._each())

    def initial_state(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> tuple[State, ...]:
        """Return every mixer's state."""
        return tuple(
            mixer.initial_state(batch_size, device=device, dtype=dtype, max_seq_len=max_seq_len)
            for mixer in self._each()
        )

    def select_rows(self, state: tuple[State, ...], rows: Tensor) -> tuple[State, ...]:
        """Return every mixer's state of these rows."""
        return tuple(mixer.select_rows(part, rows) for mixer, part in zip(self._each(), state, strict=True))

    def truncate(self, state: tuple[State, ...], length: int) -> tuple[State, ...]:
        """Return every mixer's state after the first ``length`` tokens."""
        return tuple(mixer.truncate(part, length) for mixer, part in zip(self._each(), state, strict=True))

    def slots(self, count: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int) -> HybridSlots:
        """Return every mixer's slots."""
        return HybridSlots(
            [
                mixer.slots(count, device=device, dtype=dtype, max_seq_len=max_seq_len)
                for mixer in self._each()
            ]
        )

    def supports_injection_table(self, window: Window) -> bool:
        """Whether all mixers support a table."""
        return all(mixer.supports_injection_table(window) for mixer in self._each())

    def prepare(self, window: Window) -> tuple[Any, ...]:
        """Return every mixer's data of the window."""
        return tuple(mixer.prepare(window) for mixer in self._each())

    def forward(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: tuple[State, ...], context: tuple[Any, ...]
    ) -> Tensor:
        """Return the sum of the mixers' outputs."""
        parts = zip(self._each(), self._parts_of(u_BLU), state, context, strict=True)
        return _sum([mixer(z_BLD, u, before, known) for mixer, u, before, known in parts])

    def advance(
        self, z_BLD: Tensor, u_BLU: Tensor | None, state: tuple[State, ...], context: tuple[Any, ...]
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return the sum of the mixers' outputs, and every mixer's state after the window."""
        parts = zip(self._each(), self._parts_of(u_BLU), state, context, strict=True)
        results = [mixer.advance(z_BLD, u, before, known) for mixer, u, before, known in parts]
        return _sum([out for out, _ in results]), tuple(after for _, after in results)

    def advance_prefix(
        self,
        z_BLD: Tensor,
        u_BLU: Tensor | None,
        state: tuple[State, ...],
        context: tuple[Any, ...],
        prefix: tuple[Any, ...],
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return the sum of the mixers' outputs, and every mixer's state after the first tokens."""
        parts = zip(self._each(), self._parts_of(u_BLU), state, context, prefix, strict=True)
        results = [mixer.advance_prefix(z_BLD, u, before, *known) for mixer, u, before, *known in parts]
        return _sum([out for out, _ in results]), tuple(after for _, after in results)

    def output_projections(self) -> Sequence[nn.Module]:
        """Return those of all mixers."""
        return [projection for mixer in self._each() for projection in mixer.output_projections()]


class HybridSlots(SlotStates):
    """The slots of parallel mixers: slot i is slot i of each mixer."""

    def __init__(self, parts: Sequence[SlotStates]) -> None:
        self.parts = parts

    @property
    def windows(self) -> bool:
        """Whether all mixers' slots serve windows."""
        return all(part.windows for part in self.parts)

    def prefill(self, slot: int) -> tuple[State, ...]:
        """Return every mixer's empty state."""
        return tuple(part.prefill(slot) for part in self.parts)

    def commit_rows(
        self, mixer: Mixer, slots: Sequence[int], slots_B: Tensor, state: tuple[State, ...]
    ) -> None:
        """Store each mixer's states in its own slots."""
        assert isinstance(mixer, Hybrid)
        for part, of_part, own in zip(self.parts, state, mixer._each(), strict=True):
            part.commit_rows(own, slots, slots_B, of_part)

    def gather(self, rows_R: Tensor | None, lengths_R: Tensor) -> tuple[State, ...]:
        """Return every mixer's states."""
        return tuple(part.gather(rows_R, lengths_R) for part in self.parts)

    def write(self, rows_R: Tensor | None, after: tuple[State, ...], committed_R: Tensor) -> None:
        """Commit to each mixer's slots."""
        for part, of_part in zip(self.parts, after, strict=True):
            part.write(rows_R, of_part, committed_R)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of each mixer's slots; raises ValueError if one of them does not support it."""
        for part in self.parts:
            part.set_dtype(dtype)


def _sum(outputs: Sequence[Tensor]) -> Tensor:
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total
