"""Cases of Attractor: a search by the published Anderson rule, and its two kinds of gradient.

The published search stops for the whole batch, and returns the value of its last call. It is run here by the
solver ``attractor_anderson``, which has that rule.

Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import implicit_blocks as ib
from golden_cases.case import Case, published_rotations, relative_residual
from golden_cases.looped import bound_map, logits_of, prelude_output
from implicit_blocks.hf.architectures.attractor import published_solver
from implicit_blocks.interfaces import GradientEstimator
from implicit_blocks.solvers.attractor_anderson import NonCausalSolverWarning

TIGHT = {
    torch.float32: {"tol": 1e-6, "max_iter": 400, "min_iter": 0, "backward_tol": 1e-7},
    torch.float64: {"tol": 1e-12, "max_iter": 400, "min_iter": 0, "backward_tol": 1e-12},
}
NAMES = {torch.float32: "f32", torch.float64: "f64"}


def compute(case: Case) -> None:
    """Compute and compare all tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonCausalSolverWarning)  # the published rule is asked for
        model = build(case)
        with torch.no_grad():
            case.value("prelude", prelude_output(model, case.tokens))
            _calls(case, build(case, solver="anderson"))
            _numbers_of_calls(case)
        _search(case, model, "")
        _tight(case)
        with published_rotations(then_norm=bool(case.published.get("qk_norm"))):
            _precise(case)


def build(case: Case, dtype: torch.dtype = torch.float32, **published: Any) -> ib.ImplicitLM:
    """Return a model that searches as published; ``published`` changes fields of the configuration."""
    fields = case.reading(**published).fields
    solver = published_solver(case.published | published)
    gradient, stopping = fields["gradient"], fields["stopping"]
    exact = gradient["kind"] == "implicit_function"
    if exact:
        gradient = gradient | {"solver": published_solver(case.published | published, backward=True)}
    model = case.model(
        dtype=dtype,
        published=published,
        solver=solver,
        gradient=gradient,
        at_evaluation={"solver": solver, "stopping": {**stopping, "scope": "sequence"}},
    )
    if exact:
        model.gradient = AtSolution(model.gradient)
    return model


class AtSolution(GradientEstimator):
    """Another estimator's gradient, with the value of the search itself.

    ``ImplicitFunction`` returns ``f(z)`` of the solution ``z``, the published code ``z``: at a loose
    tolerance the loss and its gradient differ by it.

    Args:
        estimator: the other estimator.

    """

    def __init__(self, estimator: GradientEstimator) -> None:
        self.estimator = estimator

    def __call__(self, f: Any, z0: Tensor, search: Any) -> ib.Solution:
        """Search, and return the solution with the other estimator's gradient."""
        found: list[ib.Solution] = []

        def recorded(f: Any, z0: Tensor) -> ib.Solution:
            found.append(search(f, z0))
            return found[-1]

        solution = self.estimator(f, z0, recorded)  # type: ignore[arg-type]  # it only calls the search
        gradient_alone = solution.z - solution.z.detach()
        return solution.with_value(found[0].z.detach() + gradient_alone)


