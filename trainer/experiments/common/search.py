"""Search configurations for a trained model, and measurements of the searches.

Shape legend: B sequences, L tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.analysis import spectral_radius
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.solution import Solution
from implicit_blocks.specs import AtEvaluation, BroydenSpec, PicardSpec, SolverSpec, StoppingOverrides
from implicit_blocks.specs.families import Scope
from trainer.data.source import IGNORED, Batch

SCOPES: tuple[Scope, ...] = ("prefix", "sequence")
REFERENCE = 1e-5
"""Tolerance of the reference solutions, for errors and spectra."""


@dataclass(frozen=True)
class SearchConfig:
    """A search configuration: the solver, the window of the search, and arguments of the forward call."""

    name: str
    solver: SolverSpec
    window_length: int | None = None
    commit_prefix: int | None = None
    call: dict[str, Any] = field(default_factory=dict)
    scopes: tuple[Scope, ...] = SCOPES


def search(
    model: ImplicitLM, batch: Batch, config: SearchConfig, scope: Scope, tolerance: float, max_iterations: int
) -> tuple[Any, float]:
    """Evaluate the batch with a configuration; return the output and the time in seconds."""
    stopping = StoppingOverrides(
        tolerance=tolerance, max_iterations=max_iterations, norm="relative", scope=scope
    )
    at_evaluation = AtEvaluation(
        solver=config.solver,
        stopping=stopping,
        window_length=config.window_length,
        commit_prefix=config.commit_prefix,
    )
    model.reconfigure(model.spec.model_copy(update={"at_evaluation": at_evaluation}))
    began = _now(batch.inputs.device)
    output = model(batch.inputs, **config.call, **batch.context())
    return output, _now(batch.inputs.device) - began


class Reference(NamedTuple):
    """A solution at a tight tolerance: logits (B, L, V), points (B, L, D), and convergence, (B,)."""

    logits: Tensor
    z: Tensor
    converged: Tensor


@torch.no_grad()
def reference(model: ImplicitLM, batch: Batch, max_iterations: int) -> Reference:
    """Solve to :data:`REFERENCE` by damped Picard, then by Broyden; keep the better solution per row."""

    def solved(solver: SolverSpec) -> Any:
        return search(model, batch, SearchConfig("", solver), "prefix", REFERENCE, max_iterations)[0]

    first = solved(PicardSpec(damping=0.8))
    if bool(first.solution.converged.all()):
        return Reference(first.logits, first.solution.z, first.solution.converged)
    second = solved(BroydenSpec(memory=20))
    # A NaN residual ranks last, and a converged solution ranks before any other.
    residuals = [found.solution.residual.nan_to_num(nan=math.inf) for found in (first, second)]
    better = second.solution.converged & ~first.solution.converged
    better |= (second.solution.converged == first.solution.converged) & (residuals[1] < residuals[0])
    better = better.view(-1, 1, 1)
    return Reference(
        torch.where(better, second.logits, first.logits),
        torch.where(better, second.solution.z, first.solution.z),
        first.solution.converged | second.solution.converged,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()  # excludes other programs on the same processor


def disable_windows(model: ImplicitLM) -> None:
    """Remove the windows of a model's own evaluation, for simultaneous mode."""
    own = model.spec.at_evaluation.model_copy(update={"window_length": None, "commit_prefix": None})
    model.reconfigure(model.spec.model_copy(update={"at_evaluation": own}))


def by_token(solution: Solution, length: int) -> tuple[Tensor, Tensor]:
    """Return iterations and convergence per token, (B, L) on the CPU, or per row if rows stop together."""
    iterations, converged = solution.token_iterations, solution.token_converged
    if iterations is None or converged is None:
        iterations, converged = (
            of_row[:, None].expand(-1, length) for of_row in (solution.iterations, solution.converged)
        )
    return iterations.cpu(), converged.cpu()


@contextmanager
def record_calls(model: ImplicitLM, calls: list[tuple[int, int]]) -> Iterator[None]:
    """Record the rows and tokens of each call of the map, which applies its last norm once."""
    counted = model.backbone.norm or model.backbone.blocks()[-1].mixer_norm
    assert counted is not None
    handle = counted.register_forward_hook(
        lambda module, inputs, out: calls.append((out.shape[0], out.shape[1]))
    )
    try:
        yield
    finally:
        handle.remove()


def accuracy(logits: Tensor, labels_BL: Tensor) -> float:
    """Return the fraction of scored tokens whose label has the highest logit."""
    scored_BL = labels_BL != IGNORED
    return float(((logits.argmax(2) == labels_BL) & scored_BL).sum() / scored_BL.sum().clamp(min=1))


@torch.no_grad()
def spectrum(model: ImplicitLM, batch: Batch, found: Reference, *, positions: int = 8) -> dict[str, Any]:
    """Return spectral radii of the map at the fixed point, per token, at some positions.

    The Jacobian of a causal map over a sequence is block triangular: its eigenvalues are those of the maps of
        single
    tokens, each given the states left by the tokens before it.
    """
    z = found.z
    f, _ = model.bind(
        model.embedding(batch.inputs),
        model.initial_state(len(batch)),
        weights=model.cache_weights(),
        documents_BL=batch.documents,
    )
    length = batch.inputs.shape[1]
    places = sorted(
        {round(place) for place in torch.linspace(0, length - 1, min(positions, length)).tolist()}
    )
    radii, residuals = [], []
    generator = torch.Generator(z.device).manual_seed(0)
    for place in places:
        rest = f if place == 0 else f.after(z[:, :place])
        one = rest if place == length - 1 else rest.first(1)
        local = spectral_radius(one, z[:, place : place + 1], generator=generator)
        radii += local.radius.tolist()
        residuals += local.residual.tolist()
    ordered = torch.tensor(radii)
    return {
        "positions": places,
        "radii": radii,
        "median": float(ordered.median()),
        "largest": float(ordered.max()),
        "above_one": float((ordered > 1).double().mean()),
        "residual_largest": max(residuals),
        "converged": float(found.converged.double().mean()),
    }
