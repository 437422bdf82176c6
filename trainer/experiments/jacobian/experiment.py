"""Theorem 1 and Figure 7: the Jacobian between consecutive states of an explicit and an implicit model.

The paper's setting: one Mamba2 layer, d_model 64, expand 1, one head, d_state 1, float64, untrained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_blocks.analysis import StateJacobian, state_jacobian
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, Mamba2Spec
from trainer.reporting.pictures import new_figure, write_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCABULARY = 60


def run(
    folder: Path,
    *,
    seed: int = 0,
    tokens: int = 16,
    width: int = 64,
    dt: tuple[float, float] = (0.001, 0.1),
    tolerance: float = 1e-12,
    max_iterations: int = 512,
) -> str:
    """Compute both models' Jacobians, write ``jacobian.json`` and ``jacobian.png``, return a summary.

    Args:
        folder: output directory, created if missing.
        seed: seed of the weights and the tokens.
        tokens: length of the sequence, at least 2; the Jacobian is that of its last step.
        width: d_model, the number of entries of the state.
        dt: range of the initial step sizes of the scan.
        tolerance: tolerance of the fixed point.
        max_iterations: maximum iterations of its search.

    Raises:
        ValueError: a setting is invalid, or no fixed point is found.

    """
    found = measure(
        seed=seed, tokens=tokens, width=width, dt=dt, tolerance=tolerance, max_iterations=max_iterations
    )
    settings = {
        "seed": seed,
        "tokens": tokens,
        "d_model": width,
        "dt": list(dt),
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "dtype": "float64",
    }
    written = {"experiment": "jacobian", "settings": settings, "models": [numbers(one) for one in found]}
    message = write_results(folder, "jacobian", written, lambda _: draw(found))
    lines = ["model     formula-autograd  formula-differences  off-diagonal mass  rank  feedback's rank"]
    lines += [
        f"{one.kind:<8}  {one.formula_against_autograd:16.1e}  {one.formula_against_differences:19.1e}  "
        f"{one.off_diagonal_mass:17.1e}  {one.rank:4d}  {one.feedback_rank:15d}"
        for one in found
    ]
    return "\n".join([*lines, message])


def measure(
    *, seed: int, tokens: int, width: int, dt: tuple[float, float], tolerance: float, max_iterations: int
) -> list[StateJacobian]:
    """Return the Jacobians of the implicit model and of its explicit twin; arguments as for ``run``."""
    if tokens < 2 or width < 1:
        raise ValueError(f"tokens must be at least 2 and width at least 1, got {tokens} and {width}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "n_layers": 1,
        "mixer": Mamba2Spec(d_state=1, expand=1, head_dim=width, dt_min=dt[0], dt_max=dt[1]),
    }
    text = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    found = []
    with torch.random.fork_rng(devices=[]):
        for spec in (ImplicitLMSpec(**shape), ExplicitLMSpec(**shape)):
            torch.manual_seed(seed)
            model = build(spec).double().eval()
            found.append(state_jacobian(model, text, tolerance=tolerance, max_iterations=max_iterations))
    return found


def numbers(found: StateJacobian) -> dict[str, Any]:
    """Return the recorded quantities of a Jacobian."""
    return {
        "kind": found.kind,
        "formula_against_autograd": found.formula_against_autograd,
        "formula_against_differences": found.formula_against_differences,
        "largest_entry": float(found.autograd.abs().max()),
        "largest_off_diagonal_entry": float(off_diagonal(found.autograd).abs().max()),
        "off_diagonal_mass": found.off_diagonal_mass,
        "rank": found.rank,
        "feedback_rank": found.feedback_rank,
        "residual": found.residual,
        "iterations": found.iterations,
    }


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return a square matrix without its diagonal."""
    return matrix - torch.diag(matrix.diagonal())


def draw(found: list[StateJacobian]) -> Figure:
    """Draw three heat maps per model: formula, autograd, and their difference."""
    from matplotlib.colors import LogNorm, SymLogNorm

    figure = new_figure(
        width=12.4, height=4.1 * len(found), title="State-to-state Jacobian: Theorem 1, autograd, difference"
    )
    panels = figure.subplots(len(found), 3, squeeze=False)
    for row, one in zip(panels, found, strict=True):
        largest = float(one.autograd.abs().max())
        typical = float(off_diagonal(one.autograd).abs().median())
        small = 10.0 ** math.floor(math.log10(max(typical, 1e-6 * largest)))
        scale = SymLogNorm(linthresh=small, vmin=-largest, vmax=largest)
        ticks = [sign * size for sign in (-1, 1) for size in (0.1, 1e-2, 1e-3, 1e-4, small) if size >= small]
        for axes, matrix, name in ((row[0], one.formula, "formula"), (row[1], one.autograd, "autograd")):
            image = axes.imshow(matrix.numpy(), cmap="RdBu_r", norm=scale, interpolation="nearest")
            axes.set_title(f"{one.kind}: {name}", fontsize=11)
            figure.colorbar(image, ax=axes, shrink=0.85, ticks=sorted({0.0, *ticks}))
        difference = (one.formula - one.autograd).abs().clamp(min=1e-20)
        image = row[2].imshow(
            difference.numpy(), cmap="viridis", norm=LogNorm(1e-18, 1e-6), interpolation="nearest"
        )
        row[2].set_title(f"{one.kind}: |difference|, {_most(one.formula_against_autograd)}", fontsize=11)
        figure.colorbar(image, ax=row[2], shrink=0.85)
        off = f"{one.off_diagonal_mass:.0e}" if one.off_diagonal_mass > 0 else "0"
        row[0].set_ylabel(f"rank {one.rank}, off-diagonal mass {off}\n\nstate entry")
        for axes in row:
            axes.set_xlabel("previous state entry")
            axes.set_xticks([])
            axes.set_yticks([])
    return figure


def _most(largest: float) -> str:
    return f"at most {largest:.0e}" if largest > 0 else "zero"
