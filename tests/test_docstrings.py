"""The docstrings of public names: presence, shapes, arguments, errors and sources."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import implicit_blocks as ib
import trainer
from implicit_blocks.interfaces import GradientEstimator, Mixer, Solver
from implicit_blocks.specs import ComponentSpec, GradientSpec, MixerSpec, MLPSpec, SolverSpec, Spec
from implicit_blocks.specs.base import field_docstrings

KERNELS = "implicit_blocks.ops.kernels."  # need triton, which builds of torch for CPUs come without
OPTIONAL = ("implicit_blocks.hf",)  # needs transformers

# (B, L, D), (E,), (…, width), (B, …), (rows, 1, …), but not (see below) or (default)
SHAPE = re.compile(
    r"\((?:[A-Z]\w*|…|\d|rows|tokens|batch)(?:\s?[·+*/\u2212-]\s?\w+)*\s?(?:,[^()]*)\)|scalar|shape"
)
SUFFIX = re.compile(r"_[A-Z0-9]+$")
YEAR = re.compile(r"\b(?:19|20)\d\d\b")


def modules() -> Iterator[ModuleType]:
    """Import every module of the library, except optional ones without their packages."""
    yield ib
    for found in pkgutil.walk_packages(ib.__path__, "implicit_blocks."):
        if found.name.endswith("__main__"):
            continue
        if found.name.startswith(KERNELS) and importlib.util.find_spec("triton") is None:
            continue
        if found.name.startswith(OPTIONAL):
            pytest.importorskip(
                "transformers", reason="the classes for transformers are checked with it alone"
            )
        yield importlib.import_module(found.name)
    yield importlib.import_module("trainer.callbacks")
    yield importlib.import_module("trainer.specs.run")


@cache
def public() -> dict[str, Any]:
    """Return what every ``__all__`` exports, each object once, by the path of its definition."""
    names: dict[str, Any] = {}
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not inspect.isclass(value) and not inspect.isfunction(value):
                continue
            if value.__module__.partition(".")[0] in ("implicit_blocks", "trainer"):
                names[f"{value.__module__}.{value.__qualname__}"] = value
    return names


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Return the public methods and properties that a class defines itself, as functions."""
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(function):
            yield name, function


def functions() -> dict[str, tuple[Any, str]]:
    """Return every public function, method and constructor, with its docstrings."""
    found: dict[str, tuple[Any, str]] = {}
    for path, value in public().items():
        if inspect.isfunction(value):
            found[path] = value, text(value)
            continue
        for name, function in members(value):
            found[f"{path}.{name}"] = function, text(value, name)
        constructor = vars(value).get("__init__")
        if inspect.isfunction(constructor) and not is_dataclass(value):
            found[f"{path}.__init__"] = constructor, text(value)
    return found


def text(value: Any, method: str | None = None) -> str:
    """Return a docstring; for a method, together with those of the methods that it overrides."""
    if method is None:
        return inspect.cleandoc(value.__doc__ or "")
    parts = [vars(base)[method] for base in value.__mro__ if method in vars(base)]
    ours = [
        part for part in parts if str(getattr(part, "__module__", "implicit")).startswith(("impl", "tra"))
    ]
    return "\n".join(inspect.cleandoc(getattr(part, "__doc__", None) or "") for part in ours)


def hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name imported for type checkers alone
        return {}


def takes_tensors(function: Any) -> list[str]:
    """Return the arguments, and ``return``, that are tensors."""
    return [
        name for name, hint in hints(function).items() if hint is Tensor or Tensor in typing.get_args(hint)
    ]


def legend(path: str) -> bool:
    """Whether a function's module, or that of one it overrides, explains the letters of shapes."""
    owner = public().get(path.rpartition(".")[0])
    homes = [base.__module__ for base in getattr(owner, "__mro__", ())]
    homes += [public()[path].__module__] if path in public() else []
    ours = [
        importlib.import_module(home) for home in homes if home.startswith(("implicit_blocks", "trainer"))
    ]
    return any("hape" in (module.__doc__ or "") for module in ours)


def raises(function: Any) -> set[str]:
    """Return the names of the errors that a function's own body raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def test_every_public_name_has_a_docstring():
    missing = [path for path, value in public().items() if not text(value)]
    missing += [path for path, (_, message) in functions().items() if not message]
    assert not missing


def test_tensor_arguments_have_documented_shapes():
    """The shape is in the docstring, or a suffix of the name with a legend in the module."""
    missing = []
    for path, (function, message) in functions().items():
        tensors = takes_tensors(function)
        if tensors and not SHAPE.search(message) and not (legend(path) and any(map(SUFFIX.search, tensors))):
            missing.append(f"{path}: {', '.join(tensors)}")
    assert not missing


def test_raised_errors_are_documented():
    """A docstring has a section on errors, or names those that the body raises."""
    missing = []
    for path, (function, message) in functions().items():
        errors = raises(function) & {
            "ValueError",
            "ImportError",
            "RuntimeError",
            "ContractError",
            "SpecError",
        }
        if errors and "Raises:" not in message and not any(error in message for error in errors):
            missing.append(f"{path}: {', '.join(errors)}")
    assert not missing


def test_arguments_are_documented():
    """All arguments are named where there are more than three, or where a docstring has ``Args``."""
    missing = []
    for path, (function, message) in functions().items():
        names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        names = [name for name in names if not name.startswith("_")]
        whole = inspect.isfunction(public().get(path)) or path.endswith("__init__")
        if "Args:" in message or (whole and len(names) > 3):
            left_out = [n for n in names if not re.search(rf"\b{re.escape(SUFFIX.sub('', n))}", message)]
            missing += [f"{path}: {', '.join(left_out)}"] if left_out else []
    assert not missing


def test_fields_of_specs_are_documented():
    missing = [
        f"{path}.{name}"
        for path, value in public().items()
        if inspect.isclass(value) and issubclass(value, Spec)
        for name, field in value.model_fields.items()
        if name != "kind" and not field.description and name not in field_docstrings(value)
    ]
    assert not missing


def test_methods_of_the_literature_name_their_source():
    """Solvers, gradients, mixers and MLPs name the paper's year, in the class or in its module."""
    bases = (Solver, GradientEstimator, Mixer, SolverSpec, GradientSpec, MixerSpec, MLPSpec)
    missing = []
    for path, value in public().items():
        if not (inspect.isclass(value) and issubclass(value, bases)) or inspect.isabstract(value):
            continue
        if value in bases or issubclass(value, ComponentSpec):
            continue  # a spec describes settings; the component that it builds names the source
        if not YEAR.search(text(value)) and not YEAR.search(inspect.getmodule(value).__doc__ or ""):
            missing.append(path)
    assert not missing, "name the source in the docstring, with the year"


def test_the_trainer_s_modules_have_docstrings():
    for found in pkgutil.walk_packages(trainer.__path__, "trainer."):
        if not found.name.endswith("__main__"):
            assert importlib.import_module(found.name).__doc__, found.name
