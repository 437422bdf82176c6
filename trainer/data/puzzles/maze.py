"""Mazes with a unique shortest path. Imports no torch.

A maze is a square grid in reading order: `OPEN`, `WALL`, `START` and `GOAL`; in a solution the squares on the
shortest path between start and goal are `PATH`. Steps go up, down, left and right.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

from trainer.data.puzzles.sudoku import BoardError, Puzzle

WALL, OPEN, START, GOAL, PATH = range(5)
SYMBOLS = "# SGo"
"""The symbols of published files, by value."""


def _neighbors(square: int, side: int, step: int = 1) -> list[int]:
    row, column = divmod(square, side)
    near = ((row - step, column), (row + step, column), (row, column - step), (row, column + step))
    return [r * side + c for r, c in near if 0 <= r < side and 0 <= c < side]


def _distances(maze: Sequence[int], side: int, start: int) -> tuple[list[int], list[int]]:
    """Return each square's distance from the start, −1 if unreachable, and its number of shortest paths."""
    distance, paths = [-1] * len(maze), [0] * len(maze)
    distance[start], paths[start] = 0, 1
    queue = deque([start])
    while queue:
        square = queue.popleft()
        for near in _neighbors(square, side):
            if maze[near] == WALL:
                continue
            if distance[near] < 0:
                distance[near] = distance[square] + 1
                queue.append(near)
            if distance[near] == distance[square] + 1:
                paths[near] += paths[square]
    return distance, paths


def solve(maze: Sequence[int]) -> Puzzle:
    """Find the shortest path of a maze. `Puzzle.guesses` is its number of steps.

    Raises:
        BoardError: not a square grid, a wrong value, not exactly one start and one goal, no path, or several
            shortest ones.

    """
    side = math.isqrt(len(maze))
    if side * side != len(maze) or not maze:
        raise BoardError(f"a maze is a square grid, which {len(maze)} squares cannot form")
    for square, value in enumerate(maze):
        if not WALL <= value <= GOAL:
            row, column = divmod(square, side)
            raise BoardError(f"row {row + 1}, column {column + 1} is {value}; use 0 to {GOAL}")
    for value, name in ((START, "start"), (GOAL, "goal")):
        if (count := list(maze).count(value)) != 1:
            raise BoardError(f"the maze has {count} squares of the {name}; mark exactly one")
    start, goal = list(maze).index(START), list(maze).index(GOAL)
    distance, paths = _distances(maze, side, start)
    if distance[goal] < 0:
        raise BoardError("no path leads from the start to the goal; remove walls")
    if paths[goal] > 1:
        raise BoardError(f"the maze has {paths[goal]} shortest paths; add walls until there is one")
    solution, square = list(maze), goal
    while distance[square] > 1:
        square = next(n for n in _neighbors(square, side) if distance[n] == distance[square] - 1)
        solution[square] = PATH
    return Puzzle(tuple(maze), tuple(solution), distance[goal])


def random_maze(side: int, rng: random.Random, *, openings: float, shortest: int) -> Puzzle:
    """Draw a maze: a random tree of corridors, in which some further walls are opened.

    Args:
        side: rows and columns, at least 4.
        rng: source of random numbers.
        openings: share of the walls between two corridors that are opened, which makes loops.
        shortest: least number of steps from start to goal.

    Raises:
        ValueError: no such maze was found in 1,000 attempts.

    """
    for _ in range(1000):
        maze = _corridors(side, rng, openings)
        squares = [square for square, value in enumerate(maze) if value == OPEN]
        start = rng.choice(squares)
        distance, paths = _distances(maze, side, start)
        goals = [s for s in squares if distance[s] >= max(2, shortest) and paths[s] == 1]
        if goals:
            maze[start], maze[rng.choice(goals)] = START, GOAL
            return solve(maze)
    raise ValueError(
        f"no maze of side {side} with a unique shortest path of {shortest} steps in 1,000 attempts; "
        "lower data.shortest_path or data.openings"
    )


def _corridors(side: int, rng: random.Random, openings: float) -> list[int]:
    """Carve a random spanning tree by a depth-first walk over every second square, then open walls."""
    maze = [WALL] * (side * side)
    offset = (side + 1) % 2 * rng.randrange(2) * (side + 1)  # sides that are even leave one line of walls
    maze[offset] = OPEN
    walk = [offset]
    while walk:
        ahead = [n for n in _neighbors(walk[-1], side, step=2) if maze[n] == WALL]
        if not ahead:
            walk.pop()
            continue
        chosen = rng.choice(ahead)
        maze[(walk[-1] + chosen) // 2] = maze[chosen] = OPEN
        walk.append(chosen)
    for square in range(side * side):
        row, column = divmod(square, side)
        between = (square - 1, square + 1) if 0 < column < side - 1 else ()
        beside = (square - side, square + side) if 0 < row < side - 1 else ()
        pairs = [pair for pair in (between, beside) if pair and all(maze[s] == OPEN for s in pair)]
        if maze[square] == WALL and len(pairs) == 1 and rng.random() < openings:
            maze[square] = OPEN
    return maze


def symmetry(side: int, number: int) -> list[int]:
    """Return the sources of the squares under one of the eight symmetries of the square."""
    squares = [[row * side + column for column in range(side)] for row in range(side)]
    for _ in range(number % 4):
        squares = [list(line) for line in zip(*squares[::-1], strict=True)]
    if number >= 4:
        squares = [line[::-1] for line in squares]
    return [square for line in squares for square in line]
