"""Helpers that run a mixer on fixed inputs in float64, for its contracts and for plugins' tests.

Shape legend: B batch, L tokens, D model width, U injection width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks._utils.describe import described
from implicit_blocks.interfaces import Mixer, State
from implicit_blocks.models.stack import mixed_and_state
from implicit_blocks.registry import build
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require
from implicit_blocks.windows import SequenceState, Window

D_MODEL, BATCH, LENGTH = 16, 3, 9
TOLERANCE = 1e-9

CUTS = ([LENGTH], [1, LENGTH], [4, 5, LENGTH], list(range(1, LENGTH + 1)))
"""End positions of windows."""


def make(spec: MixerSpec, d_model: int) -> Mixer:
    """Build the mixer in float64 with perturbed parameters: initial values of 0 and 1 would hide errors."""
    torch.manual_seed(0)
    mixer = build(spec, d_model=d_model)
    require(isinstance(mixer, Mixer), mixer, "is a Mixer", "derive it from implicit_blocks.Mixer")
    mixer = mixer.double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer  # type: ignore[no-any-return]  # builders are untyped


def with_ids(mixer: Mixer, window: Window, z: Tensor) -> Window:
    """Return the window with token IDs, if the mixer needs them.

    The IDs, 0 to 3, are a function of the tokens ``z`` (B, L, D), so that rows, cuts and permutations of
    tokens have theirs. A table of the mixer must have at least 4 rows.
    """
    if not mixer.needs_token_ids:
        return window
    signs = (z.detach()[..., :2] > 0).long()
    return replace(window, ids_BL=signs[..., 0] + 2 * signs[..., 1])


def inputs(mixer: Mixer, d_model: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return z (B, L, D) and u (B, L, U)."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(BATCH, LENGTH, d_model, dtype=torch.float64, generator=generator)
    u = torch.randn(BATCH, LENGTH, mixer.injection_width, dtype=torch.float64, generator=generator)
    return z, u


def begin(
    mixer: Mixer,
    batch: int = BATCH,
    *,
    dtype: torch.dtype = torch.float64,
    max_seq_len: int | None = None,
    device: torch.device | None = None,
) -> SequenceState:
    """Return the state before the first token, on the CPU by default."""
    options = {} if max_seq_len is None else {"max_seq_len": max_seq_len}
    device = torch.device("cpu") if device is None else device
    state = mixer.initial_state(batch, device=device, dtype=dtype, **options)
    return SequenceState(batch, 0, torch.zeros(1, dtype=torch.int64, device=device), (state,))


def commit(
    mixer: Mixer,
    z: Tensor,
    u: Tensor | None,
    cuts: Sequence[int],
    *,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    start: SequenceState | None = None,
    tell_all: bool = True,
) -> tuple[Tensor, SequenceState]:
    """Mix windows that end at ``cuts``, committing each; return all outputs and the final state.

    Without ``tell_all``, windows without padding receive no mask, even if other windows have padding. A
    mixer that is not causal mixes all tokens as one window.
    """
    committed = begin(mixer, z.shape[0]) if start is None else start
    cuts = cuts if mixer.causal else cuts[-1:]
    outputs, first = [], 0
    for end in cuts:
        part = slice(first, end)
        of_window = None if valid is None else valid[:, part]
        if of_window is not None and not tell_all and bool(of_window.all()):
            of_window = None
        window = committed.window(
            end - first,
            valid_BL=of_window,
            documents_BL=None if documents is None else documents[:, part],
            dtype=z.dtype,
        )
        context = mixer.prepare(with_ids(mixer, window, z[:, part]))
        original = z[:, part].clone()
        advanced = mixer.advance(z[:, part], None if u is None else u[:, part], committed.layers[0], context)
        y, state = mixed_and_state(mixer, advanced)
        require_untouched(mixer, z[:, part], original)
        committed = committed.after(window, (state,))
        outputs.append(y)
        first = end
    return torch.cat(outputs, dim=1), committed


def require_untouched(mixer: Mixer, z: Tensor, before: Tensor) -> None:
    """Check that a mixer has not written to its input window."""
    require(
        torch.equal(z.nan_to_num(), before.nan_to_num()),  # values at padding are arbitrary
        mixer,
        "window untouched",
        "forward and advance must not write to z; the search continues from it",
    )


def run(
    mixer: Mixer,
    z: Tensor,
    u: Tensor | None,
    cuts: Sequence[int],
    *,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    start: SequenceState | None = None,
) -> tuple[Tensor, State]:
    """As ``commit``; return all outputs and the mixer's final state."""
    y, committed = commit(mixer, z, u, cuts, valid=valid, documents=documents, start=start)
    return y, committed.layers[0]


def forward(mixer: Mixer, z: Tensor, u: Tensor | None, *, valid: Tensor | None = None) -> Tensor:
    """Mix one window from the initial state, as an iteration does."""
    committed = begin(mixer, z.shape[0])
    window = committed.window(z.shape[1], valid_BL=valid, documents_BL=None, dtype=z.dtype)
    original = z.clone()
    y = mixer(z, u, committed.layers[0], mixer.prepare(with_ids(mixer, window, z)))
    require(
        isinstance(y, Tensor) and y.shape == z.shape,
        mixer,
        "mixes a window",
        f"forward returned {described(y)} for a window that is {described(z)}; return the mixed window "
        "alone, and its state from advance",
    )
    require_untouched(mixer, z, original)
    return y  # type: ignore[no-any-return]  # checked above


def state_error(actual: State, expected: State) -> float:
    """Return the largest relative error of a state's tensors; infinite if anything else differs."""
    pairs = (pytree.tree_leaves(actual), pytree.tree_leaves(expected))
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")

    def error(a: Any, b: Any) -> float:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return relative_error(a.double(), b.double())
        return 0.0 if type(a) is type(b) and a == b else float("inf")

    return max((error(a, b) for a, b in zip(*pairs, strict=True)), default=0.0)
