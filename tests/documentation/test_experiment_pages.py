"""The tables of the experiments' pages equal the results, and the commands of the results are still valid."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from implicit_blocks.specs import load_spec
from tests.documentation.tables import percent, results, table
from trainer.experiments.word_problem.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
OURS = ("trainer", "trainer.experiments")


# -------------------------------------------------------------------------------- commands


def texts(found: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every command in JSON, with its key."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from texts(value, name)
    elif isinstance(found, list):
        for value in found:
            yield from texts(value, key)
    elif isinstance(found, str) and found.startswith("python -m trainer"):
        yield key, found


def commands(path: Path) -> list[list[str]]:
    """Return the words of the commands in a file, without placeholders."""
    found = []
    for key, text in texts(json.loads(path.read_text(encoding="utf-8"))):
        for command in re.sub(r", and .*", "", text).split("; "):
            words = [word for word in shlex.split(command) if word not in {"SETTINGS", "CHANGES", "OPTIONS"}]
            words = words[:-1] if words[-1] == "--set" else words
            if key != "note" and words[2] in OURS:
                found.append([{"NAME": "books_10m", "SPEC": "books_5m_mamba2"}.get(w, w) for w in words])
    return found


@pytest.fixture(scope="module")
def examples() -> Any:
    spec = importlib.util.spec_from_file_location("documentation_commands", ROOT / "tools/docs/examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check(examples: Any, words: list[str], place: str) -> None:
    """Parse a command of this repository, and load its specs with their overrides."""
    options = examples._parsed(SimpleNamespace(place=place), words[1:])
    changes = list(getattr(options, "set", None) or getattr(options, "overrides", None) or [])
    specs = getattr(options, "specs", None) or [getattr(options, "spec", None)]
    if getattr(options, "experiment", None) == "word-problem":
        specs = [SETTINGS[options.study, options.setting].spec]
    for spec in specs:
        if spec is not None and not str(spec).endswith(".yaml") and "acme" not in str(spec):
            load_spec(spec, changes)


@pytest.mark.parametrize("path", [path for path in RESULTS if commands(path)], ids=lambda path: path.stem)
def test_commands_of_results_are_valid(path: Path, examples: Any) -> None:
    """The options, specs and overrides of the command of a figure exist."""
    for words in commands(path):
        check(examples, words, path.name)


@pytest.mark.parametrize(
    "page", ["word-problems", "catbabi", "language", "duality", "solvers", "experiments"]
)
def test_overrides_on_pages_are_valid(page: str, examples: Any) -> None:
    for block in examples.blocks(ROOT / "docs" / f"{page}.md"):
        if block.language == "sh":
            for words in examples.commands(block):
                if words[1:2] == ["-m"] and words[2] in OURS:
                    check(examples, words, block.place)


# -------------------------------------------------------------------------------- tables


def test_word_problems_table_of_the_minimum_number_of_layers() -> None:
    runs = results("word_problem_layers")["runs"]
    for layers, *cells in table("word-problems", "layers | 2 tokens"):
        kind = "implicit-mamba2" if layers.startswith("implicit") else "mamba2"
        count = int(layers.split()[-1])
        for length, cell in zip((2, 4, 8, 16, 32), cells, strict=True):
            found = [
                row[f"p 0, length {length}"]
                for row in runs
                if (row["model"], row["layers"], row["length"]) == (kind, count, length)
            ]
            assert cell == (percent(*found).replace("100.0 %", "100 %") if found else ""), (layers, length)


def test_word_problems_table_of_rare_hard_tokens() -> None:
    tests = results("word_problem_hard_tokens")["tests"]
    for p, *cells in table("word-problems", "iterations in training"):
        asked = [(n, 1200) for n in (1, 2, 4, 8, 16, 32)] + [(8, 4800)]
        for (iterations, steps), cell in zip(asked, cells, strict=True):
            found = {
                row["seed"]: row["accuracy_last"]
                for row in tests
                if (row["training_iterations"], row["steps"], row["mode"], row["identity_probability"])
                == (iterations, steps, "simultaneous", float(p.removeprefix("p = ")))
            }
            assert cell == percent(*(found[seed] for seed in sorted(found))), (p, iterations, steps)


def test_word_problems_tables_of_one_run() -> None:
    rows = results("word_problem_long")["rows"]
    phases = [
        (row["seed"], phase)
        for row in rows
        for phase in row["phases"]
        if phase["name"] in ("mixed", "stable")
    ]
    shown = table("word-problems", "seed | phase")
    for (seed, phase), cells in zip(phases, shown, strict=True):
        bursts = percent(phase["non_converged_in_those"], digits=0) if phase["steps_over_10_percent"] else ""
        assert cells == [
            str(seed),
            phase["name"],
            str(phase["steps"]),
            percent(phase["non_converged"]),
            str(phase["steps_over_10_percent"]),
            bursts,
            percent(phase["accuracy_at_the_end"], digits=2),
        ]
    for row, (seed, *cells) in zip(
        rows, table("word-problems", "seed | p = 0.5, length 256 | p"), strict=True
    ):
        found = {(t["identity_probability"], t["length"]): t["accuracy_last"] for t in row["tests"]}
        asked = ((0.5, 256), (0.5, 1024), (0.0, 256), (0.0, 1024), (0.9, 1024))
        assert (seed, cells) == (str(row["seed"]), [percent(found[at]) for at in asked])
    continued = results("word_problem_long")["continued"]["rows"]
    for row, cells in zip(continued, table("word-problems", "seed | further steps"), strict=True):
        found = {(t["identity_probability"], t["length"]): t for t in row["tests"]}
        last = [
            percent(found[p, 1024]["accuracy_last"]) if (p, 1024) in found else "" for p in (0.5, 0.0, 0.9)
        ]
        assert cells == [
            str(row["seed"]),
            str(row["steps"]),
            f"{row['minutes']:.1f}",
            percent(row["phases"][-1]["accuracy_at_the_end"], digits=2),
            percent(max(phase["non_converged"] for phase in row["phases"])),
            last[0],
            percent(found[0.5, 1024]["non_converged"]),
            *last[1:],
        ]


def test_word_problems_table_of_one_run_from_scratch() -> None:
    rows = results("word_problem_long")["one_run"]["rows"]
    for row, cells in zip(rows, table("word-problems", "seed | steps of 2,800"), strict=True):
        phases = {phase["name"]: phase for phase in row["phases"]}
        later = [phase for name, phase in phases.items() if name not in ("of 4", "rare", "mixed")]
        tests = {test["identity_probability"]: test for test in row["tests"]}
        assert all((test["length"], test["sequences"]) == (1024, 512) for test in row["tests"])
        assert cells == [
            str(row["seed"]),
            str(row["steps"]),
            f"{row['minutes']:.1f}",
            percent(phases["mixed"]["non_converged"]),
            percent(max(phase["non_converged"] for phase in later)),
            percent(phases["long 1"]["accuracy_at_the_end"]),
            *(percent(tests[p]["accuracy_last"]) if tests else "" for p in (0.5, 0.0)),
            percent(max(test["non_converged"] for test in tests.values())) if tests else "",
        ]


def test_word_problems_table_of_s5_in_one_run() -> None:
    rows = results("word_problem_long")["s5"]["rows"]
    for row, cells in zip(rows, table("word-problems", "seed | minutes | not converged"), strict=True):
        phases = {phase["name"]: phase for phase in row["phases"]}
        tests = {(test["identity_probability"], test["length"]): test for test in row["tests"]}
        assert all((test["sequences"], test["non_converged"]) == (1024, 0) for test in row["tests"])
        assert cells == [
            str(row["seed"]),
            f"{row['minutes']:.1f}",
            *(percent(phases[name]["non_converged"]) for name in ("mixed", "stable")),
            *(
                percent(tests[p, length]["accuracy_last"], digits=2)
                for p in (0.5, 0.0)
                for length in (32, 128)
            ),
        ]


def test_word_problems_table_of_s5_in_windows() -> None:
    found = results("word_problem_long")
    rows = [
        (loss, row)
        for loss, kind in (("`until_error`", "s5_long"), ("`last`", "s5_long_all_tokens"))
        for row in found[kind]["rows"]
    ]
    for (loss, row), cells in zip(rows, table("word-problems", "loss | seed | minutes"), strict=True):
        phases = {phase["name"]: phase for phase in row["phases"]}
        tests = {(test["identity_probability"], test["length"]): test for test in row["tests"]}
        assert row["steps"] == row["of_steps"]
        assert cells == [
            loss,
            str(row["seed"]),
            f"{row['training_minutes']:.1f}",
            *(
                percent(phases[name]["accuracy_at_the_end"], digits=2)
                for name in ("stable", "of 64", "of 128")
            ),
            percent(max(tests[p, 512]["non_converged"] for p in (0.5, 0.0))),
            *(percent(tests[p, 512]["accuracy_last"], digits=2) for p in (0.5, 0.0)),
        ]


def test_word_problems_table_of_losses_until_an_error() -> None:
    rows = results("word_problem_until_error")["rows"]
    for row, cells in zip(rows, table("word-problems", "loss of the last phase | seed"), strict=True):
        spans = ("before", "of_first_5_steps", "of_steps_16_to_25", "of_last_20_steps")
        assert cells == [
            f"`{row['objective']}`",
            str(row["seed"]),
            *(percent(row[f"accuracy_{span}"]) for span in spans),
            percent(row["test"]["accuracy_last"]),
        ]


def test_word_problems_table_of_explicit_models() -> None:
    """Each row is a chain of three recipes in one run of the benchmark."""
    chains: dict[tuple[int, float], dict[str, dict[str, float]]] = {}
    for run in results("word_problems")["runs"]:
        if run.get("arguments", {}).get("explicit_steps") != 1.0 or not run["arguments"].get("then"):
            continue
        for row in run["rows"]:
            if row["model"] == "mamba2":
                found = {
                    f"p{test['identity_probability']:g} L{test['length']}": test["accuracy_last"]
                    for test in row["tests"]
                }
                chains.setdefault((row["layers"], row["learning_rate"]), {}).setdefault(row["recipe"], found)
    rows = table("word-problems", "layers | learning rate")
    assert len(rows) == len(chains)
    for layers, rate, *cells in rows:
        chain = chains[int(layers), float(rate)]
        last = chain["word_problem_a5_256"]
        assert cells == [
            percent(found)
            for found in (
                chain["word_problem_a5"]["p0.5 L32"],
                chain["word_problem_a5_mixed"]["p0.9 L128"],
                *(last[at] for at in ("p0.9 L256", "p0.5 L256", "p0.9 L1024", "p0.5 L1024")),
            )
        ]


def test_the_jacobian_table_equals_the_results() -> None:
    rows = results("jacobian")["rows"]
    for name, *cells in table("jacobian", "model, seed, step sizes"):
        kind = name.split(",")[0]
        asked = {
            "seed 1": "--seed 1",
            "seed 2": "--seed 2",
            "0.1 to 0.5": "--dt 0.1 0.5",
            "0.5 to 2": "--dt 0.5 2",
        }
        options = next((option for part, option in asked.items() if part in name), "")
        of_kind = [
            row for row in rows if row["model"] == kind and (kind == "explicit" or row["options"] == options)
        ]
        columns = (
            "formula_against_autograd",
            "formula_against_differences",
            "largest_entry",
            "largest_off_diagonal_entry",
            "off_diagonal_mass",
            "rank",
            "feedback_rank",
        )
        for column, cell in zip(columns, cells, strict=True):
            least, most = (f(row[column] for row in of_kind) for f in (min, max))
            ends = [float(text) for text in re.findall(r"[\d.]+(?:e-?\d+)?", cell)]
            assert ends[-1] == pytest.approx(most, rel=0.06), (name, column)
            assert len(ends) == 1 or ends[0] == pytest.approx(least, rel=0.2), (name, column)
    implicit = [row for row in rows if row["model"] == "implicit"]
    assert max(row["formula_against_autograd"] for row in implicit) <= 1e-6
    assert max(row["formula_against_differences"] for row in implicit) <= 1e-5


def numbers(cell: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", cell)]


def near(cell: str, wanted: list[float]) -> bool:
    """Return whether a cell has these numbers at its precision; one may stand for several equal ones."""
    message = numbers(cell.split(" %")[0])
    message *= len(wanted) if len(message) == 1 else 1
    digits = max(len(text.partition(".")[2]) for text in re.findall(r"\d+\.?\d*", cell))
    return message == pytest.approx(wanted, abs=0.501 * 0.1**digits)


@pytest.mark.parametrize(
    ("head", "implicit", "name"),
    [("10 M, implicit", "books_10m_mamba2", "books_own_rates"), ("implicit, 15", "books_5m", "language")],
)
def test_the_language_tables_by_length_equal_the_results(head: str, implicit: str, name: str) -> None:
    """In both tables the row of an implicit model precedes the row of its explicit twin."""
    lines = (ROOT / "docs" / "language.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head}"))
    twins = results(name)["twins"]
    for offset, kind in enumerate((implicit, f"{implicit}-explicit")):
        runs = [row for row in twins if re.fullmatch(rf"{kind}-\d", row["run"])]
        cells = [cell.strip().replace("**", "") for cell in lines[start + offset].strip("|").split("|")]
        assert cells[1] == f"{runs[0]['parameters'] / 1e6:.1f} M"
        assert near(cells[2], [row["PFLOP executed"] for row in runs]) or name == "language"
        for length, cell in zip((512, 1024, 2048, 4096), cells[3:], strict=True):
            found = [
                row[f"perplexity at {length}"]
                if name == "language"
                else next(one["perplexity"] for one in row["lengths"] if one["length"] == length)
                for row in runs
            ]
            assert near(cell, found), (kind, length)


def test_language_table_of_learning_rates() -> None:
    runs = results("books_rates")["runs_compared"]
    for rate, implicit, explicit, normed, lead, iterations in table("language", "learning rate | implicit"):
        value = rate.split(",")[0]
        found = {}
        for key, spec, more in (
            ("implicit", "books_5m_mamba2", ""),
            ("explicit", "books_5m_mamba2_explicit", ""),
            ("normed", "books_5m_mamba2_explicit", " model.weight_norm=true"),
        ):
            settings = f"training.optimizer.learning_rate={value}{more}"
            found[key] = [
                row
                for row in runs
                if row["spec"] == spec and row["settings"].removesuffix(" training.seed=1") == settings
            ]
        for key, cell in (("implicit", implicit), ("explicit", explicit), ("normed", normed)):
            assert near(cell, [row["perplexity"] for row in found[key]]) if cell else not found[key], key
        pairs = zip(found["implicit"], found["explicit"], strict=True)
        assert near(lead, [100 * (1 - one["perplexity"] / other["perplexity"]) for one, other in pairs])
        assert near(iterations, [row["iterations"] for row in found["implicit"]])


def test_the_duality_table_equals_the_results() -> None:
    """The table has the equal tokens at two tolerances, and the perplexities of both twins."""
    own, once, lower = results("books_own_rates"), results("books_once"), results("duality")
    for name, loose, tight, perplexity in table("duality", "| tokens on which"):
        size = name.split(",")[0].replace(" M", "m")
        penalty = "_penalty" if "penalty" in name else ""
        kind = f"books_{size}_mamba2{penalty}"
        rows = lower[kind]["tolerances"] if penalty else own["duality"][kind]
        for tolerance, cell in ((0.05, loose), (0.01, tight)):
            found = [row for row in rows if row["tolerance"] == tolerance]
            assert near(cell, [100 * row["equal_tokens"] for row in found]), (kind, tolerance)
        twins = (once if penalty else own)["twins"]
        for part, which in zip(perplexity.split(" / "), (kind, f"{kind}-explicit"), strict=True):
            runs = [row for row in twins if re.fullmatch(rf"{which}-\d", row["run"])]
            assert near(part, [row["lengths"][0]["perplexity"] for row in runs]), which


def config_of(label: str) -> str:
    """Return the name in the results of the search configuration in a row of a page."""
    label = re.sub(r" \(.*\)$", "", label)
    label = "damping 0.8, token by token, warm" if label == "token by token, warm start" else label
    return re.sub(r"^damping (0\.\d), ", r"Picard \1, ", label)


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        (
            "to 1e-3, scope prefix",
            [
                ("s3", "prefix", key)
                for key in ("iterations_mean", "iterations_max", "calls", "work", "logit_error")
            ],
        ),
        (
            "to 1e-3 | scope prefix",
            [
                ("a5", scope, key)
                for scope in ("prefix", "sequence")
                for key in ("iterations_mean", "seconds", "converged")
            ],
        ),
        (
            "to 1e-3 | Mamba2",
            [
                *(("mamba2", "prefix", key) for key in ("iterations_mean", "work", "seconds")),
                *(("mamba2", "sequence", key) for key in ("iterations_mean", "seconds")),
                *(("attention", "prefix", key) for key in ("iterations_mean", "work", "converged")),
            ],
        ),
    ],
    ids=["S3", "A5", "language"],
)
def test_the_solvers_tables_equal_the_results(head: str, columns: list[tuple[str, str, str]]) -> None:
    models = results("solvers")["models"]
    runs = {
        "s3": ("word_problem_s3", 64),
        "a5": ("word_problem_a5_256", 128),
        "mamba2": ("books_5m_mamba2", 128),
        "attention": ("books, attention", 64),
    }
    for label, *cells in table("solvers", head):
        for (model, scope, key), cell in zip(columns, cells, strict=True):
            start, length = runs[model]
            (of_model,) = [one for one in models if one["run"].startswith(start) and one["length"] == length]
            rows = [
                row[key] * (100 if key == "converged" else 1)
                for row in of_model["rows"]
                if (row["config"], row["scope"], row["tolerance"]) == (config_of(label), scope, 1e-3)
            ]
            assert near(cell, rows) if rows else not cell, (label, model, scope, key)
