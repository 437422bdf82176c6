"""Plot of the language experiment: six panels over all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer.experiments.equal_compute.compare import MARGIN
from trainer.reporting.pictures import BLUE, GREEN, GREY, ORANGE, finish, new_figure, plain_logarithm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PERPLEXITIES = [
    *range(10, 30, 2), *range(30, 100, 5), *range(100, 200, 20), *range(200, 300, 25),
    *range(300, 1000, 100), 2000, 5000, 10000
]  # fmt: skip
_COLORS = (BLUE, ORANGE, GREEN, "#805ad5", "#b83280", GREY)


def draw(written: Mapping[str, Any]) -> Figure:
    """Draw perplexity against tokens, FLOPs, length and self-iterations, and two more panels.

    The others show iterations by position, and perplexity against the share of the first phase if several
    were tried, else the implicit model's lead during training.
    """
    runs: list[dict[str, Any]] = written["runs"]
    twins = [run for run in runs if run["kind"] != "curriculum"]
    implicit = [run for run in twins if run["kind"] == "implicit"]
    first_seed = min(run["seed"] for run in runs)
    others = " (further seeds faint)" if any(run["seed"] != first_seed for run in twins) else ""
    figure = new_figure(
        width=12.8,
        height=7.8,
        title=f"Implicit (solid) and explicit (dashed) models: perplexity on held-out text{others}",
    )
    (tokens, flops, lengths), (compute, shares, positions) = figure.subplots(2, 3)
    colors = dict(zip(written["specs"], _COLORS * len(runs), strict=False))
    scales = {"tokens": _unit_of_tokens(runs), "flops": (1.0, "FLOPs executed in training")}
    for axes, key in ((tokens, "tokens"), (flops, "flops")):
        unit, name = scales[key]
        for run in twins:
            x, perplexities = _columns(run["curve"], key, "perplexity")
            axes.plot(x / unit, perplexities, **_line_style(run, colors, first_seed))
        plain_logarithm(axes, "y", at=_PERPLEXITIES)
        finish(axes, title=f"Against {name.split()[0]}", x=name, y="perplexity")
    plain_logarithm(flops, "x")
    for run in twins:
        look = _line_style(run, colors, first_seed)
        lengths.plot(*_columns(run["lengths"], "multiple", "perplexity"), marker="o", **look)
        if run["kind"] == "explicit":
            compute.axhline(run["lengths"][0]["loss"], **look)
            continue
        compute.plot(*_columns(run["test_time_compute"], "self_iterations", "loss"), marker="o", **look)
        by_position = run["lengths"][0]["iterations_by_position"]
        if by_position is not None:
            positions.plot(range(1, len(by_position) + 1), by_position, **look)
    plain_logarithm(lengths, "x", at=sorted({entry["multiple"] for run in twins for entry in run["lengths"]}))
    plain_logarithm(lengths, "y", about=7)
    finish(lengths, title="Length extrapolation", x="length (training lengths)", y="perplexity")
    most = [entry["self_iterations"] for run in implicit for entry in run["test_time_compute"]]
    plain_logarithm(compute, "x", at=sorted(set(most)))
    finish(compute, title="Test-time compute, one checkpoint", x="maximum self-iterations", y="loss (nats)")
    finish(positions, title="Iterations per token", x="position (tokens)", y="iterations")
    if any(run["kind"] == "curriculum" for run in runs):
        _draw_shares(shares, runs, colors)
    else:
        key = "flops" if written.get("settings", {}).get("petaflops") else "tokens"
        _draw_lead(shares, twins, colors, key, *scales[key])
    tokens.legend(frameon=False, fontsize=8)
    return figure


def _draw_shares(axes: Axes, runs: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    for spec in sorted({run["spec"] for run in runs if run["kind"] == "curriculum"}):
        own = [run for run in runs if run["spec"] == spec and run["share"] is not None]
        points = [(run["share"], run["lengths"][0]["perplexity"]) for run in own]
        shares = sorted({share for share, _ in points})
        means = [fmean(value for share, value in points if share == one) for one in shares]
        axes.plot(shares, means, "-", color=colors[spec], label=spec)
        axes.plot(*zip(*points, strict=True), "o", color=colors[spec], fillstyle="none")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xticks(sorted({run["share"] for run in runs if run["share"] is not None}))
    finish(axes, title="Share of the first phase, all seeds", x="share of the run", y="perplexity")


def _draw_lead(
    axes: Axes,
    twins: Sequence[Mapping[str, Any]],
    colors: Mapping[str, str],
    key: str,
    unit: float,
    name: str,
) -> None:
    """Draw how much lower the perplexity of an implicit model is than its twin's at equal tokens or FLOPs.

    The twin's is interpolated, because at equal FLOPs its evaluations are at other points.
    """
    pairs = product(*([run for run in twins if run["kind"] == kind] for kind in ("implicit", "explicit")))
    for run, twin in pairs:
        if (run["spec"], run["seed"]) != (twin["spec"], twin["seed"]):
            continue
        (x, own), (at, theirs) = (_columns(each["curve"], key, "perplexity") for each in (run, twin))
        lead = 100 * (1 - own / np.exp(np.interp(x, at, np.log(theirs), left=np.nan)))
        lead[x > (1 + 2 * MARGIN) * at[-1]] = np.nan
        axes.plot(x / unit, lead, "o-", color=colors[run["spec"]], linewidth=1.5, markersize=4)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    finish(axes, title="Lead of the implicit model, all seeds", x=name, y="perplexity reduction (%)")


def _columns(entries: Sequence[Mapping[str, Any]], x: str, y: str) -> npt.NDArray[np.float64]:
    """Return two columns of entries as rows; NaN where a value is not known."""
    return np.array([(entry[x], entry[y]) for entry in entries], dtype=np.float64).reshape(-1, 2).T


def _unit_of_tokens(runs: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Return the divisor for tokens, and the axis label."""
    most = max(run["curve"][-1]["tokens"] for run in runs)
    return (1e6, "tokens seen (millions)") if most >= 1e6 else (1e3, "tokens seen (thousands)")


def _line_style(run: Mapping[str, Any], colors: Mapping[str, str], first_seed: int) -> dict[str, Any]:
    explicit, first = run["kind"] == "explicit", run["seed"] == first_seed
    return {
        "color": colors[run["spec"]],
        "linestyle": "--" if explicit else "-",
        "linewidth": 1.5 if first else 1.0,
        "alpha": 1.0 if first else 0.4,
        "label": run["spec"] if first and not explicit else None,
    }
