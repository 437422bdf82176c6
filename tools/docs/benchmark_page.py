"""The page of raw measurements: the files of ``benchmarks/results`` as tables, with their origin.

The programs choose the structure of their files. This page shows every list of objects as a table, and every
object of objects too, with its keys in the first column. Other values of an object are added to the rows of
the tables within it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HEAD = """# Raw measurements

This page shows the files in `benchmarks/results`, which the programs in `benchmarks` write. Each section has
the date, the hardware and the versions; do not compare figures from different machines. [Results](results.md)
and the pages of the [experiments](experiments.md) summarize them. Long tables are truncated; the files have
all rows.
"""
MOST = 24
"""Maximum number of rows shown per table."""
LONGEST = 40
"""Maximum length of a column header; longer keys, such as names of tests, go into the first column."""
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
    """Return the name of the program that wrote a result, and the first line of its docstring."""
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
    """Return the runs in a file: one, or those of its list ``runs``.

    If ``runs`` is a mapping by date, the file combines all of them, and the last run is shown.
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
    nested: list[tuple[str, list[Row]]] = []
    alone = _collect(rest, name="", before={}, tables=nested)
    sections = [_about(about)]
    shown_already: set[str] = set()
    if nested:  # long texts go into the list if there is another table
        texts = {k: v for k, v in alone.items() if isinstance(v, str) and len(v) > LONGEST}
        alone = {key: value for key, value in alone.items() if key not in texts}
        sections[0] += "".join(
            f"\n- {_text(k.replace('_', ' ')).capitalize()}: {_text(v)}" for k, v in texts.items()
        )
        shown_already |= set(texts.values())
    if alone:
        sections.append(_table([alone], shown_already))
    for name, rows in _merged(nested):
        cut = f", first {MOST} of {len(rows)} rows" if len(rows) > MOST else ""
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
    """Return the values of an object, flattened; add the tables within it to ``tables``."""
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
        cells = [
            {**leading, **_collect(row, name=title, before={**leading, **_key(row)}, tables=tables)}
            for row in rows
        ]
        if any(set(row) - set(leading) for row in cells):
            tables.append((title, cells))
    return own


def _key(row: Row) -> Row:
    """Return the values that identify a row in the tables within it: the first value, and texts."""
    plain = {k: v for k, v in row.items() if isinstance(v, str | int) and not isinstance(v, bool)}
    first = next(iter(plain), None)
    return {k: v for k, v in plain.items() if k == first or isinstance(v, str) or len(k) == 1}


def _rows(key: str, value: Any) -> list[Row] | None:
    """Return the rows of a value that is a table; otherwise None."""
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
    """Merge the rows of tables with the same name, outer tables first."""
    merged: dict[str, list[Row]] = {}
    for name, rows in tables:
        merged.setdefault(name, []).extend(rows)
    return sorted(merged.items(), key=lambda table: table[0].count(" · "))


def _table(rows: Sequence[Row], shown_already: set[str]) -> str:
    """Return rows as a table; values that all rows share come above it, each long text only once."""
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
    line = " ".join(str(value).split())  # a row of a table is one line
    if line.startswith("python ") and not {"|", "`"} & set(line):
        return f"`{line}`"
    # Escape brackets: the name of a test with parameters is not a link.
    return line.replace("|", "\\|").replace("[", "\\[")
