"""Measure the structure of this repository, and check it against bars.

    python tools/structure.py                    print the table
    python tools/structure.py --check            the same; exit with 1 if a value is above its bar
    python tools/structure.py --files forward    list the files and functions that a forward pass enters
    python tools/structure.py --circles          list the import circles

The table below (`ROWS`) holds each row's bar, which ``--check`` enforces, and its target.

**Files entered.** `trace` follows one action in the main thread and records every call of a Python function
that is defined in ``implicit_blocks``, ``trainer`` or ``plugins``. *Files* is the number of files with at
least one recorded call. *Changes* puts the functions in the order of their first calls and counts the
neighbors that are defined in different files: it is how often a reader who visits each function once, in that
order, changes file. The actions use the zoo's ``word_problem_s3`` (one Mamba2 layer of width 64) on the CPU:

``build``
    ``ib.build(ib.load_spec("word_problem_s3").model)``: the first time for this name, in a process that has
    built another spec. Imports and the loading of plugins are not counted.
``forward``
    ``model(ids, labels=ids).loss.backward()`` in training mode, the second call; 4 sequences of 64 tokens.
``token``
    ``ib.generate`` for two prompts of 8 tokens: prefill and 2 tokens per prompt, the second call.
``step``
    ``python -m trainer``, from the end of the second optimizer step to the end of the third: everything that
    the main thread does for one training step. Background threads (data loading, checkpoints) do not count.

**Import circles** are the strongly connected components, of two modules or more, of the graph "module A has a
statement that imports module B". Imports under ``if TYPE_CHECKING`` never count. *At module level* leaves out
imports inside functions; *at run time* includes them. ``from package import name`` is an edge to
``package.name`` if that is a module, to the module that defines ``name`` if the package imports it under
``if TYPE_CHECKING`` (which exports it lazily), else to ``package``. That importing ``a.b`` also runs
``a/__init__.py`` adds no edge, and neither do imports by name (``import_module``).

**Lines** of a class run from its ``class`` statement to its last line, without the lines of docstrings.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeGuard
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("implicit_blocks", "trainer", "plugins")
"""The folders whose files and lines are counted."""

MAX_LINES = 500
SPEC = "word_problem_s3"
OTHER_SPEC = "word_problem_a5"
"""A spec of the same kinds as SPEC; building it performs the imports that building SPEC needs."""


class Row(NamedTuple):
    """One row of the table. ``bar`` is what ``--check`` accepts; ``target`` is what the row should reach."""

    key: str
    title: str
    bar: int
    target: int | None = None


ROWS = (
    Row("root.implicit_blocks", "modules at the root of implicit_blocks", bar=5, target=5),
    Row("root.trainer", "modules at the root of trainer", bar=5, target=5),
    Row("forward.files", "training pass of a tiny Mamba2 model: files entered", bar=19, target=20),
    Row("forward.changes", "training pass of a tiny Mamba2 model: changes of file", bar=50, target=50),
    Row("step.files", "training step of python -m trainer: files entered", bar=36, target=36),
    Row("build.files", "spec name to built model: files entered", bar=18, target=18),
    Row("build.changes", "spec name to built model: changes of file", bar=64),
    Row("token.files", "generated token: files entered", bar=22, target=22),
    Row("circles.module", "import circles at module level", bar=0, target=0),
    Row("circles.runtime", "import circles at run time", bar=0, target=0),
    Row("class.implicit_blocks", "longest class of implicit_blocks, lines", bar=200, target=200),
    Row("class.trainer", "longest class of trainer, lines", bar=200),
    Row("lines", "lines of Python in implicit_blocks, trainer, plugins", bar=83_300),
    Row("long_files", f"Python files over {MAX_LINES} lines", bar=0, target=0),
)


# ---------------------------------------------------------------------------------------- source files


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder, sorted, without build outputs and virtual environments."""
    generated = {"build", "dist", "__pycache__"}
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(part in generated or part.startswith(".") for part in path.relative_to(folder).parts)
    )


