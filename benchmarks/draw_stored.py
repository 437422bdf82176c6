"""Draw pictures of the documentation from stored figures, where the runs themselves are not stored.

    python benchmarks/draw_stored.py [--output docs]

Panels whose figures are not in ``benchmarks/results`` are left out: the iterations at every position of
language models, and the spectral radius at every token.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.experiments.language.plot import draw as draw_language
from trainer.experiments.solvers import plot as solvers
from trainer.reporting.pictures import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    finish,
    new_figure,
    plain_logarithm,
    write_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLORS = {0.9: BLUE, 0.5: ORANGE, 0.0: GREEN}
MODES = {"simultaneous": "o-", "sequential": "x--"}


def stored(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------ word problems


def modes() -> Figure:
    """Draw iterations by position and by the number of hard tokens; the first model."""
    figure = new_figure(width=10, height=4.4, title="Trained on p = 0.9: iterations to convergence")
    position, hard = figure.subplots(1, 2)
    for row in stored("word_problem_modes")["models_of_word_problem_a5_256"]:
        if row["seed"] != 0:
            continue
        style = MODES[row["mode"]][1:]
        color, label = (
            COLORS[row["identity_probability"]],
            f"p = {row['identity_probability']:g}, {row['mode']}",
        )
        for axes, key in ((position, "iterations_by_position"), (hard, "iterations_by_hard_tokens")):
            points = sorted((int(x), y) for x, y in row[key].items())
            axes.plot(*zip(*points, strict=True), style, color=color, label=label)
    for axes, title, x in (
        (position, "Iterations by position", "position (tokens)"),
        (hard, "Iterations by number of hard tokens so far", "hard tokens"),
    ):
        axes.legend(frameon=False, fontsize=8)
        finish(axes, title=f"{title} (trained with 160)", x=x, y="iterations per token")
    return figure


def hard_tokens() -> Figure:
    """Draw accuracy and convergence against the maximum iterations in training; runs of 1200 steps."""
    rows = [row for row in stored("word_problem_hard_tokens")["tests"] if row["steps"] == 1200]
    ticks = sorted({row["training_iterations"] for row in rows})
    figure = new_figure(width=11.6, height=4.2, title="A5, trained on p = 0.9: accuracy at convergence")
    for axes, key, title, y in zip(
        figure.subplots(1, 2),
        ("accuracy_last", "converged"),
        ("Accuracy at length 64 (mean of the seeds)", "Converged sequences"),
        ("accuracy on the last tokens (%)", "sequences (%)"),
        strict=True,
    ):
        for p, color in COLORS.items():
            for mode, style in MODES.items():
                here = [row for row in rows if (row["identity_probability"], row["mode"]) == (p, mode)]
                points = [(row["training_iterations"], 100 * row[key]) for row in here]
                means = [_mean([value for at, value in points if at == tick]) for tick in ticks]
                axes.plot(ticks, means, style, color=color, label=f"p = {p:g}, {mode}")
                axes.plot(*zip(*points, strict=True), ".", color=color, markersize=4, alpha=0.6)
        plain_logarithm(axes, "x", at=ticks)
        axes.set_ylim(-3, 103)
        axes.legend(frameon=False, fontsize=8)
        finish(axes, title=title, x="maximum iterations in training", y=y)
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ------------------------------------------------------------------------------------ solvers


def solvers_of(run: str, title: str) -> Figure:
    """Draw iterations against tolerance and the time of every configuration, of one model."""
    (one,) = (each for each in stored("solvers")["models"] if each["run"] == run)
    rows = one["rows"]
    together = [row for row in rows if solvers._together(row["config"])]
    several = len({row["tolerance"] for row in rows}) > 1
    title = f"{title}: {one['sequences']} sequences of {one['length']} tokens, CPU"
    height = 0.21 * len({(row["config"], row["scope"]) for row in rows}) + 1.6
    figure = new_figure(width=12.6 if several else 10.0, height=height, title=title)
    layout: list[Any] = [["prefix", "cost"], ["sequence", "cost"]] if several else [["cost"]]
    panels = figure.subplot_mosaic(layout)
    styles = {
        name: (solvers._COLORS[index % 7], solvers._LINES[index // 7 % 3], solvers._MARKERS[index % 5])
        for index, name in enumerate(dict.fromkeys(row["config"] for row in together))
    }
    counts = [row["iterations_mean"] for row in together]
    for scope in ("prefix", "sequence") if several else ():
        here = [row for row in together if row["scope"] == scope]
        solvers._iterations(panels[scope], here, styles, scope)
        panels[scope].set_ylim(0.85 * min(counts), 1.18 * max(counts))
    if several:
        handles = panels["prefix"].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    solvers._cost(panels["cost"], rows)
    return figure


# ------------------------------------------------------------------------------------ language models


def language(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw all panels of the experiment but the iterations by position."""
    specs = list(dict.fromkeys(run["spec"] for run in runs))
    figure = draw_language({"runs": runs, "specs": specs})
    figure.axes[-1].remove()
    first = figure.axes[0]
    figure.legend(*first.get_legend_handles_labels(), loc=(0.74, 0.36), frameon=False)
    if (own := first.get_legend()) is not None:
        own.remove()
    return figure


