"""The page of measurements: the files of ``benchmarks/results`` as tables, and where each is from.

The programs write what suits them. Here every list of objects is a table, and so is an object of objects (its
keys are the first column); what an object holds besides stands in front of the rows of the tables within it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HEAD = """# Measurements

Made from the files in `benchmarks/results`, which the programs in `benchmarks` write. Each says when, on
what and with which versions it was measured; figures from different machines don't compare. What they came
to is told on the pages of the [experiments](experiments.md) and in the README. Long tables are cut: the
files hold all rows.
"""
MOST = 24
"""Rows of a table that are shown."""
LONGEST = 40
"""Characters of a key that heads a column; longer ones, such as tests' names, are the first column's."""
ABOUT = ("machine", "date", "versions", "arguments", "note", "load_average_at_start", "nccl")


def page(folder: Path) -> str:
    """Return the page of the results in a folder of benchmarks."""
    sections = [HEAD]
    for path in sorted((folder / "results").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        sections += [f"## {path.stem.replace('_', ' ')}", _program(folder, path.stem)]
        sections += [section for run in _runs(content) for section in _run(run)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _program(folder: Path, name: str) -> str:
    """Say which program wrote a result, and what it measures."""
    programs = [
        path
        for path in folder.glob("*.py")
        if name == path.stem or (name.startswith(path.stem) and path.stem != "report")
    ]
    if not programs:
        return ""
    program = max(programs, key=lambda path: len(path.stem))
    docstring = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return f"{' '.join(docstring.split(chr(10) * 2)[0].split())} (`python benchmarks/{program.name}`)"


def _runs(content: Row) -> list[Row]:
    """Return the runs that a file holds: one, or those of its list ``runs``.

    Where ``runs`` are by date, the file is what all of them came to, and the last is shown.
    """
    runs = content.get("runs")
    if isinstance(runs, Mapping) and runs:
        last = max(runs)
        others = {} if len(runs) == 1 else {"earlier runs": ", ".join(sorted(runs)[:-1])}
        return [{**content, "runs": others, "date": last, **runs[last]}]
    if not isinstance(runs, list):
        return [content]
    shared = {key: value for key, value in content.items() if key != "runs"}
    return [{**shared, **run} for run in runs]


def _run(run: Row) -> list[str]:
    about = {key: run[key] for key in ABOUT if key in run}
    rest = {key: value for key, value in run.items() if key not in ABOUT}
    made: list[tuple[str, list[Row]]] = []
    alone = _collect(rest, name="", before={}, tables=made)
    sections = [_about(about)]
    shown_already: set[str] = set()
    if made:  # long texts are no cells where there is another table
        texts = {k: v for k, v in alone.items() if isinstance(v, str) and len(v) > LONGEST}
        alone = {key: value for key, value in alone.items() if key not in texts}
        sections[0] += "".join(
            f"\n- {_text(k.replace('_', ' ')).capitalize()}: {_text(v)}" for k, v in texts.items()
        )
        shown_already |= set(texts.values())
    if alone:
        sections.append(_table([alone], shown_already))
    for name, rows in _merged(made):
        cut = f", {MOST} of {len(rows)} rows" if len(rows) > MOST else ""
        sections.append(f"**{name.replace('_', ' ')}**{cut}\n\n{_table(rows, shown_already)}")
    return sections


def _about(about: Row) -> str:
    """Return date, machine, versions and arguments as a list."""
    machine = dict(about.get("machine", {}))
    packages = ("python", "torch", "transformers", "cuda", "triton", "mamba_ssm", "causal_conv1d")
    versions = {name: machine.pop(name) for name in packages if name in machine}
    versions |= about.get("versions", {})
    date = about.get("date") or machine.pop("date", "not recorded")
    machine.pop("date", None)
    gpu = machine.pop("gpu", None)
    lines = [f"- Date: {str(date)[:10]}"]
    lines += [f"- GPU: {gpu}"] if gpu else []
    lines += [f"- Machine: {_listed(machine)}"] if machine else []
    lines += [f"- Versions: {_listed(versions)}"] if versions else []
    given = {k: v for k, v in about.get("arguments", {}).items() if v not in (None, [], False)}
    lines += [f"- Arguments: {_listed(given)}"] if given else []
    lines += [f"- NCCL: {_listed(about['nccl'])}"] if about.get("nccl") else []
    lines += [f"- Note: {about['note']}"] if about.get("note") else []
    return "\n".join(lines)


def _collect(found: Mapping[str, Any], *, name: str, before: Row, tables: list[tuple[str, list[Row]]]) -> Row:
    """Return what an object holds of its own, flat; the tables within it are added to ``tables``."""
    own: Row = {}
    within: list[tuple[str, list[Row]]] = []
    for key, value in found.items():
        rows = _rows(key, value)
        if rows is not None:
            within.append((f"{name}{' · ' if name else ''}{key}", rows))
        elif isinstance(value, Mapping):
            nested = _collect(value, name=f"{name}{' · ' if name else ''}{key}", before=before, tables=tables)
            own |= {f"{key}: {inner}": entry for inner, entry in nested.items()}
        else:
            own[key] = value
    for title, rows in within:
        leading = {**before, **{k: v for k, v in own.items() if ":" not in k}} if name else before
        made = [
            {**leading, **_collect(row, name=title, before={**leading, **_key(row)}, tables=tables)}
            for row in rows
        ]
        if any(set(row) - set(leading) for row in made):
            tables.append((title, made))
    return own


def _key(row: Row) -> Row:
    """Return what tells a row from its neighbors in the tables within it: what it begins with, and texts."""
    plain = {k: v for k, v in row.items() if isinstance(v, str | int) and not isinstance(v, bool)}
    first = next(iter(plain), None)
    return {k: v for k, v in plain.items() if k == first or isinstance(v, str) or len(k) == 1}


def _rows(key: str, value: Any) -> list[Row] | None:
    """Return the rows of a value that is a table, or None."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return value
    if (
        isinstance(value, dict)
        and len(value) > 1
        and all(isinstance(entry, dict) for entry in value.values())
    ):
        return [{key: inner, **entry} for inner, entry in value.items()]
    if isinstance(value, dict) and any(len(inner) > LONGEST for inner in value):
        return [{"": inner, key: entry} for inner, entry in value.items()]
    if isinstance(value, list) and any(isinstance(entry, str) and len(entry) > LONGEST for entry in value):
        return [{key: entry} for entry in value]
    return None