def root_modules(package: Path) -> list[str]:
    """Return the names of the modules directly inside a package, without ``__init__`` and ``__main__``."""
    return sorted(path.stem for path in package.glob("*.py") if not path.stem.startswith("__"))


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def class_lengths(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (lines without docstrings, name) for every class of a file."""
    for node in _statements(_parse(path)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1 - _docstring_lines(node), node.name


def longest_class(package: Path) -> int:
    """Return the lines of the longest class of a package, without docstrings."""
    return max((length for path in python_files(package) for length, _ in class_lengths(path)), default=0)


def _docstring_lines(tree: ast.AST) -> int:
    total = 0
    for node in _statements(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            total += docstring.end_lineno - docstring.lineno + 1
    return total


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements in it; no expression, which are most nodes, contains a statement."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr):
            yield from _statements(child)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# ---------------------------------------------------------------------------------------- imports


class Import(NamedTuple):
    """One imported module: where the statement is, and whether it is inside a function."""

    path: Path
    line: int
    module: str
    in_function: bool


def find_modules(root: Path) -> dict[str, Path]:
    """Return the modules of implicit_blocks, trainer and the plugins by name."""
    packages = [root / "implicit_blocks", root / "trainer", *sorted(root.glob("plugins/*/src/*"))]
    modules = {}
    for package in packages:
        for path in python_files(package):
            parts = path.relative_to(package.parent).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(name: str, modules: Mapping[str, Path]) -> list[Import]:
    """Return what a module imports from ``modules``, itself left out.

    Imports for type checkers are left out; imports inside functions are included.
    """
    path = modules[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]  # relative imports start here
    return [
        Import(path, line, module, in_function)
        for node, in_function in _import_statements(_parse(path), in_function=False)
        for module, line in _imported_modules(node, package, modules)
        if module in modules and module != name
    ]


def _is_for_type_checkers(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def _lazy_names(package: str, path: Path) -> dict[str, str]:
    """Return the names that a package exports lazily, each with the module that it is imported from."""
    return {
        alias.asname or alias.name: _base(statement, package)
        for block in _parse(path).body
        if path.name == "__init__.py" and _is_for_type_checkers(block)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def _import_statements(
    node: ast.AST, *, in_function: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, in_function
        return
    in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in node.orelse if _is_for_type_checkers(node) else ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _import_statements(child, in_function=in_function)


def _imported_modules(
    node: ast.Import | ast.ImportFrom, package: str, modules: Mapping[str, Path]
) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno
        return
    base = _base(node, package)
    lazy = _lazy_names(base, modules[base]) if base in modules else {}
    for alias in node.names:
        module = f"{base}.{alias.name}"
        yield (module if module in modules else lazy.get(alias.name, base)), alias.lineno


def _base(node: ast.ImportFrom, package: str) -> str:
    """Return the module that a ``from`` statement names."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")  # each dot after the first leads one package up
    return ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])


def import_graph(modules: Mapping[str, Path], *, functions: bool) -> dict[str, set[str]]:
    """Return the modules that each module imports; ``functions`` includes imports inside functions."""
    return {
        name: {found.module for found in find_imports(name, modules) if functions or not found.in_function}
        for name in modules
    }


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two nodes or more, sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for following in graph[node]:
            if following not in index:
                visit(following)
                lowest[node] = min(lowest[node], lowest[following])
            elif following in stack:
                lowest[node] = min(lowest[node], index[following])
        if lowest[node] == index[node]:
            first = stack.index(node)
            components.append(sorted(stack[first:]))
            del stack[first:]

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(component for component in components if len(component) > 1)


# ---------------------------------------------------------------------------------------- files entered


class Trace:
    """The functions of the project that are called in a ``with`` block, in the order of their first calls."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, None] = {}
        self._prefixes = tuple(f"{ROOT / folder}/" for folder in PROJECT)

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to record the calls of the current thread."""
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def stop(self) -> None:
        """Restore the trace function that was set before `start`."""
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        # The global trace function receives "call" events only; returning None keeps lines untraced.
        if frame.f_code.co_filename.startswith(self._prefixes):
            self._functions.setdefault(frame.f_code)

    @property
    def files(self) -> list[str]:
        """The files in the order in which they are entered, as paths from the repository's root."""
        return list(dict.fromkeys(path for path, _ in self.walk))

    @property
    def walk(self) -> list[tuple[str, list[str]]]:
        """The functions in the order of their first calls: neighbors of one file, with its path."""
        return [
            (str(Path(filename).relative_to(ROOT)), [code.co_qualname for code in codes])
            for filename, codes in groupby(self._functions, key=lambda code: code.co_filename)
        ]

    @property
    def changes(self) -> int:
        """How many neighbors among the functions are defined in different files."""
        return max(0, len(self.walk) - 1)


def trace_build() -> Trace:
    """Trace the way from a spec's name to a built model."""
    import implicit_blocks as ib

    ib.build(ib.load_spec(OTHER_SPEC).model)
    with Trace() as trace:
        ib.build(ib.load_spec(SPEC).model)
    return trace


def trace_forward() -> Trace:
    """Trace a training forward pass and its backward pass."""
    model, ids = _tiny_model(sequences=4, length=64)
    model.train()
    model(ids, labels=ids).loss.backward()
    with Trace() as trace:
        model(ids, labels=ids).loss.backward()
    return trace