def tight(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Return the published fields of the tight search with the exact gradient."""
    given = case.details.get("tight", {}).get(NAMES[dtype], {})
    return {
        **TIGHT[dtype],
        "backward_type": "picard",
        "backward_max_iter": 400,
        "backward_min_iter": 0,
        **given,
    }


def _calls(case: Case, model: ib.ImplicitLM) -> None:
    """Compare the points and values of the first calls of the map, and of plain iteration."""
    f, z = bound_map(model, case.tokens)
    solver, shape = model.evaluation_solver, z.shape
    x = z.flatten(1)
    state = solver.init(x)
    for k in range(1 + max((int(match[1]) for match in case.names(r"anderson/x(\d+)")), default=-1)):
        fx = f(x.view(shape)).flatten(1)
        case.value(f"anderson/x{k}", x)
        case.value(f"anderson/f{k}", fx)
        x, state = solver.update(x, fx, state, f)
    steps = max((int(match[1]) for match in case.names(r"state_loop(\d+)")), default=0)
    if "fpi/residual_history" in case.expected:
        steps = max(steps, len(case.expected["fpi/residual_history"]))
    if steps:
        out = model(case.tokens, loops=steps, trajectory=range(1, steps + 1))
        points = [z, *(out.trajectory[t].z_BLC for t in range(1, steps + 1))]
        for t in range(1, steps + 1):
            case.value(f"state_loop{t}", points[t])
        residuals = [relative_residual(fy, y) for y, fy in pairwise(points)]
        rows = (
            case.expected["fpi/residual_history"].shape[0] if "fpi/residual_history" in case.expected else 0
        )
        case.value("fpi/residual_history", lambda: torch.stack(residuals[:rows]))


def _numbers_of_calls(case: Case) -> None:
    """Compare searches that may take few calls only; the tolerance may end them earlier."""
    for match in case.names(r"logits_loops(\d+)"):
        model = build(case, max_iter=int(match[1]))
        out = evaluate(model, case)
        case.value(match[0], logits_of(out))
        assert out.solution is not None
        case.value(f"solver/iters_loops{match[1]}", out.solution.iterations[0])


def evaluate(model: ib.ImplicitLM, case: Case) -> ib.LMOutput:
    """Return the output at the value of the last call, with the residuals of all calls.

    Without gradients our models map the solution once more; the published ones do not, nor ours with them.
    """
    with torch.enable_grad():
        out: ib.LMOutput = model.eval()(case.tokens, trace=True)
    return out


DIFFERENCE = "a difference of nearly equal points"


def _search(case: Case, model: ib.ImplicitLM, prefix: str) -> None:
    """Compare the search at the configuration's own tolerance, the loss and the gradients."""
    out = evaluate(model, case)
    assert out.solution is not None
    found = out.solution
    case.value(f"{prefix}logits", logits_of(out))
    case.value(f"{prefix}state_final", found.z)
    case.value(f"{prefix}solver/iters", found.iterations[0])
    bar, reason = (None, "") if prefix else (1e-3, DIFFERENCE)
    case.value(f"{prefix}solver/rel_residual", found.residual.max(), bar=bar, reason=reason)
    if found.trace is not None:
        case.value(f"{prefix}solver/residual_history", found.trace)
    loss = _loss(case, model)
    case.value(f"{prefix}loss", loss)
    if not prefix:
        loss.backward()
        case.gradients("grad/", model)


def _loss(case: Case, model: ib.ImplicitLM) -> Tensor:
    out = model.train()(case.tokens, labels=case.labels)
    assert out.loss is not None
    loss: Tensor = out.loss
    return loss


def _tight(case: Case) -> None:
    """Compare the search to a tight tolerance, and the gradients of the exact adjoint."""
    if not any(name.startswith(("tight/", "grad_ift/")) for name in case.expected):
        return
    fields = tight(case, torch.float32)
    _at_tight_tolerance(case, build(case, **(fields | {"backward_type": "onestep"})), "tight/", 0.5)
    model = build(case, **fields)
    _loss(case, model).backward()
    case.gradients("grad_ift/", model)
    if "tight/fpi_state" in case.expected:
        plain = evaluate(build(case, **(fields | {"solver": "fpi", "backward_type": "onestep"})), case)
        assert plain.solution is not None
        case.value("tight/fpi_state", plain.solution.z)
        case.value("tight/fpi_iters", plain.solution.iterations[0])


def _at_tight_tolerance(case: Case, model: ib.ImplicitLM, prefix: str, residual_bar: float) -> None:
    out = evaluate(model, case)
    assert out.solution is not None
    found = out.solution
    case.value(f"{prefix}logits", logits_of(out))
    case.value(f"{prefix}state", found.z)
    case.value(f"{prefix}iters", found.iterations[0])
    case.value(f"{prefix}rel_residual", found.residual.max(), bar=residual_bar, reason=DIFFERENCE)
    case.value(f"{prefix}loss", _loss(case, model))


def _precise(case: Case) -> None:
    """Compare the same in float64."""
    if not any(name.startswith("f64/") for name in case.expected):
        return
    model = build(case, torch.float64)
    with torch.no_grad():
        case.value("f64/prelude", prelude_output(model, case.tokens))
    _search(case, model, "f64/")
    if any(name.startswith("f64/tight/") for name in case.expected):
        fields = tight(case, torch.float64) | {"backward_type": "onestep"}
        _at_tight_tolerance(case, build(case, torch.float64, **fields), "f64/tight/", 1e-2)
