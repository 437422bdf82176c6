"""Draw the pictures of the pages: ``python docs/pictures/draw.py [--run DIR]``.

``--run`` is a run of the zoo's ``word_problem_s3``, for the picture of convergence. The pictures of
CatbAbI and of the word problems on a GPU are drawn from ``benchmarks/results``; the others need no input.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

import implicit_blocks as ib

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"
BLUE, ORANGE, GREY = "#3b6fb6", "#e08214", "#777777"
D_MODEL, TOKENS = 32, 6


def save(figure: plt.Figure, name: str) -> None:
    """Write one picture."""
    figure.savefig(FOLDER / f"{name}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    print(FOLDER / f"{name}.png")


# ------------------------------------------------------------------------------------ state Jacobian


def state_jacobian(kind: str) -> Tensor:
    """Return ``∂h_t / ∂h_{t−1}`` (D, D) of the first layer's state, one head with a state of width 1."""
    torch.manual_seed(1)
    mixer = ib.Mamba2Spec(d_state=1, expand=1, head_dim=D_MODEL)
    common = {"vocab_size": 16, "d_model": D_MODEL, "n_layers": 1, "mixer": mixer}
    if kind == "explicit":
        model = ib.build(ib.ExplicitLMSpec(**common))
    else:
        tight = ib.Stopping(tolerance=1e-11, max_iterations=2000)
        model = ib.build(
            ib.ImplicitLMSpec(
                **common,
                solver=ib.PicardSpec(damping=0.5),
                gradient=ib.ImplicitFunctionSpec(solver=ib.AndersonSpec(), stopping=tight),
                stopping=tight,
            )
        )
    model = model.double()
    tokens = torch.randint(16, (1, TOKENS))
    with torch.no_grad():
        before = model(tokens[:, :-1], return_state=True).state
    assert before is not None
    (layer,) = before.layers

    def after(h: Tensor) -> Tensor:
        given = replace(before, layers=(layer._replace(h_BHPN=h.view_as(layer.h_BHPN)),))
        out = model(tokens[:, -1:], state=given, return_state=True)
        if out.solution is not None:
            assert out.solution.converged.all(), out.solution.residual
        return out.state.layers[0].h_BHPN.flatten()

    h = layer.h_BHPN.flatten().detach().requires_grad_()
    value = after(h)
    rows = [torch.autograd.grad(v, h, retain_graph=True)[0] for v in value]
    jacobian = torch.stack(rows)
    step = torch.zeros_like(h)
    step[0] = 1e-6
    with torch.no_grad():
        difference = (after(h + step) - after(h - step)) / 2e-6
    print(f"{kind}: column 0 against a difference: {(jacobian[:, 0] - difference).abs().max():.1e}")
    return jacobian


