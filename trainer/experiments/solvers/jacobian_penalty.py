"""Costs and benefits of a Jacobian penalty: a trained model is trained further with several weights.

Weight 0 trains the same number of steps without the penalty, to separate its effect from that of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from implicit_blocks.gradients.jacobian_penalty import jacobian_size
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.specs import ImplicitLMSpec, JacobianPenaltySpec, PicardSpec
from trainer.data.source import IGNORED, Batch
from trainer.experiments.common.runs import load_model, load_trained_model, train
from trainer.experiments.common.search import SearchConfig, accuracy, reference, search, spectrum
from trainer.specs.run import RunSpec

LEARNING_RATE_FACTOR = 0.1
"""Fraction of the peak learning rate: at the full rate with fresh moments, forty steps destroyed what S3 "
"had learned."""


def measure(
    folder: Path,
    spec: RunSpec,
    checkpoint: Path,
    *,
    penalty_weights: Sequence[float],
    steps: int,
    batch: Batch,
    tolerances: Sequence[float],
    max_iterations: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return a row for the original model and one per weight; runs are kept in ``folder``."""
    before, _ = load_trained_model(spec, checkpoint)
    rows = [_row(None, before.to(device), batch, tolerances, max_iterations, step_ms=None)]
    for weight in penalty_weights:
        finished = train(
            continued(spec, checkpoint, weight=weight, steps=steps),
            folder / f"weight_{weight:g}",
            name=f"penalty {weight:g}",
            device=str(device),
        )
        seconds = sorted(row["step_seconds"] for row in finished.metrics[1:] or finished.metrics)
        model = load_model(finished, device)
        assert isinstance(model, ImplicitLM)
        rows.append(
            _row(weight, model, batch, tolerances, max_iterations, step_ms=1000 * seconds[len(seconds) // 2])
        )
    return rows


def continued(spec: RunSpec, checkpoint: Path, *, weight: float, steps: int) -> RunSpec:
    """Return a run that continues the last phase from a checkpoint, with a penalty of this weight."""
    phase = spec.phase_specs()[-1]
    model, training = phase.model, phase.training
    assert isinstance(model, ImplicitLMSpec)
    if weight > 0:
        model = model.model_copy(
            update={"gradient": JacobianPenaltySpec(gradient=model.gradient, weight=weight)}
        )
    written = spec.model_dump(mode="json")
    # Minimal: this module does its own evaluation.
    brief = {"lengths": [], "length_multiples": [], "identity_probabilities": [], "sequences": 1}
    fields = training.model_dump(mode="json")
    fields |= {
        "max_steps": steps,
        "max_tokens": None,
        "init_from": {"path": str(checkpoint)},
        "optimizer": fields["optimizer"]
        | {"learning_rate": LEARNING_RATE_FACTOR * training.optimizer.learning_rate},
        "evaluate_every": None,
        "checkpoint_every": steps,
    }
    return RunSpec.model_validate(
        written
        | {
            "model": model.model_dump(mode="json"),
            "training": fields,
            "evaluation": written["evaluation"] | brief,
            "phases": [],
            "callbacks": [],
        }
    )


@torch.no_grad()
def _row(
    weight: float | None,
    model: ImplicitLM,
    batch: Batch,
    tolerances: Sequence[float],
    max_iterations: int,
    *,
    step_ms: float | None,
) -> dict[str, Any]:
    damped = SearchConfig("", PicardSpec(damping=0.8))
    iterations, converged = {}, {}
    for tolerance in sorted(tolerances, reverse=True):
        output, _ = search(model, batch, damped, "prefix", tolerance, max_iterations)
        iterations[f"{tolerance:g}"] = float(output.solution.iterations.double().mean())
        converged[f"{tolerance:g}"] = float(output.solution.converged.double().mean())
    # `output` is now the search at the tightest tolerance.
    loss = torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
    )
    f, _ = model.bind(
        model.embedding(batch.inputs),
        model.initial_state(len(batch)),
        weights=model.cache_weights(),
        documents_BL=batch.documents,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = jacobian_size(f, output.solution.z, probes=8)
    found = spectrum(model, batch, reference(model, batch, max_iterations))
    return {
        "weight": weight,
        "loss": float(loss),
        "accuracy": accuracy(output.logits, batch.labels),
        "iterations": iterations,
        "converged": converged,
        "jacobian_size": float(size.mean()),
        "radius_median": found["median"],
        "radius_largest": found["largest"],
        "step_ms": step_ms,
    }
