"""Writing a new plugin from the templates: all files, or none."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from implicit_blocks.registry.hooks import API_VERSION
from implicit_blocks.registry.scaffold.names import PluginNames, choose_names

_SUFFIX = ".template"
_EXAMPLES = {
    "mixer": "mixer: {kind: @NAME@, expand: 1}",
    "solver": "solver: {kind: @NAME@, momentum: 0.2}",
    "gradient": "gradient: {kind: @NAME@, terms: 4}",
}


def create_plugin(name: str, *, family: str, directory: str | os.PathLike[str] | None = None) -> Path:
    """Write an installable plugin that passes its own tests and trains from YAML, as a starting point.

    Args:
        name: a lower-case identifier, the kind that the plugin provides. Its distribution is named
            ``implicit-blocks-…``, its package ``implicit_blocks_…``.
        family: ``mixer``, ``solver`` or ``gradient``.
        directory: directory to write, new or empty; by default ``./NAME``.

    Returns:
        The directory.

    Raises:
        ValueError: an invalid or taken name, or a directory that is not empty or cannot be written; nothing
            is written then.

    """
    names = choose_names(name, family)
    texts = render(names)
    target = Path(name if directory is None else directory).absolute()
    _check_empty(target)
    try:
        _write(texts, target)
    except OSError as error:
        raise ValueError(
            f"cannot write {os.fspath(target)!r}: {error.strerror or error}; give another --directory"
        ) from error
    return target


def render(names: PluginNames) -> dict[str, str]:
    """Return the text of every file by its path in the plugin's directory.

    Raises:
        ValueError: the generated code uses the name for something else.

    """
    root = files("implicit_blocks.registry.scaffold") / "templates"
    templates = dict(_walk(root / "common")) | dict(_walk(root / names.family))
    _refuse_reserved(names, templates)
    values = {
        "EXAMPLE": _EXAMPLES[names.family],
        "NAME": names.name,
        "FAMILY": names.family,
        "CLASS": names.class_name,
        "MODULE": names.module,
        "DISTRIBUTION": names.distribution,
        "BUILDER": names.class_name + ("" if names.family == "mixer" else ".from_spec"),
        "API": API_VERSION,
        "LIBRARY": _library_version(),
    }

    def fill(text: str) -> str:
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        return text

    def path(template: str) -> str:
        parts = template.removesuffix(_SUFFIX).replace("NAME", names.name).replace("MODULE", names.module)
        return ".gitignore" if parts == "gitignore" else parts

    return {path(template): fill(text) for template, text in sorted(templates.items())}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")


def _refuse_reserved(names: PluginNames, templates: dict[str, str]) -> None:
    """Reject a name whose class would shadow a class that the code uses, such as ``Mixer`` or ``Window``."""
    code = " ".join(text for path, text in templates.items() if path.endswith(".py" + _SUFFIX))
    words = set(re.findall(r"(?<!@)\b\w+\b(?!@)", code))
    for used in (names.class_name, f"{names.class_name}Spec"):
        if used in words:
            raise ValueError(
                f"the plugin name {names.name!r} is reserved: its class would be named {used!r}, like a "
                f"class of the library; choose another, such as 'my_{names.name}'"
            )


def _check_empty(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{os.fspath(target)!r} is a file; give a new or empty directory")
    try:
        existing = sorted(path.name for path in target.iterdir()) if target.exists() else []
    except OSError as error:
        raise ValueError(
            f"cannot read {os.fspath(target)!r}: {error.strerror}; give another --directory"
        ) from error
    if existing:
        shown = ", ".join(existing[:3]) + (", …" if len(existing) > 3 else "")
        raise ValueError(
            f"the directory {os.fspath(target)!r} is not empty (it contains {shown}); "
            "give a new or empty one, --directory DIRECTORY"
        )


def _write(texts: dict[str, str], target: Path) -> None:
    """Write to a temporary directory and move, so that an interruption leaves no partial plugin."""
    new_folders = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-plugin-", dir=target) as staging:
            for path, text in texts.items():
                file = Path(staging, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", newline="\n")
            moved: list[Path] = []
            try:
                for entry in sorted(Path(staging).iterdir()):
                    os.replace(entry, target / entry.name)
                    moved.append(target / entry.name)
            except BaseException:
                for entry in moved:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                raise
    except BaseException:
        for folder in new_folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _library_version() -> str:
    """Return major and minor version of the library, the minimum that a new plugin requires."""
    try:
        return ".".join(version("implicit_blocks").split(".")[:2])
    except PackageNotFoundError:
        return "0.1"