def draw_state_jacobian() -> None:
    """Draw the absolute values of both Jacobians on a logarithmic scale."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.9), layout="constrained")
    for axis, kind in zip(axes, ("explicit", "implicit"), strict=True):
        size = state_jacobian(kind).abs()
        image = axis.imshow(size.clamp(min=1e-8), norm=mpl.colors.LogNorm(1e-5, 1), cmap="magma")
        off = size - torch.diag(size.diag())
        axis.set_title(f"{kind}: largest off-diagonal entry {off.max():.2g}", fontsize=10)
        axis.set_xlabel("entry of the previous state")
        axis.set_ylabel("entry of the new state")
    figure.colorbar(image, ax=axes, label="absolute value of the derivative")
    save(figure, "state_jacobian")


# ------------------------------------------------------------------------------------ phantom gradient


def draw_phantom() -> None:
    """Draw the error of phantom gradients against the steps, for maps with several rates of contraction."""
    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for radius, color in ((0.3, BLUE), (0.6, GREY), (0.9, ORANGE)):
        torch.manual_seed(0)
        weight = torch.randn(24, 24, dtype=torch.float64)
        weight = (weight / torch.linalg.matrix_norm(weight, 2) * radius).requires_grad_()
        x, direction = torch.randn(8, 24, dtype=torch.float64), torch.randn(8, 24, dtype=torch.float64)
        tight = ib.Stopping(tolerance=1e-12, max_iterations=2000)

        def gradient(
            estimator: ib.GradientEstimator,
            weight: Tensor = weight,
            x: Tensor = x,
            direction: Tensor = direction,
            tight: ib.Stopping = tight,
        ) -> Tensor:
            layer = ib.FixedPoint(
                lambda z, x: torch.tanh(z @ weight.mT + x), gradient=estimator, stopping=tight
            )
            (value,) = torch.autograd.grad((layer(x).z * direction).sum(), weight)
            return value

        exact = gradient(ib.ImplicitFunction(stopping=tight))
        steps = range(1, 17)
        errors = [
            float((gradient(ib.Phantom(steps=k, damping=0.8)) - exact).norm() / exact.norm()) for k in steps
        ]
        axis.semilogy(list(steps), errors, "o-", color=color, ms=3, label=f"‖W‖ = {radius}")
    axis.axvline(4, color="#cccccc", lw=1, zorder=0)
    axis.set_xlabel("differentiated steps k (damping 0.8)")
    axis.set_ylabel("relative error of the gradient")
    axis.legend(frameon=False)
    save(figure, "phantom")


# ------------------------------------------------------------------------------------ curriculum


def draw_curriculum() -> None:
    """Draw the limits and the cost of the phases of the zoo's llama_1.3b."""
    spec = ib.load_spec("llama_1.3b")
    figure, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    total = spec.total_steps
    for phase in spec.phase_specs():
        first, last = 100 * phase.first_step / total, 100 * phase.last_step / total
        most, steps = phase.model.stopping.max_iterations, phase.model.gradient.steps
        axis.fill_between([first, last], 0, most, color=BLUE, alpha=0.75, lw=0)
        axis.fill_between([first, last], most, most + steps, color=ORANGE, lw=0)
        cost = phase.model.gradient.forward_equivalents(most)
        axis.text(
            (first + last) / 2,
            most + steps + 1,
            f"{phase.name} ({most} + {steps})\nat most {cost:.0f} passes",
            ha="center",
            fontsize=9,
        )
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 48)
    axis.set_xlabel("share of the run (%)")
    axis.set_ylabel("calls of the map")
    handles = [mpl.patches.Patch(color=BLUE), mpl.patches.Patch(color=ORANGE)]
    axis.legend(
        handles,
        ["search without gradients (maximum)", "differentiated steps"],
        frameon=False,
        loc="upper left",
    )
    save(figure, "curriculum")


# ------------------------------------------------------------------------------------ modes


def draw_modes(run: Path) -> None:
    """Draw the residuals of a trained model's tokens, and the difference between its two modes."""
    from trainer.checkpoint.load import read_model_tensors

    spec = ib.load_spec("word_problem_s3")
    model = ib.build(spec.model)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    model.load_state_dict(read_model_tensors(newest))
    model = model.double().eval()
    torch.manual_seed(0)
    tokens = torch.randint(6, (1, 64))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    with torch.no_grad():
        out = model(tokens, tolerance=1e-6, max_iterations=800, trace=True)
        _draw_trace(left, out.solution.trace[:, 0], figure)
        tolerances = [10.0**-k for k in range(1, 8)]
        for window, color in ((1, ORANGE), (8, BLUE)):
            apart = []
            for tolerance in tolerances:
                knobs = {"tolerance": tolerance, "max_iterations": 800}
                whole, cut = model(tokens, **knobs), model(tokens, window_length=window, **knobs)
                apart.append(float((whole.logits - cut.logits).abs().max()))
            label = f"windows of {window}" + (" (sequential)" if window == 1 else "")
            right.loglog(tolerances, apart, "o-", ms=3, color=color, label=label)
    right.set_xlabel("tolerance")
    right.set_ylabel("largest difference in logits\nfrom one window of 64")
    right.legend(frameon=False)
    save(figure, "modes")


def _draw_trace(axis: Axes, trace: Tensor, figure: plt.Figure) -> None:
    filled = trace.T.clone()
    filled[filled.isnan()] = math.nan
    image = axis.imshow(
        filled,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        norm=mpl.colors.LogNorm(1e-6, 1),
        interpolation="nearest",
    )
    axis.set_xlabel("iteration")
    axis.set_ylabel("token")
    axis.set_title("residual (white: the token has stopped)", fontsize=10)
    figure.colorbar(image, ax=axis)


# ------------------------------------------------------------------------------------ stored results


