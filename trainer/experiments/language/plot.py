"""Plot of the language experiment: six panels over all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    of_tokens, seen = _unit_of_tokens(runs)
    for axes, key, unit, name in (
        (tokens, "tokens", of_tokens, seen),
        (flops, "flops", 1.0, "FLOPs executed in training"),
    ):
        for run in twins:
            known = [entry for entry in run["curve"] if entry[key] is not None]
            points = [(entry[key] / unit, entry["perplexity"]) for entry in known]
            axes.plot(*_columns(points), **_line_style(run, colors, first_seed))
        plain_logarithm(axes, "y", at=_PERPLEXITIES)
        finish(axes, title=f"Against {name.split()[0]}", x=name, y="perplexity")
    plain_logarithm(flops, "x")
    for run in twins:
        lengths.plot(
            [entry["multiple"] for entry in run["lengths"]],
            [entry["perplexity"] for entry in run["lengths"]],
            **_line_style(run, colors, first_seed),
            marker="o",
        )
    plain_logarithm(lengths, "x", at=sorted({entry["multiple"] for run in twins for entry in run["lengths"]}))
    plain_logarithm(lengths, "y", about=7)
    finish(lengths, title="Length extrapolation", x="length (training lengths)", y="perplexity")
    for run in twins:
        look = _line_style(run, colors, first_seed)
        if run["kind"] == "explicit":
            compute.axhline(run["lengths"][0]["loss"], **look)
            continue
        compute.plot(
            [entry["self_iterations"] for entry in run["test_time_compute"]],
            [entry["loss"] for entry in run["test_time_compute"]],
            **look,
            marker="o",
        )
        by_position = run["lengths"][0]["iterations_by_position"]
        if by_position is not None:
            positions.plot(range(1, len(by_position) + 1), by_position, **look)
    most = [entry["self_iterations"] for run in implicit for entry in run["test_time_compute"]]
    plain_logarithm(compute, "x", at=sorted(set(most)))
    finish(compute, title="Test-time compute, one checkpoint", x="maximum self-iterations", y="loss (nats)")
    finish(positions, title="Iterations per token", x="position (tokens)", y="iterations")
    if any(run["kind"] == "curriculum" for run in runs):
        _draw_shares(shares, runs, colors)
    else:
        _draw_lead(shares, twins, colors)
    tokens.legend(frameon=False, fontsize=8)
    return figure


def _draw_shares(axes: Axes, runs: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    tried = {run["spec"] for run in runs if run["kind"] == "curriculum"}
    for spec in sorted(tried):
        own = [run for run in runs if run["spec"] == spec and run["share"] is not None]
        shares = sorted({run["share"] for run in own})
        found = [[r["lengths"][0]["perplexity"] for r in own if r["share"] == share] for share in shares]
        means = [sum(values) / len(values) for values in found]
        axes.plot(shares, means, "-", color=colors[spec], label=spec)
        points = [(share, one) for share, values in zip(shares, found, strict=True) for one in values]
        axes.plot(*_columns(points), "o", color=colors[spec], fillstyle="none")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xticks(sorted({run["share"] for run in runs if run["share"] is not None}))
    finish(axes, title="Share of the first phase, all seeds", x="share of the run", y="perplexity")


def _draw_lead(axes: Axes, twins: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    """Draw the relative perplexity reduction of the implicit model against its explicit twin."""
    unit, seen = _unit_of_tokens(twins)
    for run in twins:
        pair = {other["kind"]: other for other in twins if (other["spec"], other["seed"]) == _pair_of(run)}
        if run["kind"] != "implicit" or "explicit" not in pair:
            continue
        theirs = {entry["tokens"]: entry["perplexity"] for entry in pair["explicit"]["curve"]}
        points = [
            (entry["tokens"] / unit, 100 * (1 - entry["perplexity"] / theirs[entry["tokens"]]))
            for entry in run["curve"]
            if entry["tokens"] in theirs
        ]
        axes.plot(*_columns(points), "o-", color=colors[run["spec"]], linewidth=1.5, markersize=4)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    finish(axes, title="Lead of the implicit model, all seeds", x=seen, y="perplexity reduction (%)")


def _unit_of_tokens(runs: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Return the divisor for tokens, and the axis label."""
    most = max(run["curve"][-1]["tokens"] for run in runs)
    return (1e6, "tokens seen (millions)") if most >= 1e6 else (1e3, "tokens seen (thousands)")


def _pair_of(run: Mapping[str, Any]) -> tuple[str, int]:
    return run["spec"], run["seed"]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line_style(run: Mapping[str, Any], colors: Mapping[str, str], first_seed: int) -> dict[str, Any]:
    explicit, first = run["kind"] == "explicit", run["seed"] == first_seed
    return {
        "color": colors[run["spec"]],
        "linestyle": "--" if explicit else "-",
        "linewidth": 1.5 if first else 1.0,
        "alpha": 1.0 if first else 0.4,
        "label": run["spec"] if first and not explicit else None,
    }
