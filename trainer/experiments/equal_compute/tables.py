"""The table of the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_HEAD = ("side", "shape", "parameters", "epochs", "rate", "decay", "seeds", "perplexity", "converged")


def table(written: Mapping[str, Any]) -> str:
    """Return all comparisons as text: the chosen recipe of each side, the difference, and problems."""
    return "\n\n".join(_of_comparison(one, written) for one in written["comparisons"])


def _of_comparison(comparison: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    rows = [_HEAD, *(_side(name, side, written) for name, side in comparison["sides"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [comparison["title"]]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.append(describe_difference(comparison["result"]))
    lines += [f"! {name}: {mark}" for name, side in comparison["sides"].items() for mark in side["marks"]]
    return "\n".join(lines)


def describe_difference(result: Mapping[str, Any] | None) -> str:
    """Return the difference of a comparison in words."""
    if result is None:
        return "no difference: a side has no finished run that is reported"
    sign = "below" if result["difference"] < 0 else "above"
    difference = f"implicit {abs(result['difference']):.1%} {sign} explicit"
    if result["interval"] is None:
        return f"{difference}; no interval: a side has fewer than 2 seeds"
    low, high = result["interval"]
    certain = "" if low <= 0 <= high else "; 0 is outside"
    return f"{difference}, 95 % interval {low:+.1%} to {high:+.1%}{certain}"


def _side(name: str, side: Mapping[str, Any], written: Mapping[str, Any]) -> tuple[str, ...]:
    recipe = side["recipe"]
    rows = [row for row in written["runs"] if row["name"] in side["runs"]]
    first = rows[0] if rows else None
    values = [row["report"] for row in rows if row["report"] is not None]
    shares = [row["converged"] for row in rows if row["converged"] is not None]
    return (
        name,
        f"{side['shape']}, width {recipe['width']}",
        "" if first is None else f"{first['parameters'] / 1e6:.2f} M",
        "" if first is None or first["epochs"] is None else f"{first['epochs']:.1f}",
        f"{recipe['learning_rate']:g}",
        f"{recipe['weight_decay']:g}",
        str(len(values)),
        " ".join(f"{value:.2f}" for value in values),
        f"{min(shares):.1%}" if shares else "",
    )


def at_fixed_point(run: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the relative change of the perplexity at the fixed point, and the share of converged tokens.

    None: an explicit model.
    """
    points = [one for one in run["fixed_point"] or () if one["token_converged"] is not None]
    if not points or run["trained_loops_few"] is None:
        return None
    most = max(one["max_iterations"] for one in points)
    best = max(
        (one for one in points if one["max_iterations"] == most), key=lambda one: one["token_converged"]
    )
    return math.expm1(best["loss"] - run["trained_loops_few"]["loss"]), best["token_converged"]