def mamba2_runs() -> list[dict[str, Any]]:
    return [
        {
            **run,
            "spec": run["run"]
            .removesuffix(f"-{run['seed']}")
            .removesuffix("-explicit")
            .removesuffix("_explicit"),
            "kind": "explicit" if "explicit" in run["run"] else "implicit",
            "curve": run["curve"],
            "lengths": [
                {**length, "multiple": length["length"] // 512, "iterations_by_position": None}
                for length in run["lengths"]
            ],
        }
        for run in stored("books_own_rates")["twins"]
    ]


def llama_runs() -> list[dict[str, Any]]:
    found = stored("language")
    losses: dict[str, list[dict[str, float]]] = {row["run"]: [] for row in found["twins"]}
    for row in found["test_time_compute"]:
        losses[row["run"]].append({"self_iterations": row["self-iterations"], "loss": row["loss"]})
    return [
        {
            "spec": "books_5m",
            "seed": run["seed"],
            "kind": "explicit" if "explicit" in run["run"] else "implicit",
            "curve": [
                {
                    "tokens": row["tokens"],
                    "flops": 1e15 * row["PFLOP executed"],
                    "perplexity": row["perplexity of 64 sequences"],
                }
                for row in found["curves"]
                if row["run"] == run["run"]
            ],
            "lengths": [
                {
                    "multiple": multiple,
                    "perplexity": run[f"perplexity at {512 * multiple}"],
                    "loss": math.log(run["perplexity at 512"]),
                    "iterations_by_position": None,
                }
                for multiple in (1, 2, 4, 8)
            ],
            "test_time_compute": losses[run["run"]],
        }
        for run in found["twins"]
    ]


# ------------------------------------------------------------------------------------ duality


def duality() -> Figure:
    """Draw equal predictions and logit distance against the tolerance."""
    found = stored("duality")
    figure = new_figure(width=10.6, height=4.2, title="Sequential against simultaneous evaluation")
    agreement, distance = figure.subplots(1, 2)
    models = {
        "books_10m_mamba2": ("10 M", BLUE),
        "books_5m_mamba2": ("5 M", ORANGE),
        "books_10m_mamba2_penalty": ("10 M, penalty 0.5", GREEN),
        "books_5m_mamba2_penalty": ("5 M, penalty 0.5", DARK),
    }
    for name, (label, color) in models.items():
        rows = found[name]["tolerances"]
        tolerances = sorted({row["tolerance"] for row in rows})
        for axes, key, factor in ((agreement, "equal_tokens", 100), (distance, "logit_distance_mean", 1)):
            means = [_mean([factor * row[key] for row in rows if row["tolerance"] == t]) for t in tolerances]
            axes.plot(tolerances, means, "o-", color=color, label=label)
    ticks = (1e-5, 1e-3, 0.01, 0.05)
    distance.plot(ticks, ticks, "--", color=GREY, linewidth=1, label="tolerance")
    for axes in (agreement, distance):
        plain_logarithm(axes, "x", at=ticks)
        axes.legend(frameon=False, fontsize=8)
    distance.set_yscale("log")
    finish(agreement, title="Equal predictions (mean of the seeds)", x="tolerance", y="tokens (%)")
    finish(distance, title="Logit distance (mean)", x="tolerance", y="largest difference of a token's logits")
    return figure


PICTURES = {
    "images/duality.png": duality,
    "images/language.png": lambda: language(llama_runs()),
    "images/language_mamba2.png": lambda: language(mamba2_runs()),
    "pictures/solvers_a5.png": lambda: solvers_of(
        "word_problem_a5_256 (A5, trained at 256, p = 0.9)", "A5, trained at length 256"
    ),
    "pictures/solvers_books.png": lambda: solvers_of(
        "books, attention, width 128", "Attention of width 128 on books"
    ),
    "pictures/solvers_books_5m_mamba2.png": lambda: solvers_of(
        "books_5m_mamba2 after 12 M tokens", "books_5m_mamba2 after 12 M tokens"
    ),
    "pictures/word_problem_hard_tokens_gpu.png": hard_tokens,
    "pictures/word_problem_modes.png": modes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="directory (default: docs)")
    options = parser.parse_args()
    for name, draw in PICTURES.items():
        (options.output / name).parent.mkdir(parents=True, exist_ok=True)
        write_picture(draw(), options.output / name)


if __name__ == "__main__":
    main()
