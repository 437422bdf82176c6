"""The page of the zoo: a table of its specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_blocks.describing.equations import loops_of
from implicit_blocks.gradients import LastLoopsSpec
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, load_spec

HEAD = """# The zoo

This page lists the specs that can be used by name. `python -m trainer --spec NAME` trains a spec,
`implicit_blocks.load_spec("NAME")` loads it, `python -m implicit_blocks describe NAME` shows it as a tree.
Override any field with `path.to.key=value`.

The column *layers* gives the layers of the core, or (prelude + core + coda). The column *search, by phase*
gives the name of each phase, its maximum number of iterations + gradient steps, and its last step; looped
models have a number of loops instead.

| spec | layers \u00d7 width | parameters | search, by phase | data | purpose |
| --- | --- | --- | --- | --- | --- |
"""


def page(folder: Path) -> str:
    """Return the page of the specs in a folder."""
    return HEAD + "\n".join(map(_row, sorted(folder.glob("*.yaml"), key=_order))) + "\n"


def purpose(path: Path) -> str:
    """Return the purpose of a spec: the comment in its first line."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    if not (first.startswith("# ") and first.endswith(".")):
        raise ValueError(f"{path.name} does not state its purpose; begin it with a sentence of one line")
    return first.removeprefix("# ")


def _row(path: Path) -> str:
    spec: Any = load_spec(path)
    model = spec.model
    counts = count_parameters(model)
    total = model.parameter_total() if counts is None else counts.total
    size = "" if counts is None else f"{_layers(model)} \u00d7 {model.d_model}"
    parameters = "not known" if total is None else f"{total:,}".replace(",", "\u202f")
    cells = [f"`{path.stem}`", size, parameters, _phases(spec), _data(spec.data), purpose(path)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _layers(model: LanguageModelSpec) -> str:
    """Return the layers of the core, with prelude and coda as "prelude + core + coda"."""
    stacks = model.stacks
    if len(stacks) == 1:
        return str(model.n_layers)
    numbers = (len(stacks[name].layers) if name in stacks else 0 for name in ("prelude", "core", "coda"))
    return f"({' + '.join(map(str, numbers))})"


def _phases(spec: Any) -> str:
    if not isinstance(spec.model, ImplicitLMSpec):
        return "none"
    return "; ".join(
        f"{phase.name}: {_search(phase.model)} to step " + f"{phase.last_step:,}".replace(",", "\u202f")
        for phase in spec.phase_specs()
    )


def _search(model: ImplicitLMSpec) -> str:
    """Return "iterations + steps"; for a gradient that wraps another one, the steps of the inner one."""
    gradient: Any = model.gradient
    added = ""
    loops = None if gradient.differentiates_solver else loops_of(model)
    if isinstance(gradient, LastLoopsSpec):
        last = "all" if gradient.loops is None else f"the last {gradient.loops}"
        return f"{loops}, {last} with gradients"
    if loops is not None:
        return f"{loops}, {gradient.kind}"
    while getattr(gradient, "steps", None) is None and hasattr(gradient, "gradient"):
        added += f" with {gradient.kind}"
        gradient = gradient.gradient
    steps = getattr(gradient, "steps", None)
    if steps is None:  # such as the implicit-function gradient, which solves another equation
        return f"{model.stopping.max_iterations} + {gradient.kind}{added}"
    return f"{model.stopping.max_iterations} + {steps}{added}"


def _data(data: Any) -> str:
    if data.kind == "word_problem":
        group = data.group if data.monoid is None else f"{data.group} \u00d7 {data.monoid}"
        return f"products in {group}, length {data.seq_len}"
    return f"{data.kind}, length {data.seq_len}"


def _order(path: Path) -> tuple[str, float, str]:
    """Sort by family, then size: 1.3b is more than 760m."""
    family, _, rest = path.stem.partition("_")
    digits = rest.split("_")[0]
    scale = {"b": 1000.0, "m": 1.0}.get(digits[-1:], 0.0)
    try:
        return family, float(digits[:-1]) * scale, path.stem
    except ValueError:
        return family, 0.0, path.stem
