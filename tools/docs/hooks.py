"""Hooks of mkdocs: generate the pages of the code, the zoo and the benchmarks during the build."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]


def _sibling(name: str) -> ModuleType:
    """Import a file in this folder; mkdocs loads hooks as single files, not as a package."""
    spec = importlib.util.spec_from_file_location(
        f"documentation_{name}", Path(__file__).parent / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


reference, zoo_table, architecture_table, benchmark_page, notebooks = map(
    _sibling, ("reference", "zoo_table", "architecture_table", "benchmark_page", "notebooks")
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the reference to the navigation."""
    assert config.nav is not None
    config.nav.append({"API reference": reference.navigation()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "zoo.md": zoo_table.page(ROOT / "zoo") + architecture_table.section(),
        "benchmarks.md": benchmark_page.page(ROOT / "benchmarks"),
        **notebooks.pages(ROOT / "docs"),
        **reference.pages(ROOT),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Remove the settings of fences for the tests (see examples.py); the renderer accepts titles only."""
    return re.sub(r'^( *```[^`\n]*?) needs="[^"\n]*"', r"\1", markdown, flags=re.MULTILINE)
