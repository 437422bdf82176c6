"""Fixtures for specs and plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks import registry

Install = Callable[..., Path]


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load plugins again, without the third-party plugins of this environment."""
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with registry.isolated():
        yield registry


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions of one module each, `install(name, source)`; call it before any lookup.

    With `zoo`, files by name, the module is a package with a directory ``zoo``.
    """
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    names: list[str] = []

    def put(name: str, source: str, *, version: str = "1.2.3", zoo: Mapping[str, str] | None = None) -> Path:
        if zoo is None:
            (folder / f"{name}_module.py").write_text(source)
        else:
            package = folder / f"{name}_module"
            (package / "zoo").mkdir(parents=True)
            (package / "__init__.py").write_text(source)
            for file, text in zoo.items():
                (package / "zoo" / file).write_text(text)
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[implicit_blocks]\n{name} = {name}_module\n")
        names.append(name)
        monkeypatch.setenv(registry.PLUGINS_VARIABLE, ",".join(names))
        return folder

    with registry.isolated():
        yield put


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a file to a directory that becomes the working directory; return its name."""
    folder = tmp_path / "specs"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def put(name: str, text: str) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return put
