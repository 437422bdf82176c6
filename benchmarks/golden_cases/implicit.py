"""Cases of "Implicit Language Models are RNNs" (ICML 2025): Mamba2 and Llama, all layers iterated.

The published rules are: 12 undamped iterations, the iterate of each sequence with the lowest residual, then 4
phantom steps (``phantom12+4``); 4 unrolled steps, the first undamped (``unrolled4``); a search by windows of
one token (``sequential``); and a damped iteration of the whole sequence (``fixed_point``). The published loss
compares position i with label i + 1.

Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import implicit_blocks as ib
from golden_cases.case import Case
from implicit_blocks.hf.published import export_tensors, import_spec, import_tensors
from implicit_blocks.models.stack import BoundMap

RUNS: dict[str, dict[str, Any]] = {
    "phantom12+4": {},
    "unrolled4": {
        "solver": ib.PicardSpec(damping=0.8, undamped_first=True),
        "gradient": ib.UnrolledSpec(steps=4),
    },
}


def compute(case: Case) -> None:
    """Compute and compare all tensors."""
    with torch.no_grad():
        _map(case)
        _sequential(case)
    for run in RUNS:
        _training(case, run)


def _model(case: Case, **changes: Any) -> ib.ImplicitLM:
    model: ib.ImplicitLM = ib.build(import_spec(case.config).model_copy(update=changes))
    model.load_state_dict(import_tensors(case.weights))
    return model.eval()


def _map(case: Case) -> None:
    """Compare the embedding, the injection, two calls of the map, and its fixed point."""
    model, tokens = _model(case), case.tokens
    x = model.embedding(tokens)
    f, start = model.bind(x, model.initial_state(len(tokens)), weights=model.cache_weights())
    case.value("embedding", x)
    assert f.u_BLU is not None
    case.value("injection", f.u_BLU)
    f1 = f(start)
    case.value("f1", f1)
    case.value("f2", f(f1))
    _fixed_point(case, f, start)


def _fixed_point(case: Case, f: BoundMap, z: Tensor) -> None:
    """Compare the damped iteration ``z ← (f(z) + z) / 2`` of the whole batch, up to 400 calls.

    Where the published one did not converge, its end depends on rounding. Then the published point is
    measured instead: its residual in our map.
    """
    solved, residual = case.expected["fixed_point"], float(case.expected["fixed_point.residual"])
    calls, size = 0, torch.tensor(torch.inf)
    while calls < 400 and size >= 1e-7:
        fz = f(z)
        size = _residual(fz, z)
        z, calls = z + 0.5 * (fz - z), calls + 1
    if residual <= 1e-5:
        case.value("fixed_point", z)
        case.value("fixed_point.residual", size, bar=0.1, reason="a difference of nearly equal points")
    else:
        reason = f"not converged: residual {residual:.1e} as published, in our map at the published point"
        case.value("fixed_point", f(solved), bar=2 * residual, reason=reason)
        case.value("fixed_point.residual", _residual(f(solved), solved), bar=1.0, reason=reason)
    # llama_tiny: 187 calls published, 191 here with AVX-512 and 189 with AVX2
    reason = "1e-7 is less than float32's epsilon: rounding decides the last steps"
    case.value("fixed_point.iterations", torch.tensor(float(calls)), bar=0.05, reason=reason)


def _residual(fz: Tensor, z: Tensor) -> Tensor:
    """Return the published residual of the whole batch."""
    residual: Tensor = (fz - z).norm() / (1e-6 + z.norm())
    return residual


def _training(case: Case, run: str) -> None:
    """Compare a training step: logits, loss, residual and gradients."""
    model, labels = _model(case, **RUNS[run]).train(), case.labels
    shifted = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1)
    out = model(case.tokens, labels=shifted)
    assert out.loss is not None
    assert out.logits is not None
    case.value(f"{run}.logits", out.logits)
    case.value(f"{run}.loss", out.loss)
    assert out.solution is not None
    case.value(f"{run}.rel_diff", out.solution.residual.mean())
    out.loss.backward()
    ours = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    found = export_tensors(ours, model.spec)
    for match in case.names(re.escape(run) + r"[.]grad/(.+)"):
        case.value(match[0], found[match[1]])


def _sequential(case: Case) -> None:
    """Compare logits of a search token by token, by the published stopping rule."""
    for name, rows, tolerance in (
        ("sequential", slice(None), 1e-6),
        ("sequential_tol0.05_row0", slice(0, 1), 0.05),
    ):
        expected = case.expected[f"{name}.logits"]
        tokens = case.tokens[rows, : expected.shape[-2]]
        model = _model(case)
        rule = model.evaluation_solver = _PublishedRule(tolerance)
        case.value(f"{name}.logits", _logits(model(tokens, window_length=1)))
        mean = torch.tensor(sum(rule.steps) / len(rule.steps))
        case.value(f"{name}.mean_steps", mean, bar=0.01, reason="the last steps are within rounding")


def _logits(out: Any) -> Tensor:
    assert out.logits is not None
    logits: Tensor = out.logits
    return logits


class _PublishedRule(ib.Picard):
    """Damped steps until ``‖f(z) − z‖ / (‖z‖ + 1e-6)`` of the batch is low enough."""

    def __init__(self, tolerance: float) -> None:
        super().__init__(damping=0.8)
        self.tolerance, self.steps = tolerance, list[int]()

    def run(self, f: ib.Map, z: Tensor, search: ib.Search) -> ib.Solution:
        """Search for ``z = f(z)``, and count the steps."""
        taken = 0
        for _ in range(400):
            taken += 1
            fz = f(z)
            residual = _residual(fz, z)
            z = z + 0.8 * (fz - z)
            if residual < self.tolerance:
                break
        self.steps.append(taken)
        return search.report(z, fz, iterations=taken)