def _merged(tables: Sequence[tuple[str, list[Row]]]) -> list[tuple[str, list[Row]]]:
    """Put the rows of tables of the same name together, outer tables first."""
    merged: dict[str, list[Row]] = {}
    for name, rows in tables:
        merged.setdefault(name, []).extend(rows)
    return sorted(merged.items(), key=lambda table: table[0].count(" · "))


def _table(rows: Sequence[Row], shown_already: set[str]) -> str:
    """Return rows as a table; what is the same in all of several is told above it, a long text once."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    several = len(rows) > 2
    same = [c for c in columns if several and all(c in row and row[c] == rows[0][c] for row in rows)]
    same = [] if len(same) == len(columns) else same
    shared = {c: rows[0][c] for c in same if rows[0][c] not in (None, "", [], {}, *shown_already)}
    shown_already |= {value for value in shared.values() if isinstance(value, str) and len(value) > LONGEST}
    above = f"In all rows: {_listed(shared)}\n\n" if shared else ""
    columns = [column for column in columns if column not in same]
    head = "| " + " | ".join(_text(column.replace("_", " ")) for column in columns) + " |"
    line = "|" + " --- |" * len(columns)
    shown = rows[:MOST]
    body = ["| " + " | ".join(_text(row.get(column, "")) for column in columns) + " |" for row in shown]
    return above + "\n".join([head, line, *body])


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_text(key.replace('_', ' '))} {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", "\u202f")
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f") if abs(value) >= 10000 else str(value)
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return _listed(value)
    line = " ".join(str(value).split())  # a table's row is one line
    if line.startswith("python ") and not {"|", "`"} & set(line):
        return f"`{line}`"
    # A test's name with its parameters in brackets is no link.
    return line.replace("|", "\\|").replace("[", "\\[")
