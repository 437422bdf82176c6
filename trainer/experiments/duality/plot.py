"""Plot of the duality experiment: five panels over tolerances, positions and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.reporting.pictures import BLUE, GREEN, GREY, ORANGE, finish, new_figure, plain_logarithm

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[dict[str, Any]], kinds: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw agreement and distance against tolerance, and iterations per token at the tightest tolerance."""
    figure = new_figure(width=12.8, height=7.4, title=f"{title}: sequential against simultaneous evaluation")
    panels = figure.subplot_mosaic(
        [["agreement", "distance", "tokens"], ["histogram", "positions", "tokens"]]
    )
    agreement, distance, histogram, positions, tokens = (
        panels[name] for name in ("agreement", "distance", "histogram", "positions", "tokens")
    )
    tolerances = [row["tolerance"] for row in rows]
    agreement.plot(tolerances, [100 * row["equal_tokens"] for row in rows], "o-", color=BLUE)
    plain_logarithm(agreement, "x", at=tolerances)
    lowest = min(row["equal_tokens"] for row in rows)
    agreement.set_ylim(min(95.0, 100 * lowest - 1), 100.3)
    finish(agreement, title="Equal predictions", x="tolerance", y="tokens (%)")
    for key, color, label in (
        ("logit_distance_max", ORANGE, "largest"),
        ("logit_distance_p99", GREEN, "99th percentile"),
        ("logit_distance_mean", BLUE, "mean"),
    ):
        floor = [max(row[key], 1e-17) for row in rows]
        distance.plot(tolerances, floor, "o-", color=color, label=label)
    distance.plot(tolerances, tolerances, "--", color=GREY, linewidth=1, label="tolerance")
    plain_logarithm(distance, "x", at=tolerances)
    distance.set_yscale("log")
    distance.legend(frameon=False, fontsize=9)
    finish(distance, title="Logit distance", x="tolerance", y="largest difference of a token's logits")
    tightest = min(rows, key=lambda row: float(row["tolerance"]))
    most = max(tightest[name]["iterations_max"] for name in ("simultaneous", "sequential"))
    edges = [0.5 + most * edge / min(most, 60) for edge in range(min(most, 60) + 1)]
    for name, color in (("simultaneous", BLUE), ("sequential", ORANGE)):
        counts = tightest[name]["iterations_histogram"]
        histogram.hist(
            range(len(counts)),
            bins=edges,
            weights=counts,
            histtype="step",
            color=color,
            linewidth=1.6,
            label=name,
        )
        by_position = tightest[name]["iterations_by_position"]
        positions.plot(range(1, len(by_position) + 1), by_position, color=color, label=name)
    histogram.set_yscale("log")
    at = f"at tolerance {min(tolerances):.0e}"
    finish(histogram, title=f"Iterations per token, {at}", x="iterations", y="tokens")
    finish(positions, title=f"Mean iterations, {at}", x="position (tokens)", y="iterations")
    for axes in (histogram, positions):
        axes.legend(frameon=False, fontsize=9)
    ends = [*kinds[:12], *kinds[-12:]] if len(kinds) > 24 else list(kinds)
    colors = [ORANGE if place < (len(ends) + 1) // 2 else BLUE for place in range(len(ends))]
    tokens.barh(range(len(ends)), [one["iterations_mean"] for one in ends], color=colors)
    labels = [str(one["token"]) if one["text"] is None else one["text"] for one in ends]
    tokens.set_yticks(range(len(ends)), [label.replace("$", r"\$") for label in labels])
    tokens.invert_yaxis()
    tokens.margins(y=0.01)
    finish(tokens, title="Tokens with most and fewest iterations (sequential)", x="mean iterations", y="")
    return figure
