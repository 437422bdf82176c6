"""Trees and tables for a terminal: in color if rich is installed, otherwise as plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TextIO

from implicit_blocks.describing.equations import loops_of
from implicit_blocks.describing.tree import Node, model_tree
from implicit_blocks.specs import BaseRunSpec, ImplicitLMSpec, ModelSpec, Stopping


class Span(NamedTuple):
    """A part of a line with its rich style."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
_TIMES = "×"  # noqa: RUF001  # the multiplication sign is intended
_OTHERS = "Δγα–"  # noqa: RUF001  # these letters and the dash of a range are intended
_ASCII = str.maketrans("├└│─↻←≤‖·θ—…²" + _TIMES + _OTHERS, "|`|-@=<|.t-.2xDga-")


def show(lines: Iterable[Line], *, stream: TextIO | None = None) -> None:
    """Print lines, in color if the stream is a terminal and rich is installed."""
    out = stream or sys.stdout
    if out.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass  # rich belongs to the `train` extra; the plain lines have the same content
        else:
            console = Console(file=out)
            for line in lines:
                text = Text.assemble(*((span.text, span.style) for span in line), no_wrap=True)
                text.rstrip()
                console.print(text, soft_wrap=True, highlight=False)
            return
    for line in lines:
        text_line = "".join(span.text for span in line).rstrip()
        try:
            text_line.encode(out.encoding or "utf-8")
        except UnicodeEncodeError:
            text_line = text_line.translate(_ASCII)
        print(text_line, file=out)


def draw_run(run: BaseRunSpec, *, name: str) -> list[Line]:
    """Draw the model of a run spec, its fixed-point search, and its training phases."""
    tree = model_tree(run.model)
    lines = _tree(tree, title=f"{name} · {run.model.kind}")
    if isinstance(run.model, ImplicitLMSpec):
        lines += [(), *_searches(run)]
    return lines


# ------------------------------------------------------------------------------------ the tree


class _Row(NamedTuple):
    glyphs: str
    name: str
    note: str
    signal: str
    shape: str
    parameters: str
    part: bool

    @property
    def length(self) -> int:
        """Length of glyphs, name and note."""
        return len(self.glyphs) + len(self.name) + (2 + len(self.note) if self.note else 0)


def _tree(root: Node, *, title: str) -> list[Line]:
    first = _Row("", title, root.note, root.signal, "parameters", f"{root.parameters:,}", True)
    rows = [first, *_rows(root.children, "")]
    # A part's note may extend into its empty columns.
    full = [row for row in rows if row.signal or row.shape]
    widths = [
        max(row.length for row in full) + 2,
        max(len(row.signal) for row in full) + 2,
        max(len(row.shape) for row in full),
        max(len(row.parameters) for row in rows) + 2,
    ]
    widths[1] += max(0, max(row.length for row in rows) - sum(widths[:3]))
    return [_line(row, widths) for row in rows]


def _rows(nodes: Sequence[Node], indent: str) -> list[_Row]:
    rows = []
    for number, node in enumerate(nodes, 1):
        last = number == len(nodes)
        name = f"{node.times} {_TIMES} {node.name}" if node.times > 1 else node.name
        name = f"↻ {name}" if node.iterated else name
        shape = f" {_TIMES} ".join(map(str, node.shape or ()))
        if node.times > 1:
            shape = f"{node.times} {_TIMES} {node.parameters // node.times:,}"
        if node.gains:
            shape += f" + {node.gains}"
        note = "g·v/‖v‖" if node.gains and not node.note else node.note
        count = f"{node.parameters:,}" if node.parameters else ""
        rows.append(
            _Row(
                f"{indent}{'└' if last else '├'}─ ", name, note, node.signal, shape, count, node.shape is None
            )
        )
        rows += _rows(node.children, f"{indent}{' ' if last else '│'}  ")
    return rows


def _line(row: _Row, widths: Sequence[int]) -> Line:
    left = (
        Span(row.glyphs, "dim"),
        Span(row.name, "bold cyan" if row.part else "cyan"),
        Span(f"  {row.note}" if row.note else "", "yellow" if row.part else "dim"),
    )
    parameters = Span(row.parameters.rjust(widths[3]), "bold" if row.part else "")
    if not (row.signal or row.shape):
        return (*left, Span(" " * (sum(widths[:3]) - row.length)), parameters)
    return (
        *left,
        Span(" " * (widths[0] - row.length)),
        Span(row.signal.ljust(widths[1]), "magenta"),
        Span(row.shape.rjust(widths[2]), "green" if row.glyphs else "bold"),
        parameters,
    )


