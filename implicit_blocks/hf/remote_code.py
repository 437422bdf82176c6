"""The file with which ``trust_remote_code=True`` imports this package, or says how to install it."""

from __future__ import annotations

from pathlib import Path

SHIM = "implicit_blocks_shim"

_SOURCE = '''\
"""Imports this model's classes from the package implicit_blocks."""

try:
    from implicit_blocks.hf import {stem}Config, {stem}ForCausalLM, {stem}Model
except ImportError as error:
    raise ImportError(
        "this model needs the package implicit_blocks with transformers 5.17 or newer: "
        "pip install -c constraints.txt -e '.[hf]' in a clone of its repository"
    ) from error

__all__ = ["{stem}Config", "{stem}ForCausalLM", "{stem}Model"]
'''


def auto_map(stem: str) -> dict[str, str]:
    """Return the class of the shim for each Auto class."""
    return {
        "AutoConfig": f"{SHIM}.{stem}Config",
        "AutoModel": f"{SHIM}.{stem}Model",
        "AutoModelForCausalLM": f"{SHIM}.{stem}ForCausalLM",
    }


def write_shim(folder: Path, stem: str) -> None:
    """Write the shim to a folder of weights."""
    (folder / f"{SHIM}.py").write_text(_SOURCE.format(stem=stem), encoding="utf-8")