def trace_token() -> Trace:
    """Trace the generation of two tokens for each of two prompts."""
    import implicit_blocks as ib

    model, prompts = _tiny_model(sequences=2, length=8)
    model.eval()
    ib.generate(model, prompts, max_new_tokens=2)
    with Trace() as trace:
        ib.generate(model, prompts, max_new_tokens=2)
    return trace


def trace_step() -> Trace:
    """Trace ``python -m trainer`` from the end of its second optimizer step to the end of its third."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    trace, steps = Trace(), 0

    def after_optimizer_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            trace.start()
        elif steps == 3:
            trace.stop()

    hook = register_optimizer_step_post_hook(after_optimizer_step)
    output = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = _run_trainer(
                *("--spec", SPEC, "--output", f"{folder}/run", "--device", "cpu", "--stop-at", "3"),
                "training.batch_size=8",
            )
    finally:
        hook.remove()
    if steps != 3:
        raise RuntimeError(
            f"the trainer made {steps} optimizer steps instead of 3 (exit code {code}):\n{output.getvalue()}"
        )
    return trace


def _run_trainer(*arguments: str) -> object:
    with mock.patch.object(sys, "argv", ["trainer", *arguments]):
        try:
            runpy.run_module("trainer", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return ended.code
    return 0


def _tiny_model(*, sequences: int, length: int) -> tuple[Any, Any]:
    import torch

    import implicit_blocks as ib

    torch.manual_seed(0)
    model = ib.build(ib.load_spec(SPEC).model)
    return model, torch.randint(0, 6, (sequences, length))  # the vocabulary: the 6 elements of S3


ACTIONS: dict[str, Callable[[], Trace]] = {
    "build": trace_build,  # first: it counts the first time that SPEC is loaded
    "forward": trace_forward,
    "token": trace_token,
    "step": trace_step,
}


# ---------------------------------------------------------------------------------------- the table


def measure_source(root: Path = ROOT) -> dict[str, int]:
    """Return the values of the rows that are read from the source files."""
    modules = find_modules(root)
    project = [path for folder in PROJECT for path in python_files(root / folder)]
    others = [path for folder in ("benchmarks", "tests", "tools") for path in python_files(root / folder)]
    return {
        "root.implicit_blocks": len(root_modules(root / "implicit_blocks")),
        "root.trainer": len(root_modules(root / "trainer")),
        "circles.module": len(circles(import_graph(modules, functions=False))),
        "circles.runtime": len(circles(import_graph(modules, functions=True))),
        "class.implicit_blocks": longest_class(root / "implicit_blocks"),
        "class.trainer": longest_class(root / "trainer"),
        "lines": sum(map(count_lines, project)),
        "long_files": sum(count_lines(path) > MAX_LINES for path in [*project, *others]),
    }


def measure_actions() -> dict[str, int]:
    """Return the values of the rows that are measured by running something."""
    values = {}
    for name, action in ACTIONS.items():
        trace = action()
        values[f"{name}.files"] = len(trace.files)
        values[f"{name}.changes"] = trace.changes
    return values


def table(values: Mapping[str, int]) -> str:
    """Return the table in Markdown; a value above its bar is marked."""
    lines = ["| | now | bar | target |", "|---|---:|---:|---:|"]
    for row in ROWS:
        value, target = values[row.key], "" if row.target is None else f"{row.target:,}"
        mark = " (above the bar)" if value > row.bar else ""
        lines.append(f"| {row.title} | {value:,}{mark} | {row.bar:,} | {target} |")
    return "\n".join(lines)


def above_bars(values: Mapping[str, int]) -> list[str]:
    """Return a sentence for each measured row whose value is above its bar."""
    return [
        f"{row.title}: {values[row.key]:,}, at most {row.bar:,} allowed"
        for row in ROWS
        if row.key in values and values[row.key] > row.bar
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python tools/structure.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a value is above its bar")
    parser.add_argument("--files", choices=ACTIONS, help="list the files and functions that an action enters")
    parser.add_argument("--circles", action="store_true", help="list the import circles at run time")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # measure this repository, whichever is installed
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only wait for each other
    if options.files is not None:
        trace = ACTIONS[options.files]()
        for path, functions in trace.walk:  # a file that is entered again keeps its number
            print(f"{trace.files.index(path) + 1:3} {path}: {', '.join(functions)}")
        print(f"{len(trace.files)} files, {trace.changes} changes of file")
        return 0
    if options.circles:
        for circle in circles(import_graph(find_modules(ROOT), functions=True)):
            print(f"{len(circle)} modules: {', '.join(circle)}")
        return 0
    values = measure_source() | measure_actions()
    print(table(values))
    exceeded = above_bars(values) if options.check else []
    for sentence in exceeded:
        print(f"error: {sentence}", file=sys.stderr)
    return int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