# ------------------------------------------------------------------------------------ the search


def _searches(run: BaseRunSpec) -> list[Line]:
    phases = [(title, model) for title, model in phases_of(run) if isinstance(model, ImplicitLMSpec)]
    cells = [["search", "solver", "until", "gradient"]]
    cells += [_training(title, model) for title, model in phases]
    seen = {repr(_evaluation(model)) for _, model in phases}
    for (title, model), one in zip(reversed(phases), [True] + [False] * len(phases), strict=False):
        if one or len(seen) > 1:
            where = "evaluation" if one else f"evaluation in {title.partition(':')[0]}"
            cells.append([where, *_evaluation(model), "—"])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    styles = ("bold cyan", "yellow", "", "magenta")
    lines: list[Line] = [
        tuple(
            Span(cell.ljust(width + 2), "bold" if number == 0 else style)
            for cell, width, style in zip(row, widths, styles, strict=True)
        )
        for number, row in enumerate(cells)
    ]
    return [*lines, *_objectives(phases, widths[0] + 2)]


def _training(title: str, model: ImplicitLMSpec) -> list[str]:
    """Return the row of a phase: its solver, what ends the search or the loop, its gradient."""
    gradient, solver = component(model.gradient), component(model.solver)
    if model.gradient.differentiates_solver:  # unrolling takes its own steps
        return [title, solver, "the gradient's steps are taken", gradient]
    if (loops := loops_of(model)) is None:
        return [title, solver, _until(model.stopping), gradient]
    if model.depth.maximum_loops() != model.depth.expected_loops():
        loops += f" ({component(model.depth)})"
    return [title, solver if model.gradient.searches else "—", loops, gradient]


def _evaluation(model: ImplicitLMSpec) -> list[str]:
    """Return the solver of evaluation, and when a token leaves the search."""
    at_evaluation, stopping = model.at_evaluation, model.evaluation_stopping
    if at_evaluation.fixed_loops is not None:
        return ["—", f"{at_evaluation.fixed_loops} loops"]
    until = _until(stopping)
    if at_evaluation.exit.kind != "residual":
        until = f"{component(at_evaluation.exit)}, or {stopping.max_iterations} iterations, by token"
    return [component(at_evaluation.solver), until]


def _objectives(phases: Sequence[tuple[str, ImplicitLMSpec]], width: int) -> list[Line]:
    """Return a line for the objective and the state policy each, where they are not the default."""
    last = phases[-1][1]
    parts = [] if last.objective.kind == "last" else [("objective", component(last.objective))]
    if last.state_policy != "converged":
        parts.append(("state", "one per loop" if last.state_policy == "per_loop" else last.state_policy))
    return [(Span(name.ljust(width), "bold cyan"), Span(value)) for name, value in parts]


def phases_of(run: BaseRunSpec) -> list[tuple[str, ModelSpec]]:
    """Return a title (name and steps) and the model of each phase, or of the run if it has no phases."""
    models: Any = getattr(run, "phase_models", None)  # run specs of the trainer have it
    phases: list[tuple[str, ModelSpec]] = [("training", run.model)] if models is None else models()
    return phases


def component(spec: Any) -> str:
    """Describe a component: its kind and its fields, including nested components."""
    fields = [(name, value) for name, value in spec if name != "kind"]
    shown = [f"{name} {_value(value)}" for name, value in fields if value not in (None, False)]
    return f"{spec.kind}: {', '.join(shown)}" if shown else str(spec.kind)


def _value(value: Any) -> str:
    if isinstance(value, Stopping):
        return f"({_until(value)})"
    if hasattr(value, "kind"):
        return f"({component(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _until(stopping: Stopping) -> str:
    whose = {"sequence": "by sequence", "prefix": "by token"}[stopping.scope]
    return (
        f"residual ≤ {stopping.tolerance:g} {stopping.norm}, or {stopping.max_iterations} iterations, {whose}"
    )
