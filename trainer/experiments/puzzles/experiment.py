"""Test-time compute on puzzles: more iterations, and several starts of which one answer is chosen.

The chosen answer is the most confident one: its least certain cell has the highest probability. The choice
needs no knowledge of the solution. The share of boards solved by the answer with the lowest residual is
reported too; the residuals of converged searches differ little. (Restarts: "Equilibrium reasoners"; path
independence: Anil et al., 2022.) Models that were trained from a single start solve symmetric variants of a
maze instead: their errors in different variants have little in common.

Shape legend: B boards, L cells, R starts, W width of the core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_blocks._utils.devices import choose_device
from implicit_blocks.models.implicit import ImplicitLM
from trainer.data.puzzles import maze
from trainer.data.source import Batch
from trainer.experiments.common.checks import require_counts
from trainer.experiments.common.runs import evaluation_batch, find_trained_run, load_trained_model
from trainer.experiments.puzzles.animation import animate
from trainer.experiments.puzzles.plot import draw
from trainer.reporting.pictures import write_results
from trainer.specs.generated import MazeSpec, PuzzleSpec

SYMMETRIES = 8
"""Symmetries of a square."""
BOARDS_AT_ONCE = 64


def run(
    folder: Path,
    checkpoint: Path,
    *,
    iterations: Sequence[int],
    restarts: int,
    noise: float | None,
    boards: int,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> str:
    """Solve held-out boards, write ``puzzles.json``, ``puzzles.png`` and ``puzzle.gif``, return a summary.

    Args:
        folder: output directory, created if missing.
        checkpoint: a run directory, or one of its checkpoints.
        iterations: maximum numbers of iterations.
        restarts: number R of starts per board, the first of which is the model's own.
        noise: standard deviation of the noise that the others add to it; None: they begin at the model's own
            start, with the symmetric variants of the board.
        boards: number B of evaluation boards.
        overrides: changes to the run's spec, such as harder or larger boards.
        device: name of the device.

    Raises:
        ValueError: there is no trained implicit model of puzzles, or a setting is invalid.

    """
    require_counts(
        restarts=restarts, boards=boards, **{f"iterations[{i}]": n for i, n in enumerate(iterations)}
    )
    if noise is not None and noise <= 0 and restarts > 1:
        raise ValueError(f"noise is {noise}, with which all starts are equal; give a positive number")
    place = choose_device(device)
    name, spec, weights = find_trained_run(checkpoint, overrides)
    if not isinstance(spec.data, PuzzleSpec):
        raise ValueError(f"the data of {checkpoint} are of kind {spec.data.kind!r}; give a run of puzzles")
    if noise is None and not (isinstance(spec.data, MazeSpec) and restarts <= SYMMETRIES):
        raise ValueError(
            f"restarts is {restarts} and the data are of kind {spec.data.kind!r}, but only mazes have "
            f"symmetric variants, {SYMMETRIES} of them; choose fewer restarts, or noise"
        )
    batch = evaluation_batch(spec, sequences=boards, length=None).to(place)
    model, _ = load_trained_model(spec, weights)
    model.to(place)
    rows = []
    for most in sorted(set(iterations)):
        solved_RB, residual_RB, doubt_RB, mean, seconds = answers(
            model, batch, spec.data, restarts=restarts, noise=noise, max_iterations=most
        )
        rows.append(
            {
                "max_iterations": most,
                "mean_iterations": mean,
                "seconds_per_board_and_start": seconds,
                "converged": float((residual_RB[0] < model.evaluation_stopping.tolerance).double().mean()),
                "solved": {r: chosen_share(solved_RB[:r], doubt_RB[:r]) for r in _powers(restarts)},
                "solved_by_residual": {
                    r: chosen_share(solved_RB[:r], residual_RB[:r]) for r in _powers(restarts)
                },
                "solved_by_any": float(solved_RB.any(0).double().mean()),
            }
        )
    written = {
        "experiment": "puzzles",
        "run": name,
        "settings": {
            "checkpoint": str(weights),
            "boards": boards,
            "noise": noise,
            "data": spec.data.model_dump(mode="json"),
        },
        "rows": rows,
    }
    message = write_results(
        folder, "puzzles", written, lambda _: draw(rows, title=f"{name}: {spec.data.task}")
    )
    film = animate(model, batch, spec.data, folder / "puzzle.gif", iterations=max(iterations))
    return f"{table(rows)}\n{message}, {film}"


@torch.no_grad()
def answers(
    model: ImplicitLM,
    batch: Batch,
    spec: PuzzleSpec,
    *,
    restarts: int,
    noise: float | None,
    max_iterations: int,
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Solve every board from every start.

    Returns:
        Whether the answer is the solution (R, B), its residual (R, B), its doubt (R, B), which is the largest
        ``−log p`` of a cell's answer, the mean number of iterations, and the seconds per board and start.

    """
    solved, residuals, doubts, counted, began = [], [], [], [], time.perf_counter()
    for first in range(0, len(batch), BOARDS_AT_ONCE):
        part = batch.rows(first, first + BOARDS_AT_ONCE)
        columns = []
        for index in range(restarts):
            variant, options = part, {}
            if index and noise is None:
                variant = symmetric_variant(part, spec, index)
            elif index and noise is not None:
                options = {"start": noisy_start(model, part, noise, seed=index + first * 1009)}
            output = model(variant.inputs, max_iterations=max_iterations, **options)
            assert output.solution is not None
            right_B = (output.logits.argmax(-1) == variant.labels).all(1)
            doubt_B = -output.logits.log_softmax(-1).amax(-1).amin(1)
            columns.append((right_B.cpu(), output.solution.residual.double().cpu(), doubt_B.cpu()))
            counted.append(output.solution.iterations.double().mean().item())
        solved.append(torch.stack([column[0] for column in columns]))
        residuals.append(torch.stack([column[1] for column in columns]))
        doubts.append(torch.stack([column[2] for column in columns]))
    seconds = (time.perf_counter() - began) / (restarts * len(batch))
    mean = sum(counted) / len(counted)
    return torch.cat(solved, 1), torch.cat(residuals, 1), torch.cat(doubts, 1), mean, seconds


