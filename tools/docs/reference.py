"""The API reference: a page for each public module, its names documented by their docstrings.

Apart from the packages with lazily imported names (`LAZY`), whose import needs no optional package, modules
are parsed, not imported, so that the reference does not depend on the installed optional packages.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

LAZY = (
    "implicit_blocks",
    "implicit_blocks.specs",
    "implicit_blocks.solvers",
    "implicit_blocks.gradients",
    "implicit_blocks.exits",
    "implicit_blocks.mixers",
    "implicit_blocks.injections",
    "implicit_blocks.starts",
    "implicit_blocks.depths",
    "implicit_blocks.scalings",
)
"""Packages whose names are imported on first use: from a stub, or from what they register."""

LIBRARY = {
    "implicit_blocks.fixed_point": "Fixed points of any map",
    "implicit_blocks.interfaces": "Interfaces",
    "implicit_blocks.solution": "Solutions",
    "implicit_blocks.windows": "Windows",
    "implicit_blocks.models.implicit": "Implicit language models",
    "implicit_blocks.models.explicit": "Explicit language models",
    "implicit_blocks.models.parts": "Methods of language models",
    "implicit_blocks.models.training": "Methods for training",
    "implicit_blocks.models.outputs": "Outputs of language models",
    "implicit_blocks.search.search": "The search",
    "implicit_blocks.search.convergence_watch": "Convergence warnings",
    "implicit_blocks.search.loops": "Loops",
    "implicit_blocks.search.windowed": "The search in windows",
    "implicit_blocks.search.options": "Search options",
    "implicit_blocks.search.iteration_budget": "Iteration budgets",
    "implicit_blocks.search.agreement": "Agreement between ranks",
    "implicit_blocks.solvers": "Solvers",
    "implicit_blocks.gradients": "Gradients",
    "implicit_blocks.exits": "Exit criteria",
    "implicit_blocks.exits.exit": "Interface of exit criteria",
    "implicit_blocks.mixers": "Mixers",
    "implicit_blocks.injections": "Injections",
    "implicit_blocks.starts": "Initial states",
    "implicit_blocks.depths": "Depths",
    "implicit_blocks.scalings": "Residual scalings",
    "implicit_blocks.mlps": "MLPs",
    "implicit_blocks.layers": "Layers",
    "implicit_blocks.mixers.slots": "Slot states",
    "implicit_blocks.mixers.short_conv": "Short convolution",
    "implicit_blocks._utils.padding": "Padding",
    "implicit_blocks.specs": "Specs",
    "implicit_blocks.models.implicit_spec": "Spec of the implicit model",
    "implicit_blocks.models.specs": "Specs of models and stacks",
    "implicit_blocks.models.retrofit": "Retrofitting",
    "implicit_blocks.models.objective_specs": "Specs of objectives",
    "implicit_blocks.models.objectives": "Objectives",
    "implicit_blocks.models.counting": "Parameter and FLOP counts",
    "implicit_blocks.checkpoints.load_model": "Loading trained models",
    "implicit_blocks.registry": "Registry",
    "implicit_blocks.registry.hooks": "Plugin hook",
    "implicit_blocks.registry.api_version": "Versions of the plugin interface",
    "implicit_blocks.registry.contracts": "Contracts",
    "implicit_blocks.testing": "Conformance kit",
    "implicit_blocks.decoding": "Decoding",
    "implicit_blocks.serving.inspection": "Reports of searches",
    "implicit_blocks.hf.architectures": "Published looped architectures",
    "implicit_blocks.analysis": "Analysis",
    "implicit_blocks.ops.backends": "Backends and transformations",
    "implicit_blocks.ops.accelerated": "Optional packages",
    "implicit_blocks.ops.ssd": "The scan",
    "implicit_blocks.ops.causal_conv": "The convolution",
    "implicit_blocks.ops.attention": "Attention",
    "implicit_blocks.ops.rotary": "Rotary positions",
    "implicit_blocks.hf": "transformers",
    "implicit_blocks.hf.published": "The published implementation",
}
TRAINER = {
    "trainer.specs.run": "Specs of runs",
    "trainer.specs.evaluation_tasks": "Specs of evaluation tasks",
    "trainer.data.source": "Data sources",
    "trainer.optim.schedules": "Schedules",
    "trainer.optim.optimizers": "Optimizers",
    "trainer.callbacks": "Callbacks",
    "trainer.evaluation.tasks": "Evaluation tasks",
}


def navigation() -> list[Any]:
    """Return the navigation entries of the reference."""
    return [
        "reference/index.md",
        {"Library": [{title: f"reference/{module}.md"} for module, title in LIBRARY.items()]},
        {"Trainer": [{title: f"reference/{module}.md"} for module, title in TRAINER.items()]},
    ]


def pages(root: Path) -> dict[str, str]:
    """Return the text of every page of the reference, by path."""
    texts = {f"reference/{m}.md": _module_page(root, m, t) for m, t in {**LIBRARY, **TRAINER}.items()}
    return {"reference/index.md": _index(root), **texts}


def _index(root: Path) -> str:
    homes = {name: m for m in LIBRARY for name in public_names(root, m)}
    rows = "\n".join(
        f"| [`{name}`][{homes[name]}.{name}] | {_summary(root, homes[name], name)} |"
        for name in public_names(root, "implicit_blocks")
    )
    modules = "\n".join(
        f"| [`{module}`]({module}.md) | {_first_line(_docstring(root, module))} |"
        for module in {**LIBRARY, **TRAINER}
    )
    return (
        "# API reference\n\n"
        "The public names: `import implicit_blocks as ib`, then `ib.NAME`.\n\n"
        f"| name | description |\n| --- | --- |\n{rows}\n\n## Modules\n\n"
        f"| module | description |\n| --- | --- |\n{modules}\n"
    )


def _module_page(root: Path, module: str, title: str) -> str:
    parts = [f"# {title}\n\n`{module}`\n", _docstring(root, module)]
    parts += [f"::: {module}.{name}" for name in public_names(root, module)]
    return "\n\n".join(parts) + "\n"


def public_names(root: Path, module: str) -> list[str]:
    """Return what a module exports: ``__all__``, or the public names that it defines."""
    if module in LAZY:
        return _names_of_lazy(root, module)
    body = _parse(root, module).body
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return [name for node in body for name in _defined(node) if not name.startswith("_")]


def _names_of_lazy(root: Path, module: str) -> list[str]:
    """Return a lazy package's names; of `implicit_blocks.specs` only those without another page."""
    sys.path.insert(0, str(root))
    try:
        imported = import_module(module)
    finally:
        sys.path.remove(str(root))
    names: list[str] = imported.__all__
    if module != "implicit_blocks.specs":
        return names
    return [name for name in names if getattr(imported, name).__module__.startswith(f"{module}.")]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        names = (part for target in node.targets for part in ast.walk(target))
        return [part.id for part in names if isinstance(part, ast.Name)]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def _summary(root: Path, module: str, name: str) -> str:
    """Return the first line of a name's docstring, found where the name is defined."""
    for node in ast.walk(_parse(root, module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _first_line(ast.get_docstring(node) or "")
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            assert node.module is not None
            return _summary(root, node.module, name)
    statements = _parse(root, module).body
    for node, after in pairwise(statements):  # a constant's docstring follows it
        if name in _defined(node) and isinstance(after, ast.Expr):
            return _first_line(inspect.cleandoc(str(ast.literal_eval(after.value))))
    return ""


def _first_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def _docstring(root: Path, module: str) -> str:
    return ast.get_docstring(_parse(root, module)) or ""


def _parse(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    stub = file.with_suffix(".pyi")
    return ast.parse(text + (stub.read_text(encoding="utf-8") if stub.is_file() else ""))