def read_results(name: str) -> dict[str, Any]:
    """Return a file of ``benchmarks/results``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def draw_word_problem_layers() -> None:
    """Draw the number of layers that a length needs, and the accuracies, of word problems on a GPU."""
    from trainer.experiments.word_problem.layers import draw
    from trainer.reporting.pictures import write_picture

    found = read_results("word_problem_layers")
    runs = []
    for row in found["runs"]:
        keys = [key.removeprefix("p ").split(", length ") for key in row if key.startswith("p ")]
        tests = [
            {
                "identity_probability": float(p),
                "length": int(length),
                "accuracy_last": row[f"p {p}, length {length}"],
            }
            for p, length in keys
        ]
        last = row[f"p 0, length {row['length']}"]
        runs.append({**row, "group": "A5", "tests": tests, "accuracy_last": last})
    settings = {
        "groups": ["A5"],
        "models": ["implicit-mamba2", "mamba2"],
        "layers": sorted({row["layers"] for row in runs}),
        "lengths": sorted({row["length"] for row in runs}),
        "threshold": 0.9,
        "test_p": [0.0, 0.5],
        "test_lengths": [1, 4],
    }
    written = {
        "settings": settings,
        "runs": runs,
        "least_layers": found["least_layers"],
        "chance": {"A5": 1 / 60},
    }
    write_picture(draw(written), FOLDER / "word_problem_layers_gpu.png")


def draw_catbabi() -> None:
    """Draw the accuracies on the test split of CatbAbI; LM mode in rows of 200 tokens only."""
    from trainer.experiments.catbabi.experiment import PUBLISHED
    from trainer.experiments.catbabi.plot import draw
    from trainer.reporting.pictures import write_picture

    results = read_results("catbabi")
    longer_rows = [row for row in results["longer_rows"]["test"] if "spec" in row]
    rows = [
        {**row, "model": f"{row['model']}, {row['spec'].removeprefix('catbabi_').replace('_', ' ')}"}
        for row in [*longer_rows, *results["test"]]
        if (row["scoring"], row["length"]) != ("all", 1600)
    ]
    written = {"split": "test", "published": PUBLISHED, "models": rows}
    write_picture(draw(written), FOLDER.parent / "images" / "catbabi.png")


def draw_test_time_compute() -> None:
    """Draw the solved share of Sudokus and mazes against iterations, a line per number of starts."""
    from trainer.reporting.pictures import finish, lengths_axis

    maze = read_results("maze_30x30")["runs"][0]["rows"]
    wanted = {"side": 30, "shortest": 60, "precision": "float32", "damping": 1}
    of_maze: dict[int, dict[str, float]] = {}
    for row in maze:
        if wanted.items() <= row.items():
            shares = {**row["solved"], **({"any": row["any"]} if "8" in row["solved"] else {})}
            of_maze.setdefault(row["max_iterations"], {}).update(shares)
    of_sudoku = {
        row["max_iterations"]: {**row["solved"], "any": row["solved_by_any"]}
        for row in read_results("sudoku_9x9")["restarts"]["rows"]
    }
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True)
    labels = {"1": "one start", "2": "surest of 2", "4": "surest of 4", "8": "surest of 8", "any": "any of 8"}
    titles = ("Sudoku of order 9, noisy starts", "mazes of 30 by 30, symmetric variants")
    for axes, title, found in zip(panels, titles, (of_sudoku, of_maze), strict=True):
        for shade, (name, label) in zip((1.0, 0.4, 0.6, 1.0, 1.0), labels.items(), strict=True):
            points = [(most, 100 * found[most][name]) for most in sorted(found) if name in found[most]]
            color = BLUE if name == "1" else GREY if name == "any" else ORANGE
            style = "--" if name == "any" else "o-"
            axes.plot(*zip(*points, strict=True), style, color=color, alpha=shade, label=label, ms=4)
        lengths_axis(axes, sorted(found))
        finish(axes, title=title, x="maximum number of iterations", y="solved boards (%)")
    panels[0].legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, "test_time_compute")


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run of word_problem_s3")
    options = parser.parse_args()
    draw_state_jacobian()
    draw_phantom()
    draw_curriculum()
    draw_word_problem_layers()
    draw_catbabi()
    draw_test_time_compute()
    if options.run is not None:
        draw_modes(options.run)


if __name__ == "__main__":
    main()