def noisy_start(model: ImplicitLM, batch: Batch, noise: float, *, seed: int) -> Tensor:
    """Return normal noise (B, L, W) of this standard deviation, as a start of the search."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch.inputs.shape, model.spec.core_width)
    return noise * torch.randn(shape, generator=generator).to(batch.inputs.device)


def symmetric_variant(batch: Batch, spec: PuzzleSpec, number: int) -> Batch:
    """Return the mazes turned or mirrored, by one of the eight symmetries of the square."""
    squares = torch.tensor(maze.symmetry(math.isqrt(spec.cells), number), device=batch.inputs.device)
    contents = batch.inputs % spec.values
    names = batch.inputs - contents  # of the squares, where the tokens name them
    return Batch(inputs=contents[:, squares] + names, labels=batch.labels[:, squares])


def chosen_share(solved_RB: Tensor, measure_RB: Tensor) -> float:
    """Return the share of boards whose answer of lowest measure is the solution; NaN counts as highest."""
    best_B = measure_RB.nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
    return float(solved_RB.gather(0, best_B).double().mean())


def _powers(most: int) -> list[int]:
    """Return the powers of two below a number, and the number."""
    return [*(2**k for k in range(most.bit_length()) if 2**k < most), most]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as an aligned text table."""
    restarts = list(rows[0]["solved"])
    lines = [
        "at most  iterations  converged  " + "".join(f"{f'surest of {r}':>14}" for r in restarts) + "    any"
    ]
    for row in rows:
        shares = "".join(f"{share:14.1%}" for share in row["solved"].values())
        lines.append(
            f"{row['max_iterations']:7d}  {row['mean_iterations']:10.1f}  {row['converged']:9.1%}  {shares}"
            f"{row['solved_by_any']:7.1%}"
        )
    return "\n".join(lines)
