"""What tests of the pages on equal compute share: the pages, result files and numbers as text."""

import json
import runpy
from pathlib import Path
from typing import Any

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
