"""The file with which ``trust_remote_code=True`` imports this package, or explains how to install it."""

from __future__ import annotations

import json
from pathlib import Path

SHIM = "implicit_blocks_shim"
AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}
"""The Auto classes of models, and what the names of their classes here end with."""

_SOURCE = '''\
"""Imports this model's classes from the package implicit_blocks."""

try:
    from implicit_blocks.hf import (
{imports}
    )
except ImportError as error:
    raise ImportError(
        "this model needs the package implicit_blocks with transformers 5.17 or newer: "
        "pip install -c constraints.txt -e '.[hf]' in a clone of its repository"
    ) from error

__all__ = {names}
'''


def auto_map(stem: str) -> dict[str, str]:
    """Return the class of the shim for each Auto class."""
    return {"AutoConfig": f"{SHIM}.{stem}Config"} | {
        auto_class: f"{SHIM}.{stem}{suffix}" for auto_class, suffix in AUTO_CLASSES.items()
    }


def write_shim(folder: Path, stem: str) -> None:
    """Write the shim to a folder of weights."""
    names = sorted(f"{stem}{suffix}" for suffix in ("Config", *AUTO_CLASSES.values()))
    imports = "\n".join(f"        {name}," for name in names)
    source = _SOURCE.format(imports=imports, names=json.dumps(names))
    (folder / f"{SHIM}.py").write_text(source, encoding="utf-8")
