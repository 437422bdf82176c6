"""Draw the idea: a stack of layers, the fixed point of one layer, and the two modes of finding it.

    python benchmarks/draw_idea.py

Writes ``docs/images/idea.png``.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "idea.png"

INK, GREY, PALE = "#1f2933", "#5a6472", "#cbd2d9"
ORANGE, BLUE = "#d9730d", "#2b6cb0"
# From unconverged to converged: increasing saturation of the implicit model's blue.
SETTLING = LinearSegmentedColormap.from_list("settling", ["#eef4fb", "#a9c8e8", "#5b94cc", BLUE])
TOKENS = 8
# Iterations of each token. In simultaneous mode, a token converges only after all earlier tokens; in
# sequential mode, each token starts after converged ones.
TOGETHER = (2, 3, 3, 5, 5, 6, 7, 7)
IN_TURN = (2, 3, 2, 4, 3, 3, 4, 2)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.09",
            facecolor=color, edgecolor="none", zorder=3,
        )
    )  # fmt: skip
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=13, zorder=4
    )


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = GREY, bend: str = "arc3"
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=13, linewidth=1.6, color=color,
            connectionstyle=bend, shrinkA=0, shrinkB=0, zorder=2,
        )
    )  # fmt: skip


def label(
    axes: Axes, x: float, y: float, text: str, *, size: float = 12, color: str = INK, **options: str
) -> None:
    placed = {"ha": "center", "va": "center", **options}
    axes.text(x, y, text, fontsize=size, color=color, **placed)  # type: ignore[arg-type]  # matplotlib's stubs


def heading(axes: Axes, title: str, below: str, *, color: str) -> None:
    axes.set_title(title, fontsize=14.5, fontweight="bold", color=color, pad=26, loc="center")
    axes.text(0.5, 1.025, below, transform=axes.transAxes, ha="center", fontsize=10.5, color=GREY)


def draw_explicit(axes: Axes) -> None:
    heading(axes, "Explicit", "a fixed number of layers", color=ORANGE)
    label(axes, 1.0, 0.28, "$x$", size=15)
    arrow(axes, (1.0, 0.52), (1.0, 0.92))
    heights = (0.95, 2.05, 3.85)
    for y, name in zip(heights, ("layer 1", "layer 2", "layer $n$"), strict=True):
        box(axes, 0.35, y, 1.3, 0.62, name, ORANGE)
    arrow(axes, (1.0, 1.57), (1.0, 2.02))
    label(axes, 1.0, 3.2, "⋮", size=17, color=GREY)
    arrow(axes, (1.0, 3.5), (1.0, 3.82))
    arrow(axes, (1.0, 4.47), (1.0, 4.95))
    label(axes, 1.0, 5.2, "$y = f_n(\\,\\cdots f_2(f_1(x)))$", size=13)
    axes.set(xlim=(-0.2, 2.2), ylim=(0, 5.6))


def draw_implicit(axes: Axes) -> None:
    heading(axes, "Implicit", "iterations until convergence", color=BLUE)
    label(axes, 1.35, 0.28, "$x$", size=15)
    arrow(axes, (1.35, 0.52), (1.35, 2.02))
    box(axes, 0.6, 2.05, 1.5, 1.15, "", BLUE)
    axes.text(1.35, 2.83, "$f(z, x)$", ha="center", va="center", color="white", fontsize=16, zorder=4)
    axes.text(1.35, 2.35, "the same layers,\nthe same weights", ha="center", va="center", color="white",
              fontsize=9, zorder=4, linespacing=1.1)  # fmt: skip
    # The loop leaves at the top and returns at the bottom, around the left of the box.
    axes.plot([1.35, 1.35], [3.2, 3.75], color=BLUE, linewidth=1.8, zorder=2)
    axes.plot([1.35, 0.25, 0.25, 0.95], [3.75, 3.75, 1.5, 1.5], color=BLUE, linewidth=1.8, zorder=2,
              solid_joinstyle="round")  # fmt: skip
    arrow(axes, (0.95, 1.5), (0.95, 2.02), color=BLUE)
    label(axes, 0.08, 2.62, "$z$", size=15, color=BLUE)
    arrow(axes, (1.35, 3.75), (1.35, 4.95))
    label(axes, 1.5, 4.35, "when $\\Vert f(z,x) - z\\Vert$\nis small enough", size=9.5, color=GREY, ha="left")
    label(axes, 1.35, 5.2, "$z = f(z, x)$", size=14)
    axes.set(xlim=(-0.1, 2.5), ylim=(0, 5.6))


def draw_grid(axes: Axes, title: str, below: str, *, sequential: bool) -> None:
    heading(axes, title, below, color=INK)
    rows, counts = max(TOGETHER), IN_TURN if sequential else TOGETHER
    moment = 0
    for token, count in enumerate(counts):
        for iteration in range(rows):
            done = iteration >= count
            shade = "#f5f7fa" if done else SETTLING(((iteration + 1) / count) ** 1.4)
            axes.add_patch(
                Rectangle((token + 0.05, iteration + 0.06), 0.9, 0.88, linewidth=0, facecolor=shade, zorder=2)
            )
            if done:
                continue
            moment += 1
            strong = (iteration + 1) / count > 0.6
            label(
                axes, token + 0.5, iteration + 0.49, str(moment if sequential else iteration + 1),
                size=10, color="white" if strong else "#3e5c7a",
            )  # fmt: skip
        label(axes, token + 0.5, -0.4, f"$x_{{{token + 1}}}$", size=12)
        axes.plot([token + 0.05, token + 0.95], [count, count], color=INK, linewidth=2.2, zorder=3)
        if sequential and token + 1 < TOKENS:
            # The next token starts from the state after the finished one.
            way = ([token + 0.5, token + 1.0, token + 1.0], [count + 0.12, count + 0.12, 0.5])
            axes.plot(*way, color=ORANGE, linewidth=1.5, zorder=4, solid_joinstyle="round")
            arrow(axes, (token + 1.0, 0.5), (token + 1.22, 0.5), color=ORANGE)
    axes.set(xlim=(-0.85, TOKENS + 0.05), ylim=(-0.75, rows + 0.25))
    axes.annotate("", (-0.22, rows), (-0.22, 0), arrowprops={"arrowstyle": "-|>", "color": GREY})
    axes.text(
        -0.6, rows / 2, "iterations of f", rotation=90, ha="center", va="center", fontsize=10.5, color=GREY
    )


def main() -> None:
    figure = Figure(figsize=(13.0, 4.7), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1, 4, width_ratios=(2.2, 2.5, 3.5, 3.5), left=0.01, right=0.99, top=0.83, bottom=0.09, wspace=0.12
    )
    explicit, implicit, simultaneous, sequential = (figure.add_subplot(grid[0, n]) for n in range(4))
    for axes in (explicit, implicit, simultaneous, sequential):
        axes.set_axis_off()
    draw_explicit(explicit)
    draw_implicit(implicit)
    draw_grid(simultaneous, "Simultaneous", "all tokens in parallel: training and prefill", sequential=False)
    draw_grid(sequential, "Sequential", "token by token, passing a state (orange)", sequential=True)
    caption = "numbers: order of computation, bars: convergence of a token"
    figure.text(0.705, 0.025, f"same fixed point; {caption}", ha="center", fontsize=10.5, color=GREY)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, dpi=150)
    print(OUTPUT)


if __name__ == "__main__":
    main()
