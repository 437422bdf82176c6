"""One dispatcher for the operators that several libraries compute.

An operator lists its backends in the order in which they are preferred. ``auto`` takes the first that is
installed, can run the inputs and pays for them; a backend asked for by name is taken or refused, never
replaced. What was taken is remembered, for the log and the records of a run. The choice is made in Python,
from types and shapes: it reads nothing back from a device, and a compiler traces through it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MissingPackageError, available, how_to_get, load

__all__ = ["AUTO", "Backend", "Operation", "chosen", "note", "operations", "report"]

_LOG = logging.getLogger(__name__)

AUTO: Final = "auto"


def _nothing(*inputs: Any) -> str:
    """Refuse nothing."""
    return ""


def _always(*inputs: Any) -> bool:
    """Whatever the inputs."""
    return True


@dataclass(frozen=True)
class Backend:
    """One library's way of computing an operator.

    ``refuses`` returns why it can't run the inputs, "" where it can; ``pays`` whether it is worth choosing
    unasked. Both are given what the operator says (tensors, mostly) and must look at types and shapes only.
    ``module`` is what has to be importable, brought by ``package``; both are "" for torch itself.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str] = _nothing
    pays: Callable[..., bool] = _always
    module: str = ""
    package: str = ""

    @property
    def installed(self) -> bool:
        """Whether its module can be imported; the first access imports it."""
        return not self.module or available(self.module)

    @property
    def is_present(self) -> bool:
        """Whether the package of its module exists, without importing it."""
        return not self.module or find_spec(self.module.partition(".")[0]) is not None


class Operation:
    """An operator and its backends, the preferred ones first; the last one runs anything.

    Args:
        name: what records call it.
        backends: in order of preference.

    """

    def __init__(self, name: str, *backends: Backend) -> None:
        self.name = name
        self.backends = backends
        self.names = tuple(backend.name for backend in backends)
        self._present = tuple(backend for backend in backends if backend.is_present)
        _OPERATIONS[name] = self

    def choose(self, wanted: str, *inputs: Any) -> Backend:
        """Return the backend that is to run ``inputs``.

        Raises:
            ValueError: no such backend, or the one asked for can't run them; says why and what to do.
            MissingPackageError: the one asked for is not installed; says how to get it.

        """
        if wanted != AUTO:
            return self._named(wanted, *inputs)
        for backend in self._present:
            if backend.pays(*inputs) and not backend.refuses(*inputs) and backend.installed:
                note(self.name, backend.name)
                return backend
        raise AssertionError(f"no backend of {self.name} runs anything")

    def require(self, wanted: str) -> None:
        """Refuse a backend that doesn't exist or isn't installed, before there are any inputs.

        Raises:
            ValueError: no such backend.
            MissingPackageError: it is not installed; says how to get it.

        """
        if wanted == AUTO:
            return
        if wanted not in self.names:
            raise ValueError(
                f"unknown {self.name} backend {wanted!r}; choose one of {', '.join((AUTO, *self.names))}"
            )
        backend = self.backends[self.names.index(wanted)]
        if not backend.installed:
            raise MissingPackageError(
                f"{self.name} backend {wanted!r}: {load(backend.module)}; {how_to_get(backend.package)}, or "
                f"set the backend to {AUTO}"
            )

    def _named(self, wanted: str, *inputs: Any) -> Backend:
        self.require(wanted)
        backend = self.backends[self.names.index(wanted)]
        if reason := backend.refuses(*inputs):
            raise ValueError(
                f"{self.name} backend {wanted!r} can't run these inputs: {reason}. They are "
                f"{_described(*inputs)}. Set the backend to {AUTO}, or change the inputs"
            )
        note(self.name, wanted)
        return backend


_OPERATIONS: dict[str, Operation] = {}
_CHOSEN: dict[tuple[str, str], None] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def note(operation: str, backend: str) -> None:
    """Remember that a backend runs an operator; the first time is said in the log."""
    if (operation, backend) not in _CHOSEN:
        _CHOSEN[operation, backend] = None
        _LOG.info("%s is computed by %s", operation, backend)


def chosen() -> tuple[tuple[str, str], ...]:
    """Return the operators and backends that have run in this process, in the order of their first use."""
    return tuple(_CHOSEN)


def operations() -> tuple[Operation, ...]:
    """Return the operators that have a choice of backends; those of modules that have been imported."""
    return tuple(_OPERATIONS.values())


def report() -> dict[str, dict[str, str]]:
    """Return, for each operator that has run, ``ran`` or ``untested: …`` for each of its backends.

    ``untested`` says nothing against a backend, only that nothing is known of it here.
    """
    found: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for name, _ in _CHOSEN):
        ran = [backend for operation, backend in _CHOSEN if operation == name]
        known = _OPERATIONS[name].backends if name in _OPERATIONS else ()
        found[name] = dict.fromkeys(ran, "ran") | {
            backend.name: f"untested: {_why_not(backend)}" for backend in known if backend.name not in ran
        }
    return found


def _why_not(backend: Backend) -> str:
    if not backend.module:
        return "not chosen"
    if not torch.cuda.is_available():
        return "no GPU"
    found = load(backend.module)
    return found if isinstance(found, str) else "installed, not chosen"


def _described(*inputs: Any) -> str:
    first = next(t for t in inputs if isinstance(t, Tensor))
    shapes = ", ".join(str(tuple(t.shape)) for t in inputs if isinstance(t, Tensor))
    return f"{first.dtype} on {first.device.type}, of shapes {shapes}"
