"""Links in the texts point to existing files and headings. The tests use no network."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"zoo.md", "benchmarks.md"}  # written by the build, like reference/
TEXTS = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]
    if path.is_file()
]


def prose(text: str) -> str:
    """Return a text without its fenced blocks and code spans."""
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(text: str) -> list[str]:
    """Return the targets of a text's links and pictures."""
    inline = re.findall(r"\]\(<?([^()\s>]+(?:\([^()]*\))?)>?(?:\s+\"[^\"]*\")?\)", prose(text))
    return inline + re.findall(r"^\[[^\]]+\]:\s+(\S+)", prose(text), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors that the headings of a text generate."""
    plain = re.sub(r"^( *)(```+).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    found: Counter[str] = Counter()
    made = set(re.findall(r"\{[^}]*#([\w-]+)[^}]*\}", plain)) | set(re.findall(r"id=\"([\w-]+)\"", plain))
    for heading in re.findall(r"^#+ +(.+?) *#*$", plain, flags=re.MULTILINE):
        words = re.sub(r"\{[^}]*\}|[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
        slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))
        made |= {slug if not found[slug] else f"{slug}-{found[slug]}", re.sub(r"-+", "-", slug)}
        found[slug] += 1
    return made


def broken(path: Path) -> list[str]:
    """Return the links of a text without a target."""
    text, docs = path.read_text(encoding="utf-8"), ROOT / "docs"
    wrong = []
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme not in {"http", "https", "mailto"} or (
                parts.scheme != "mailto" and not parts.netloc
            ):
                wrong.append(link)
            continue
        target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
        if path.is_relative_to(docs) and target.is_relative_to(docs):
            place = target.relative_to(docs)
            if str(place) in GENERATED or place.parts[:1] == ("reference",):
                continue  # tested with the built site
        if not target.exists() or (
            parts.fragment
            and target.suffix == ".md"
            and parts.fragment not in anchors(target.read_text("utf-8"))
        ):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_text_have_a_target(path):
    assert broken(path) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `code` heading, here\n\n## Twice\n\n## Twice\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#a-code-heading-here) [b](#here) [c](other.md#twice-1) ![d](none.png)\n"
        "[e](other.md#nowhere) [f](gone.md) [g](https:///x) `[h](code.md)`\n"
        "```md\n[i](fence.md)\n```\n[j]: lost.md\n",
        encoding="utf-8",
    )
    assert broken(page) == ["none.png", "other.md#nowhere", "gone.md", "https:///x", "lost.md"]
