"""Distance of the logits of the fast path and of the published rule to those of a tight-tolerance solve.

    python benchmarks/agreement.py [--models llama_130m_bounded …] [--golden DIR] [--compile] [--graphs]

Three computations of the logits of one model:

- *tight*: the fixed point in float64, by Picard (damping 0.5) to a tolerance of 1e-9;
- *published rule*: the published code's algorithm, reimplemented here in eager mode: in training, undamped
Picard
  until the largest residual of the batch is below the tolerance, the point with the lowest residual of each
  sequence, then the damped phantom steps; in evaluation, damped Picard until the residual of the whole batch
  is below the tolerance, then one plain call;
- *ours*: ``model(tokens)`` as the benchmarks time it, with kernels, and compiled and captured if requested.

The last two compute in bfloat16 (autocast) with the spec's tolerance and iterations. The program reports the
relative distances ``‖logits − tight‖ / ‖tight‖`` and the share of tokens with the same most likely successor;
*ours* passes if its distance exceeds that of the published rule by at most 2 % and rounding. Weights are
random, with gains for which the map contracts (``contract``): with those of a new model neither rule comes
close to a fixed point. ``--golden`` adds a folder of tensors of the published implementation, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from on_device import bfloat16, device, keep, model_of, parser
from report import machine, write
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.hf.published import import_spec, import_tensors

AS_FAR, ROUNDING = 1.02, 1e-6  # tolerance of the comparison: the order of summation changes rounding
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "reference"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="*", default=["llama_130m_bounded", "mamba2_130m_bounded"])
    options.add_argument(
        "--golden", type=Path, default=GOLDEN, help="folder of published tensors, used if it exists"
    )
    options.add_argument("--rows", type=int, default=2)
    options.add_argument("--length", type=int, default=2048)
    options.add_argument("--compile", action="store_true")
    options.add_argument("--graphs", action="store_true")
    arguments = options.parse_args()
    rows = []
    for name in arguments.models:
        sizes = {"tiny": arguments.tiny, "layers": arguments.layers}
        model = model_of(name, **sizes, compiled=arguments.compile, graphs=arguments.graphs)
        plain = model_of(name, **sizes)
        for checked in (model, plain):
            contract(checked)
        shape = (2, 32) if arguments.tiny else (arguments.rows, arguments.length)
        ids = torch.randint(model.spec.vocab_size, shape, device=device())
        with bfloat16():
            rows += compare(name, model, plain, ids)
        keep(rows, arguments)
        torch.compiler.reset()
    folders = sorted(arguments.golden.iterdir()) if arguments.golden.is_dir() else []
    for folder in folders:
        rows += compare(folder.name, *golden(folder))
    keep(rows, arguments)
    if arguments.json is None:
        settings = {"models": arguments.models, "golden": [folder.name for folder in folders]}
        write("agreement", {"machine": machine(), "arguments": settings, "rows": rows})


@torch.no_grad()
def contract(model: Any) -> None:
    """Scale the weights so that layers depend more on the injection than on ``z``, and the map contracts.

    Attention needs more for longer sequences; these factors suffice for 2048 tokens.
    """
    attention = model.spec.mixer.kind == "attention"
    inward, outward = (0.05, 100.0) if attention else (0.15, 10.0)
    for block in model.backbone.blocks():
        for projection, factor in ((block.mixer.in_proj, inward), (block.mixer.out_proj, outward)):
            projection.parametrizations.weight.original0.mul_(factor)


def golden(folder: Path) -> tuple[ib.ImplicitLM, ib.ImplicitLM, Tensor]:
    """Return two copies of a model with published weights, and its tokens."""
    from safetensors.torch import load_file

    spec = import_spec(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    weights = import_tensors(load_file(folder / "weights.safetensors"))
    models = []
    for _ in range(2):
        model = ib.build(spec)
        model.load_state_dict(weights)
        models.append(model.to(device()).train())
    ids = load_file(folder / "expected.safetensors")["input_ids"].to(device())
    return models[0], models[1], ids


def compare(name: str, model: ib.ImplicitLM, plain: ib.ImplicitLM, ids: Tensor) -> list[dict[str, Any]]:
    """Return a row for training and one for evaluation."""
    rows = []
    exact, solution = tight(plain, ids)
    for mode, rule in (("training", published_training), ("evaluation", published_evaluation)):
        ours, iterations = fast(model.train(mode == "training"), ids)
        theirs, published_iterations = rule(plain.train(mode == "training"), ids)
        row: dict[str, Any] = {
            "model": name,
            "mode": mode,
            "distance": distance(ours, exact),
            "published_distance": distance(theirs, exact),
            "same_token": share_of_same(ours, exact),
            "published_same_token": share_of_same(theirs, exact),
            "iterations": iterations,
            "published_iterations": published_iterations,
            "tight_residual": float(solution.residual.max()),
            "tight_converged": bool(solution.converged.all()),
        }
        row["holds"] = row["distance"] <= AS_FAR * row["published_distance"] + ROUNDING
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def tight(model: ib.ImplicitLM, ids: Tensor) -> tuple[Tensor, ib.Solution]:
    """Return the logits at the fixed point, in float64, and the solution."""
    with device():  # drawing weights on a CPU takes seconds
        wide = ib.build(model.spec).double()
    wide.load_state_dict(model.state_dict())
    with torch.autocast(device().type, enabled=False):
        out = wide.eval()(ids, tolerance=1e-9, max_iterations=600, damping=0.5)
    return out.logits, out.solution


def fast(model: ib.ImplicitLM, ids: Tensor) -> tuple[Tensor, float]:
    """Return the logits of the benchmarked path, and the iterations of the slowest row."""
    out = None
    for _ in range(3):  # graphs are captured at the second call
        if model.training:
            out = model(ids, labels=ids)
            out.loss.backward()
            model.zero_grad()
        else:
            with torch.no_grad():
                out = model(ids)
    assert out is not None
    return out.logits.detach(), float(out.solution.iterations.max())


def bound(model: ib.ImplicitLM, ids: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the map of the tokens and the start of its search."""
    return model.bind(model.embedding(ids), model.initial_state(len(ids)), weights=model.cache_weights())


