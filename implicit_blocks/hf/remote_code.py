"""What a saved folder needs, so that ``trust_remote_code=True`` finds the package or says how to get it."""

from __future__ import annotations

from pathlib import Path

SHIM = "implicit_blocks_shim"

_SOURCE = '''\
"""Finds this model's classes in the package implicit_blocks; nothing of the model is defined here."""

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
    """Return which class of the shim stands for which Auto class."""
    return {
        "AutoConfig": f"{SHIM}.{stem}Config",
        "AutoModel": f"{SHIM}.{stem}Model",
        "AutoModelForCausalLM": f"{SHIM}.{stem}ForCausalLM",
    }


def write_shim(folder: Path, stem: str) -> None:
    """Write the shim into a folder of weights."""
    (folder / f"{SHIM}.py").write_text(_SOURCE.format(stem=stem), encoding="utf-8")
