"""The documentation builds without warnings and network; its links, names and tables are complete."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import implicit_blocks as ib

ROOT = Path(__file__).resolve().parents[2]

OFFLINE = """
import socket, sys
from material.plugins.search.plugin import SearchIndex

SearchIndex.add_entry_from_context = lambda self, page: None
sys.modules |= {"black": None, "ruff.__main__": None}

def refuse(*arguments, **options):
    raise OSError("the build used the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli()
"""
"""Builds without a network and without the search index, which is not read here.

Signatures are not wrapped, which would start a formatter for each.
"""


class Page(HTMLParser):
    """The links, resources and anchors of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.resources: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and "href" in values:
            self.resources.add(values["href"])
        elif "src" in values:
            self.resources.add(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, python: Any) -> Path:
    """Build the documentation with warnings as errors and without a network."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra `docs` brings it")
    folder = tmp_path_factory.mktemp("site")
    done = python.run(
        ["-c", OFFLINE, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        environment={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return every page of the site."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_links_and_anchors_of_the_site_have_a_target(site, pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served at any address, so its links start at the root
        for link in sorted(page.links | page.resources):
            parts = urlsplit(link)
            if parts.scheme in {"http", "https", "mailto", "data", "javascript"}:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if not target.is_file() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_fences_of_the_pages_are_rendered(pages):
    shown = [path.name for path in pages if re.search(r"```\w|needs=&quot;", path.read_text("utf-8"))]
    assert not shown


def test_the_site_loads_nothing_from_the_network(site, pages):
    fetched = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.resources
        if urlsplit(link).netloc
    ]
    assert not fetched
    styles = [
        path for path in site.rglob("*.css") if re.search(r"url\([\"']?https?:", path.read_text("utf-8"))
    ]
    assert not styles


def test_the_reference_has_every_public_name(pages, site):
    index = pages[site / "reference" / "index.html"]
    for name in ib.__all__:
        targets = [link for link in index.links if re.search(rf"#implicit_blocks(\.\w+)+\.{name}$", link)]
        assert targets, name


def test_the_reference_has_the_modules_that_examples_and_plugins_import(site):
    sources = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    pattern = r"^\s*from (implicit_blocks\.[\w.]+) import"
    used = {m for path in sources for m in re.findall(pattern, path.read_text("utf-8"), flags=re.MULTILINE)}
    assert len(used) > 10
    pages = {path.stem for path in (site / "reference").glob("*.html")}
    homes = {page.rpartition(".")[0] for page in pages}  # packages of which modules are imported
    assert sorted(used - pages - homes) == []


def test_the_index_of_the_reference_describes_every_name(site):
    text = (site / "reference" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", text, flags=re.DOTALL)
    assert len(rows) >= len(ib.__all__)
    assert [name for name, message in rows if not message.strip()] == []


def test_the_page_of_the_zoo_has_every_spec(site):
    text = (site / "zoo.html").read_text(encoding="utf-8")
    for path in (ROOT / "zoo").glob("*.yaml"):
        assert f"<code>{path.stem}</code>" in text, path.stem
    assert "125\u202f4" in text  # llama_130m has 125.4 M parameters, counted from its spec


def test_the_page_of_raw_measurements_has_every_result_with_its_date(site):
    text = (site / "benchmarks.html").read_text(encoding="utf-8")
    results = list((ROOT / "benchmarks" / "results").glob("*.json"))
    sections = re.split(r"<h2 ", text)[1:]
    assert len(sections) == len(results)
    for section in sections:
        assert re.search(r"Date: \d{4}-\d\d-\d\d", section), section[:80]
        assert "<table>" in section, section[:80]
        assert "Versions: " in section, section[:80]


def page_of(folder: Path, found: object) -> str:
    """Return the page of raw measurements for a folder with one result."""
    spec = importlib.util.spec_from_file_location(
        "benchmark_page", ROOT / "tools" / "docs" / "benchmark_page.py"
    )
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    (folder / "results").mkdir()
    (folder / "results" / "a.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / "a.py").write_text('"""A program."""\n', encoding="utf-8")
    return page.page(folder)


def test_a_long_table_is_truncated_and_shows_shared_values_once(tmp_path):
    command = "python -m trainer.experiments word-problem --setting gpu"
    rows = [{"seed": seed, "group": "A5", "accuracy": seed / 100} for seed in range(40)]
    inner = {"note": "the same on " + "other " * 10 + "text", "rows": rows, "curves": rows[:3]}
    made = page_of(tmp_path, {"date": "2026-01-01", "command": command, "runs_of": inner, "few": rows[:2]})
    assert f"\n- Command: `{command}`\n" in made
    assert "**runs of · rows**, first 24 of 40 rows\n\nIn all rows: group A5\n\n| seed | accuracy |" in made
    assert "\n- Runs of: note: the same on other" in made
    assert made.count("the same on other") == 1
    assert made.count("| 23 | 0.23 |") == 1
    assert "| 24 |" not in made
    assert "| 0 | A5 | 0 |" in made  # two rows repeat shared values


def test_brackets_in_results_are_escaped(tmp_path):
    failures = {"tests/test_a.py::test_scan[fla] [call]": "the first line\nand | the second"}
    made = page_of(tmp_path, {"machine": {"torch": "2"}, "date": "2026-01-01", "failures": failures})
    assert "\\[fla] \\[call]" in made
    assert "the first line and \\| the second" in made


def test_the_table_of_the_zoo_has_the_steps_of_wrapped_gradients(site):
    text = (site / "zoo.html").read_text(encoding="utf-8").partition("<table>")[2].partition("</table>")[0]
    assert "free: 24 + 4 with jacobian_penalty to step" in text
    assert "?" not in text


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("n_layers: 4, prelude: {n_layers: 1}", "| (1 + 4 + 0) \u00d7 64 |"),
        (
            "n_layers: 4, depth: {kind: fixed, loops: 6}, gradient: {kind: last_loops, loops: 2}",
            "train: 6 loops, the last 2 with gradients to step 1\u202f000",
        ),
        ("depth: {kind: fixed, loops: 6}, gradient: {kind: last_loops}", "6 loops, all with gradients"),
        ("depth: {kind: fixed, loops: 6}", "6 loops, phantom"),
    ],
)
def test_the_table_of_the_zoo_names_stacks_and_loops(monkeypatch, tmp_path, model, expected):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    text = f"# A model.\nextends: word_problem_s3\nphases: []\nmodel: {{{model}}}\n"
    text += "training: {max_steps: 1000}\n"
    (tmp_path / "composed_5m.yaml").write_text(text, encoding="utf-8")
    assert expected in importlib.import_module("zoo_table").page(tmp_path)
