"""What tests of the pages on equal compute share: the pages, result files and numbers as text."""

import json
import runpy
from pathlib import Path
from typing import Any

from trainer.experiments.equal_compute.tables import at_fixed_point

ROOT = Path(__file__).resolve().parents[2]
SEEDS = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_seeds.py"))
PARTS = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_parts.py"))


def words(page: str) -> str:
    """Return the text of a file of the repository with single spaces between its words."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


MAIN, TABLES, LAST = (words(f"docs/equal_compute{name}.md") for name in ("", "_tables", "_last_weights"))
PAGE = f"{MAIN} {TABLES}"
"""The page with the answer and the page with the tables of all comparisons."""


def read(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"equal_compute_{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return found


def percent(value: float, digits: int = 1, *, sign: bool = True) -> str:
    return f"{value * 100:{'+' if sign else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def below(found: dict[str, Any]) -> str:
    return percent(-found["difference"], sign=False)


def interval(found: dict[str, Any]) -> str:
    """Return the 95 % interval of a difference."""
    low, high = map(percent, found["interval"])
    return f"{low} to {high} %"


def ends(shares: list[float], digits: int = 1) -> str:
    """Return the smallest and the largest share, in percent."""
    return " to ".join(percent(end, digits, sign=False) for end in (min(shares), max(shares)))


def choice(runs: list[dict[str, Any]]) -> float:
    mean: float = SEEDS["mean_perplexity"](runs, "choice")
    return mean


def on_choice(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs with the perplexity on the text of the choice in the place of the reported one."""
    return [{**run, "report": run["choice"]} for run in runs]


Runs = list[dict[str, Any]]


def _kind(recipe: Any) -> str:
    return f" w{recipe.width}" if recipe.side == "explicit" else " stages" if recipe.loops == 4 else ""


def models(half: dict[str, Any], *parts: str) -> dict[str, Runs]:
    """Return the reported runs of parts by side, layers, stages and, of explicit models, width and gates."""
    return {
        f"{recipe.side} {sum(recipe.layers)}{_kind(recipe)}"
        f"{' gates' if recipe.side == 'explicit' and recipe.changes else ''}": rows
        for recipe, rows in half["several_seeds"](*parts)
    }


def implicit(half: dict[str, Any], part: str) -> Runs:
    """Return the reported runs of the implicit recipe that the text of the choice prefers."""
    found = (rows for recipe, rows in half["several_seeds"](part) if recipe.side == "implicit")
    best: Runs = min(found, key=choice)
    return best


def at_rate(half: dict[str, Any], rate: float, *parts: str) -> dict[tuple[str, int, int], Runs]:
    """Return the reported runs with a learning rate by side, layers and loops."""
    return {
        (recipe.side, sum(recipe.layers), recipe.loops): rows
        for recipe, rows in half["several_seeds"](*parts)
        if recipe.learning_rate == rate
    }


def converged(runs: Runs) -> list[float]:
    return [point[1] for point in map(at_fixed_point, runs) if point is not None]


def chosen_by_seed_0(
    half: dict[str, Any], *parts: str
) -> dict[tuple[str, int, int], dict[tuple[float, float], dict[str, Any]]]:
    """Return the best runs of seed 0 by side, layers and loops, and by learning rate and weight decay.

    Those of the family that the first part is of.
    """
    family = half["read"](parts[0])[0]["recipe"]["family"]
    found: dict[tuple[str, int, int], dict[tuple[float, float], dict[str, Any]]] = {}
    for part in parts:
        for run in half["choosing"](half["read"](part)):
            recipe = run["recipe"]
            if recipe["family"] != family:
                continue
            key = (run["side"], sum(recipe["layers"]), recipe["loops"])
            point, runs = (recipe["learning_rate"], recipe["weight_decay"]), found.setdefault(key, {})
            if point not in runs or run["choice"] < runs[point]["choice"]:
                runs[point] = run
    return found


def best(grid: dict[tuple[float, float], dict[str, Any]]) -> tuple[float, float]:
    return min(grid, key=lambda point: grid[point]["choice"])
