"""The part of the zoo's page that compares architectures: one column for each, one row for each choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from implicit_blocks.specs import ImplicitLMSpec, Spec, load_spec

COLUMNS = {
    "Implicit LM": "llama_130m",
    "Attractor": "attractor_140m",
    "Parcae": "parcae_140m",
    "Huginn": "huginn_3.5b",
    "Ouro": "ouro_1.4b",
    "residual fixed point": "sandwich_llama_130m",
}
"""Architectures, and a spec of each; the settings of a run's last phase count."""

HEAD = """
## Architectures

Every architecture is a choice of the same fields. The table shows one spec of each;
`python -m implicit_blocks diff SPEC SPEC` shows the differences of any two. Sizes and recipes of published
models are those of their configurations, where public; the comment at the top of each file and of its base in
`zoo/base` separates published figures from ours.

"""

FOOT = """
- **Causality.** Attractor's published search mixes and stops over whole sequences: before convergence a token
  depends on later tokens and on the other sequences of the batch. `attractor_*` mix and stop per token;
  `attractor_*_published` have the published search, which warns when it is built.
- **Evaluation.** A fixed number of loops and one state per loop reproduce the published decoding of Parcae,
  Huginn and Ouro. The small `books_*` specs search for the fixed point instead, except Ouro's; comments in
  their files give the options for the loops of training.
- **Twins.** `books_*_explicit` and `sandwich_*_explicit` run the same layers once, with the same recipe. A
  fair comparison tunes the learning rate and the weight decay of both.
"""


def section() -> str:
    """Return the section: the table and its notes."""
    models: dict[str, Any] = {
        title: load_spec(name).phase_specs()[-1].model  # type: ignore[attr-defined]  # a run
        for title, name in COLUMNS.items()
    }
    lines = [
        _line("", [f"{title} (`{name}`)" for title, name in COLUMNS.items()]),
        _line("---", ["---"] * len(models)),
        *(_line(row, [cell(model) for model in models.values()]) for row, cell in ROWS.items()),
    ]
    return HEAD + "\n".join(lines) + "\n" + FOOT


def component(spec: Spec) -> str:
    """Return the kind of a component and those of its fields that differ from their defaults."""
    fields = type(spec).model_fields
    values = {name: getattr(spec, name) for name in fields if name != "kind"}
    changed = {name: value for name, value in values.items() if value != fields[name].default}
    details = ", ".join(f"{name} {_text(value)}" for name, value in changed.items())
    return f"`{getattr(spec, 'kind', '')}`" + (f" ({details})" if details else "")


def _text(value: Any) -> str:
    if isinstance(value, Spec):
        return component(value) if hasattr(value, "kind") else "set"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(head: str, cells: list[str]) -> str:
    return "| " + " | ".join([head, *cells]) + " |"


def _stacks(model: ImplicitLMSpec) -> str:
    numbers = {name: len(stack.layers) for name, stack in model.stacks.items()}
    return " / ".join(str(numbers.get(name, 0)) for name in ("prelude", "core", "coda"))


def _norms(model: ImplicitLMSpec) -> str:
    ends = {
        "after the prelude": model.prelude_norm,
        "ends the core": model.norm_in_core,
        "before the coda": model.norm_before_coda,
        "after the coda": model.final_norm,
    }
    return ", ".join([f"`{model.norm_placement}`", *(place for place, there in ends.items() if there)])


def _depth(model: ImplicitLMSpec) -> str:
    if model.depth.kind != "until_converged":
        return component(model.depth)
    until = f"to a residual of {model.stopping.tolerance:g}, at most {model.stopping.max_iterations}"
    return f"{until}; {component(model.solver)}"


def _evaluation(model: ImplicitLMSpec) -> str:
    if model.at_evaluation.fixed_loops:
        return component(model.at_evaluation.exit)
    at_evaluation, tolerance = model.at_evaluation, model.evaluation_stopping.tolerance
    return f"{component(at_evaluation.exit)} to {tolerance:g}; {component(at_evaluation.solver)}"


def _scaling(model: ImplicitLMSpec) -> str:
    return component(model.residual_scaling)


ROWS: Mapping[str, Callable[[Any], str]] = {
    "prelude / core / coda": _stacks,
    "`injection`": lambda model: component(model.injection),
    "`z_init`": lambda model: component(model.start),
    "norms": _norms,
    "`residual_scaling`": _scaling,
    "`weight_norm`": lambda model: str(model.weight_norm).lower(),
    "`mixer`": lambda model: component(model.core.layers[-1].mixer),
    "`mlp`": lambda model: component(model.core.layers[-1].mlp),
    "`depth`": _depth,
    "`gradient`": lambda model: component(model.gradient),
    "`objective`": lambda model: component(model.objective),
    "`at_evaluation.exit`": _evaluation,
    "`state_policy`": lambda model: f"`{model.state_policy}`",
}
"""Choices by row: how a cell is made of a model's spec."""
