"""The command of the fair comparison: what it refuses, what it marks, and grids that it widens."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer import tokenize
from trainer.experiments.cli import main
from trainer.storage.files import read_json, write_json

SMALL = [
    "--setting", "laptop", "--learning-rates", "4e-3", "--weight-decays", "0.5", "1", "--shares", "1",
    "--average", "0.5", "--petaflops", "4e-6", "--seeds", "1", "2", "--sequences", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tokens, books, and the output of the command with finished runs."""
    folder = tmp_path_factory.mktemp("equal")
    draw = random.Random(0)
    for name, words in (("text", 1500), ("other", 500)):
        lines = "\n".join(draw.choice(("once", "upon", "a", "time")) for _ in range(words))
        (folder / f"{name}.txt").write_text(lines)
        more = ["--validation-fraction", "0.2"] if name == "text" else []
        given = [str(folder / f"{name}.txt"), "--tokenizer", "bytes", *more, "--workers", "1"]
        assert tokenize.main([*given, "--output", str(folder / name)]) == 0
    assert command(folder) == 0
    return folder


def command(folder: Path, *more: str) -> int:
    """Run the command in this folder and return its exit code."""
    given = ["equal-compute", "--data", str(folder / "text"), "--report", str(folder / "other"), *SMALL]
    return main([*given, "--output", str(folder / "out"), "--device", "cpu", *more])


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, which a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def change(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of the results of the runs whose name contains this."""
    paths = [path for path in (folder / "out" / "runs").glob("*.json") if name in path.name]
    assert paths
    for path in paths:
        write_json(path, {**read_json(path), **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": {"tokens": 5}}, "different text; train both sides on the same tokens"),
        ({"windows": {"report": 7}}, "different windows; evaluate both on the same sequences"),
        ({"flops": 4.5e9}, "more FLOPs than"),
        ({"parameters": 200_000}, "more parameters than"),
    ],
    ids=["text", "windows", "flops", "parameters"],
)
def test_sides_that_differ_are_refused(copied, capsys, fields, named):
    change(copied, "implicit", **fields)
    before = (copied / "out" / "equal_compute.json").read_bytes()
    assert command(copied, "--only-finished") == 2
    assert named in capsys.readouterr().err
    assert (copied / "out" / "equal_compute.json").read_bytes() == before


def test_early_ends_missing_runs_and_lack_of_convergence_are_marked(copied, capsys):
    implicit = list((copied / "out" / "runs").glob("*implicit*_s1.json"))
    assert len(implicit) == 1
    row = read_json(implicit[0])
    for kind in ("measured", "averaged"):
        for point in row[kind]["fixed_point"]:
            point["token_converged"] = 0.5
    left = (row["steps"] - 1) / row["steps"]
    write_json(implicit[0], {**row, "steps": row["steps"] - 1, "flops": row["flops"] * left})
    chosen = read_json(copied / "out" / "equal_compute.json")["comparisons"][0]["sides"]["explicit"]["recipe"]
    other = next(value for value in (0.5, 1.0) if value != chosen["weight_decay"])
    (missing,) = (copied / "out" / "runs").glob(f"*explicit*wd{other:g}_*_s0.json")
    missing.unlink()
    assert command(copied, "--only-finished") == 0
    said = capsys.readouterr().out
    assert "! explicit: not tuned over the whole grid: 1 runs are missing" in said
    assert f"! implicit: {row['name']}: ended early" in said
    assert f"! implicit: {row['name']}: did not converge (50.0% of the tokens)" in said
    stored = read_json(copied / "out" / "equal_compute.json")["runs"]
    assert [run["name"] for run in stored if "ended early" in " ".join(run["marks"])] == [row["name"]]


def test_a_best_value_at_the_edge_is_reported_and_the_grid_widened_on_both_sides(copied, capsys):
    # The lowest weight decay is best on the text of the choice, on one side alone.
    for path in (copied / "out" / "runs").glob("*explicit*_wd0.5_*_s0.json"):
        row = read_json(path)
        row["measured"]["choice"]["loss"] = 0.001
        write_json(path, row)
    assert command(copied) == 0
    assert "! explicit: the best value is the lowest weight decay; widen the grid" in capsys.readouterr().out
    assert command(copied, "--widen", "1") == 0
    written = read_json(copied / "out" / "equal_compute.json")
    assert (written["widened"], written["grid"]["weight_decays"][0]) == (1, 0.25)
    tuned = [
        {run["recipe"]["weight_decay"] for run in written["runs"] if run["name"] in side["tuned"]}
        for side in written["comparisons"][0]["sides"].values()
    ]
    assert tuned[0] == tuned[1] >= {0.25, 0.5, 1.0}
