"""An animation of a board's solution over the iterations of the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks.models.implicit import ImplicitLM
from trainer.data.puzzles import maze
from trainer.data.puzzles.sudoku import BOXES
from trainer.data.source import Batch
from trainer.reporting.pictures import BLUE, DARK, GREEN, ORANGE, new_figure
from trainer.specs.generated import PuzzleSpec

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

COLORS = {maze.WALL: "#3e4c59", maze.OPEN: "white", maze.START: GREEN, maze.GOAL: ORANGE, maze.PATH: BLUE}

MOST_FRAMES = 64
"""Iterations that are drawn; of a longer search every second, every third, and so on."""
AFTER = 6
"""Iterations that are drawn after the answer is final."""


@torch.no_grad()
def animate(model: ImplicitLM, batch: Batch, spec: PuzzleSpec, path: Path, *, iterations: int) -> Path:
    """Write the solution of a board as a GIF: a frame per iteration, or some, until its answer is final.

    The board is the solved one that took the most iterations. A digit or square is drawn as opaque as the
    model is sure of it.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter

    output = model(batch.inputs, max_iterations=iterations)
    assert output.solution is not None
    right_B = (output.logits.argmax(-1) == batch.labels).all(1)
    # Of the solved boards the one that took the most iterations.
    row = int((output.solution.iterations * right_B).argmax())
    steps = max(1, int(output.solution.iterations[row]))
    found = model(batch.inputs[row : row + 1], max_iterations=steps, trajectory=list(range(1, steps + 1)))
    probabilities = [
        model.predict(iterate.hidden_BLD)[0].softmax(-1).cpu()
        for _, iterate in sorted(found.trajectory.items())
    ]
    probabilities = probabilities[: final_answer(probabilities) + AFTER]
    side = math.isqrt(batch.inputs.shape[1])
    givens = (batch.inputs[row].cpu() % spec.values).tolist()
    figure = new_figure(width=3.4, height=3.7, title="")
    axes = figure.subplots()
    stride = -(-len(probabilities) // MOST_FRAMES)
    frames = list(range((len(probabilities) - 1) % stride, len(probabilities), stride))  # with the last one
    frames += frames[-1:] * 8  # which stays

    def show(frame: int) -> list[Artist]:
        axes.clear()
        axes.set(xlim=(0, side), ylim=(side, 0), aspect="equal")
        axes.axis("off")
        axes.set_title(f"iteration {frame + 1}", fontsize=11, color=DARK)
        (_digits if spec.kind == "sudoku" else _squares)(axes, probabilities[frame], givens, side)
        return []

    film = FuncAnimation(figure, show, frames=frames, blit=False)
    film.save(path, writer=PillowWriter(fps=4), dpi=72)
    return path


def final_answer(probabilities: Sequence[Tensor]) -> int:
    """Return the number of iterations after which the answer, (L, V) at each iteration, stays the same."""
    last = probabilities[-1].argmax(-1)
    others = [number for number, p in enumerate(probabilities, 1) if not torch.equal(p.argmax(-1), last)]
    return 1 + max(others, default=0)


def _digits(axes: Axes, probabilities_LV: Tensor, givens: Sequence[int], side: int) -> None:
    height, width = BOXES[side]
    for line in range(side + 1):
        axes.plot([0, side], [line, line], color=DARK, linewidth=2 if line % height == 0 else 0.5)
        axes.plot([line, line], [0, side], color=DARK, linewidth=2 if line % width == 0 else 0.5)
    for cell, clue in enumerate(givens):
        sure, digit = (each.item() for each in probabilities_LV[cell].max(0))
        text, color, opacity = (str(clue), DARK, 1.0) if clue else (str(int(digit)), BLUE, sure)
        axes.text(
            cell % side + 0.5,
            cell // side + 0.53,
            text,
            ha="center",
            va="center",
            fontsize=110 / side,
            color=color,
            alpha=max(0.05, opacity**2),
            fontweight="bold" if clue else "normal",
        )


def _squares(axes: Axes, probabilities_LV: Tensor, givens: Sequence[int], side: int) -> None:
    from matplotlib.colors import to_rgb

    colors = torch.tensor([to_rgb(COLORS[clue]) for clue in givens])
    path, sure = torch.tensor(to_rgb(BLUE)), probabilities_LV[:, maze.PATH, None].float()
    is_open = (torch.tensor(givens) == maze.OPEN)[:, None]
    squares = torch.where(is_open, torch.lerp(colors, path.expand_as(colors), sure), colors)
    axes.imshow(squares.view(side, side, 3).numpy(), extent=(0, side, side, 0), interpolation="nearest")
