"""Check that padding, documents and windows do not change a row: all combinations.

The contracts of ``check_mixer`` require padding on either side of a window's tokens of every mixer. This
check adds padding at any position, packed documents, any cut into windows, and every gradient; the library's
own mixers satisfy it.

Shape legend: B batch, L tokens, D model width, U injection width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require
from implicit_blocks.testing.mixer_runs import D_MODEL, commit, make

PADDINGS = ("none", "left", "right", "between", "holes")
"""Positions of padding in a row: none, before or after the tokens, between two texts, anywhere."""

CUTS = ("one window", "ragged windows", "tokens")
"""How a sequence is divided into windows."""

FURTHER = 3
ROWS = 4
TOLERANCE = 1e-10


def check_walk(
    spec: MixerSpec,
    *,
    padding: str = "none",
    cuts: str = "one window",
    documents: bool = False,
    d_model: int = D_MODEL,
    length: int = 20,
) -> None:
    """Check that rows with padding and documents, in windows, equal the same tokens alone.

    Compares outputs, the outputs of further tokens after the final state, and the gradients of both with
    respect to z, u and every parameter, in float64.

    Args:
        spec: a registered mixer spec that fits ``d_model``.
        padding: one of ``PADDINGS``.
        cuts: one of ``CUTS``.
        documents: whether several documents are packed into each row.
        d_model: width of the residual stream.
        length: tokens of a row, at least 9.

    Raises:
        ContractError: names the mixer, the row, and the error.
        ValueError: unknown padding or cuts.

    """
    mixer = make(spec, d_model)
    generator = torch.Generator().manual_seed(5)
    ends, valid = _ends(cuts, length), _valid(padding, length, generator)
    tokens = length + FURTHER
    z, u = (
        torch.randn(ROWS, tokens, width, dtype=torch.float64, generator=generator).requires_grad_()
        for width in (d_model, mixer.injection_width)
    )
    numbers = torch.rand(ROWS, tokens, generator=generator).lt(0.2).long().cumsum(1) if documents else None
    y, committed = commit(
        mixer,
        z[:, :length],
        u[:, :length],
        ends,
        valid=valid,
        documents=None if numbers is None else numbers[:, :length],
        tell_all=False,
    )
    more, _ = commit(
        mixer,
        z[:, length:],
        u[:, length:],
        [FURTHER],
        documents=None if numbers is None else numbers[:, length:],
        start=committed,
    )
    what = f"{padding} padding, {cuts}{', documents' if documents else ''}"
    everything = torch.cat((y, more), dim=1)
    require(
        bool(everything.isfinite().all()),
        mixer,
        "rows as if alone",
        f"({what}) an output is not finite, possibly at padding; the layers above would propagate it",
    )
    weights = torch.randn(everything.shape, dtype=torch.float64, generator=generator)
    loss = expected_loss = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        real = torch.ones(tokens, dtype=torch.bool)
        if valid is not None:
            real[:length] = valid[row]
        of = torch.zeros(tokens, dtype=torch.int64) if numbers is None else numbers[row]
        for document in of[real].unique().tolist():
            pick = (slice(row, row + 1), real & (of == document))
            alone, _ = commit(mixer, z[pick], u[pick], [int(pick[1].sum())])
            error = relative_error(everything[pick], alone)
            require(
                error < TOLERANCE,
                mixer,
                "rows as if alone",
                f"({what}) row {row} differs by {error:.1e} from its real tokens alone (by document); "
                "padding and other documents must have no effect",
            )
            loss = loss + (everything[pick] * weights[pick]).sum()
            expected_loss = expected_loss + (alone * weights[pick]).sum()
    leaves = {"z": z, "u": u, **dict(mixer.named_parameters())}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    expected = torch.autograd.grad(expected_loss, list(leaves.values()), allow_unused=True)
    for name, gradient, oracle in zip(leaves, found, expected, strict=True):
        if gradient is None and oracle is None:
            continue
        zeros = torch.zeros_like(leaves[name])
        error = relative_error(
            zeros if gradient is None else gradient, zeros if oracle is None else oracle, least=1e-3
        )
        require(
            error < 10 * TOLERANCE,
            mixer,
            "rows as if alone",
            f"({what}) the gradient of {name} differs by {error:.1e} from that of the rows alone",
        )


def _ends(cuts: str, length: int) -> list[int]:
    if cuts == "one window":
        return [length]
    if cuts == "tokens":
        return list(range(1, length + 1))
    if cuts == "ragged windows":
        return [1, length // 2 - 1, length // 2 + 2, length - 2, length]
    raise ValueError(f"unknown cuts {cuts!r}; choose one of {', '.join(map(repr, CUTS))}")


def _valid(padding: str, length: int, generator: torch.Generator) -> Tensor | None:
    """Return which tokens are real, (B, L) bool; the first row has no padding."""
    if padding == "none":
        return None
    valid = torch.ones(ROWS, length, dtype=torch.bool)
    middle = length // 2
    for row, count in enumerate((0, 2, length // 3, length - 1)):
        if padding == "left":
            valid[row, :count] = False
        elif padding == "right":
            valid[row, length - count :] = False
        elif padding == "between":  # a batch of prompts padded on the right is continued
            valid[row, middle - min(count, middle - 1) : middle] = False
        elif padding == "holes":
            share = (1.0, 0.8, 0.5, 0.1)[row]
            valid[row] = torch.rand(length, generator=generator) < share
        else:
            raise ValueError(f"unknown padding {padding!r}; choose one of {', '.join(map(repr, PADDINGS))}")
    return valid