@torch.no_grad()
def published_training(model: ib.ImplicitLM, ids: Tensor) -> tuple[Tensor, int]:
    """Run undamped Picard with joint stopping, then damped phantom steps from each sequence's best point."""
    f, z = bound(model, ids)
    stopping, phantom = model.spec.stopping, model.spec.gradient
    assert isinstance(phantom, ib.PhantomSpec)
    best, lowest = z, torch.full((len(ids),), torch.inf, device=z.device)
    for iteration in range(1, stopping.max_iterations + 1):  # noqa: B007  # used after the loop
        fz = f(z)
        residual = (fz - z).flatten(1).norm(dim=1) / (fz.flatten(1).norm(dim=1) + 1e-9)
        best = torch.where((residual < lowest)[:, None, None], fz, best)
        lowest = torch.minimum(residual, lowest)
        z = fz
        if residual.max() <= stopping.tolerance:
            break
    z = best
    for _ in range(phantom.steps):
        z = torch.lerp(z, f(z), phantom.damping)
    return model.predict(z), iteration


@torch.no_grad()
def published_evaluation(model: ib.ImplicitLM, ids: Tensor) -> tuple[Tensor, int]:
    """Run damped Picard until the residual of the batch is below the tolerance, then one plain call."""
    f, z = bound(model, ids)
    damping = getattr(model.spec.at_evaluation.solver, "damping", 1.0)
    stopping = model.spec.evaluation_stopping
    for iteration in range(1, stopping.max_iterations + 1):  # noqa: B007  # used after the loop
        fz = f(z)
        residual = (fz - z).norm() / (z.norm() + 1e-6)
        z = torch.lerp(z, fz, damping)
        if residual <= stopping.tolerance:
            break
    return model.predict(f(z)), iteration


def distance(logits: Tensor, exact: Tensor) -> float:
    """Return the relative distance of logits."""
    return float((logits.double() - exact).norm() / exact.norm())


def share_of_same(logits: Tensor, exact: Tensor) -> float:
    """Return the share of tokens with the same most likely successor."""
    return float((logits.argmax(-1) == exact.argmax(-1)).double().mean())


if __name__ == "__main__":
    main()
