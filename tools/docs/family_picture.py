"""Draw the picture of docs/family.md: ``python tools/docs/family_picture.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TARGET = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "family.png"
BLUE, ORANGE, GREY, LIGHT = "#3b6fb6", "#e08214", "#777777", "#f2f4f8"


def box(
    axes: Axes, x: float, y: float, width: float, text: str, *, color: str = BLUE, height: float = 0.9
) -> None:
    """Draw a box with its center at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, ec=color, fc=LIGHT, lw=1.6))
    axes.text(x, y, text, ha="center", va="center", fontsize=10)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = GREY, bend: float = 0.0
) -> None:
    """Draw an arrow."""
    shape = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=13, color=color, lw=1.4, connectionstyle=shape
        )
    )


def label(axes: Axes, x: float, y: float, text: str, *, color: str = GREY, size: float = 9) -> None:
    """Write a text with its center at (x, y)."""
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color)


def main() -> None:
    """Draw the picture."""
    figure, axes = plt.subplots(figsize=(11, 3.6))
    middle = 2.0
    for x, width, text, under in (
        (1.0, 1.5, "embedding", "scaled"),
        (3.1, 1.5, "prelude", "runs once"),
        (12.1, 1.5, "coda", "runs once"),
        (14.2, 1.5, "norm, head", "logits"),
    ):
        box(axes, x, middle, width, text)
        label(axes, x, middle - 0.72, under)
    box(axes, 5.7, middle, 1.5, "enter(z, e)", color=ORANGE)
    box(axes, 7.6, middle, 1.4, "core")
    box(axes, 9.75, middle, 1.9, "leave(h, z, e)", color=ORANGE)
    for start, end in ((1.75, 2.35), (3.85, 4.95), (6.45, 6.9), (8.3, 8.8), (10.7, 11.35), (12.85, 13.45)):
        arrow(axes, (start, middle), (end, middle))
    label(axes, 2.05, middle + 0.2, "x")
    label(axes, 4.4, middle + 0.2, "e", color=ORANGE)
    label(axes, 8.55, middle + 0.2, "h")
    label(axes, 10.95, middle + 0.2, "z*")
    # The loop.
    arrow(axes, (9.75, middle + 0.45), (5.7, middle + 0.45), color=BLUE, bend=0.32)
    label(axes, 8.4, 3.6, "z, until the depth or the exit criterion ends the loop", color=BLUE)
    # e reaches both ends of the core.
    arrow(axes, (3.5, middle - 0.45), (9.75, middle - 0.45), color=ORANGE, bend=0.24)
    label(axes, 7.0, 0.62, "injection: e in every loop", color=ORANGE)
    axes.annotate(
        "start z₀",
        (5.45, middle + 0.45),
        (4.6, 3.35),
        fontsize=9,
        color=BLUE,
        arrowprops={"arrowstyle": "-|>", "color": BLUE},
    )
    # The residual path around the core.
    arrow(axes, (3.1, middle - 1.0), (12.1, middle - 1.0), color=GREY, bend=0.16)
    label(axes, 7.6, -0.05, "core_residual: the prelude's output is added before the coda")
    axes.set_xlim(0, 15.2)
    axes.set_ylim(-0.4, 4.1)
    axes.axis("off")
    figure.savefig(TARGET, dpi=110, bbox_inches="tight")
    plt.close(figure)
    print(TARGET)


if __name__ == "__main__":
    main()
