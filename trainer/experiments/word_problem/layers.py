"""Figure 1: the smallest number of layers that solves the word problem of each length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.experiments.common.runs import Finished, train
from trainer.experiments.word_problem.settings import Settings
from trainer.experiments.word_problem.specs import IMPLICIT, vary_spec
from trainer.reporting.pictures import BLUE, DARK, GREEN, GREY, ORANGE, finish, new_figure, write_results
from trainer.specs.run import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"implicit-mamba2": BLUE, "mamba2": ORANGE, "implicit-llama": GREEN, "llama": GREY}
OTHERS = (DARK, "#63b3ed", "#d68fb8", "#ecc94b")
"""Colors of baselines, in order."""
STYLES = (("o-", "full"), ("s--", "none"), ("^:", "none"), ("D-.", "none"))
"""Line, marker and fill style per multiple of the training length."""


def run(folder: Path, settings: Settings, *, device: str) -> str:
    """Find the smallest number of layers for each model and length; write the results and the plot.

    Layers are tried in increasing order, starting with the number that the previous length needed; a length
    that no number solves ends the search of that model, and longer ones are skipped. With several seeds, a
    number of layers solves a length if any seed does, because the paper asks what can be learned.

    Raises:
        ValueError: an override does not fit a model; raised before any training.

    """
    for group, model, length in product(settings.groups, settings.models, settings.lengths):
        _spec(settings, group, model, settings.layers[0], length)
    rows: list[dict[str, Any]] = []
    trained: list[dict[str, Any]] = []
    for group in settings.groups:
        for model in settings.models:
            candidates = (1,) if model in IMPLICIT else tuple(sorted(settings.layers))
            for length in sorted(settings.lengths):
                least = None
                for layers in candidates:
                    found = _solve(folder, settings, group, model, layers, length, device=device)
                    trained += found
                    if max(row["accuracy_last"] for row in found) >= settings.threshold:
                        least = layers
                        break
                rows.append({"group": group, "model": model, "length": length, "least_layers": least})
                if least is None:
                    break
                candidates = tuple(n for n in candidates if n >= least)
    chance = {row["group"]: row.pop("chance") for row in trained}
    written = {
        "experiment": "word-problem",
        "study": "layers",
        "settings": asdict(settings),
        "chance": chance,
        "least_layers": rows,
        "runs": trained,
    }
    message = write_results(folder, "word_problem", written, draw)
    return f"{table(written)}\n{message}"


def _solve(
    folder: Path, settings: Settings, group: str, model: str, layers: int, length: int, *, device: str
) -> list[dict[str, Any]]:
    """Train one number of layers at one length, with seeds until one solves it."""
    found: list[dict[str, Any]] = []
    for seed in settings.seeds:
        spec = _spec(settings, group, model, layers, length, seed=seed)
        name = f"{group}-{model.replace(':', '-')}-{layers}-L{length}-seed{seed}"
        finished = train(spec, folder / "runs" / name, name=name, device=device)
        found.append(summarize_run(finished, group=group, model=model, layers=layers, length=length))
        if found[-1]["accuracy_last"] >= settings.threshold:
            break
    return found


def _spec(settings: Settings, group: str, model: str, layers: int, length: int, *, seed: int = 0) -> RunSpec:
    return vary_spec(
        settings.spec,
        model=model,
        layers=layers,
        group=group,
        length=length,
        identity_probability=settings.train_p,
        seed=seed,
        evaluation=settings.tests(length),
        overrides=settings.overrides,
    )


def summarize_run(finished: Finished, *, group: str, model: str, layers: int, length: int) -> dict[str, Any]:
    """Return the results of one run; ``accuracy_last`` is at its training length and the first p tested."""
    kept = (
        "identity_probability",
        "length",
        "accuracy_last",
        "accuracy",
        "loss",
        "iterations",
        "iterations_max",
        "residual",
        "residual_max",
        "non_converged",
        "diverged",
        "token_converged",
    )
    tests = [{key: row[key] for key in kept} for row in finished.summary["evaluation"]]
    first = tests[0]["identity_probability"]
    own = [row for row in tests if row["length"] == length] or tests
    summary = finished.summary
    return {
        "group": group,
        "model": model,
        "layers": layers,
        "length": length,
        "seed": summary["seed"],
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "seconds": summary["seconds"],
        "device": summary["device"],
        "chance": summary["chance"],
        "accuracy_last": next(row for row in own if row["identity_probability"] == first)["accuracy_last"],
        "tests": tests,
    }


def table(written: dict[str, Any]) -> str:
    """Return the results as an aligned text table."""
    lines = ["group  model               layers  length  seed  p     at    last tokens  residual  converged"]
    for row in written["runs"]:
        for test in row["tests"]:
            found = "       -          -"
            if test["residual"] is not None:
                found = f"{test['residual']:8.1e}  {1 - test['non_converged']:9.1%}"
            lines.append(
                f"{row['group']:<5}  {row['model']:<18}  {row['layers']:6d}  {row['length']:6d}  "
                f"{row['seed']:4d}  {test['identity_probability']:<4g}  {test['length']:4d}  "
                f"{test['accuracy_last']:11.2%}  {found}"
            )
    lines.append(f"layers needed for {written['settings']['threshold']:.0%}:")
    for row in written["least_layers"]:
        least = "not solved" if row["least_layers"] is None else str(row["least_layers"])
        lines.append(f"  {row['group']} {row['model']}, length {row['length']}: {least}")
    return "\n".join(lines)


def draw(written: dict[str, Any]) -> Figure:
    """Draw the layers needed against length, and the accuracies for each p, one row of panels per group."""
    settings = written["settings"]
    groups, tested = settings["groups"], settings["test_p"]
    figure = new_figure(
        width=4.2 * (1 + len(tested)),
        height=4.2 * len(groups),
        title="Word problems: layers needed, and accuracy at and beyond the training length",
    )
    panels = figure.subplots(len(groups), 1 + len(tested), squeeze=False)
    for (least, *accuracies), group in zip(panels, groups, strict=True):
        _draw_least(written, least, group)
        for axes, p in zip(accuracies, tested, strict=True):
            _draw_accuracy(written, axes, group, p)
        for axes in (least, *accuracies):
            lengths = sorted(settings["lengths"])
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.minorticks_off()
    return figure


def _draw_least(written: dict[str, Any], axes: Axes, group: str) -> None:
    settings = written["settings"]
    models, top = settings["models"], max(settings["layers"])
    for index, model in enumerate(models):
        color = _color(model, models)
        shift = 1 + 0.04 * (index - (len(models) - 1) / 2)  # separates coinciding lines
        rows = [row for row in written["least_layers"] if (row["group"], row["model"]) == (group, model)]
        solved = [(row["length"], row["least_layers"]) for row in rows if row["least_layers"] is not None]
        failed = [row["length"] for row in rows if row["least_layers"] is None]
        axes.plot([x for x, _ in solved], [y * shift for _, y in solved], "o-", color=color, label=model)
        axes.plot(failed, [2 * top * shift] * len(failed), "x", color=color, markersize=9)
    ticks = sorted(settings["layers"])
    axes.set_yscale("log", base=2)
    axes.set_yticks([*ticks, 2 * top], [*map(str, ticks), "not\nsolved"])
    axes.set_ylim(0.8, 2.4 * top)
    axes.legend(frameon=False, fontsize=9, loc="best")
    finish(
        axes,
        title=f"{group}: layers needed for {settings['threshold']:.0%}",
        x="training length, tokens",
        y="layers",
    )


def _draw_accuracy(written: dict[str, Any], axes: Axes, group: str, p: float) -> None:
    settings = written["settings"]
    styles = list(zip(settings["test_lengths"], cycle(STYLES), strict=False))
    for index, model in enumerate(settings["models"]):
        # Later models are drawn thinner, so that coinciding lines stay visible.
        share = 1 - index / len(settings["models"])
        for times, (style, fill) in styles:
            points = [
                (row["length"], test["accuracy_last"])
                for row in _best(written["runs"], group, model)
                for test in row["tests"]
                if test["identity_probability"] == p and test["length"] == times * row["length"]
            ]
            xs, ys = [x for x, _ in points], [100 * y for _, y in points]
            color, width, marker = _color(model, settings["models"]), 1.1 + 1.4 * share, 4 + 4 * share
            axes.plot(xs, ys, style, fillstyle=fill, color=color, linewidth=width, markersize=marker)
    for times, (style, fill) in styles:
        axes.plot([], [], style, fillstyle=fill, color=DARK, label=f"at {times}x the training length")
    if written["chance"][group] is not None:
        axes.axhline(100 * written["chance"][group], color="#9aa5b1", linestyle=":", linewidth=1)
    axes.set_ylim(-3, 103)
    axes.legend(frameon=False, fontsize=9, loc="center right")
    finish(
        axes,
        title=f"{group}, p = {p:g}: accuracy, best layers",
        x="training length, tokens",
        y="accuracy on the last tokens, at convergence (%)",
    )


def _color(model: str, models: Sequence[str]) -> str:
    others = [one for one in models if one not in COLORS]
    return COLORS.get(model) or OTHERS[others.index(model) % len(OTHERS)]


def _best(runs: Sequence[dict[str, Any]], group: str, model: str) -> list[dict[str, Any]]:
    """Return, for each length, the run with the highest accuracy."""
    best: dict[int, dict[str, Any]] = {}
    for row in runs:
        if (row["group"], row["model"]) != (group, model):
            continue
        if row["length"] not in best or row["accuracy_last"] > best[row["length"]]["accuracy_last"]:
            best[row["length"]] = row
    return [best[length] for length in sorted(best)]
