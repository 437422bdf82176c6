"""A dispatcher for operators with several backends.

An operator lists its backends in order of preference. ``auto`` selects the first one that is installed,
supports the inputs and is worth using for them; a backend requested by name is used or refused, never
replaced. Selections are recorded for the log and the records of a run. The choice depends only on dtypes and
shapes: it does not synchronize with a device, and a compiler traces through it.
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
    """Support all inputs."""
    return ""


def _always(*inputs: Any) -> bool:
    """Be worth using for all inputs."""
    return True


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    ``refuses`` returns the reason why the backend does not support the inputs, or ""; ``pays`` whether
    ``auto`` should select it. Both receive the operator's inputs (mostly tensors) and may depend only on
    dtypes and shapes. ``module`` must be importable, and ``package`` installs it; both are "" for torch.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str] = _nothing
    pays: Callable[..., bool] = _always
    module: str = ""
    package: str = ""

    @property
    def installed(self) -> bool:
        """Whether the module can be imported; the first access imports it."""
        return not self.module or available(self.module)

    @property
    def is_present(self) -> bool:
        """Whether the package of the module is found, without importing it."""
        return not self.module or find_spec(self.module.partition(".")[0]) is not None


class Operation:
    """An operator and its backends in order of preference; the last one supports all inputs.

    Args:
        name: the name in records and messages.
        backends: the backends, in order of preference.

    """

    def __init__(self, name: str, *backends: Backend) -> None:
        self.name = name
        self.backends = backends
        self.names = tuple(backend.name for backend in backends)
        self._present = tuple(backend for backend in backends if backend.is_present)
        _OPERATIONS[name] = self

    def choose(self, wanted: str, *inputs: Any) -> Backend:
        """Return the backend for these inputs.

        Raises:
            ValueError: the requested backend does not exist or does not support the inputs.
            MissingPackageError: the requested backend is not installed; the message says how to install it.

        """
        if wanted != AUTO:
            return self._named(wanted, *inputs)
        for backend in self._present:
            if backend.pays(*inputs) and not backend.refuses(*inputs) and backend.installed:
                note(self.name, backend.name)
                return backend
        raise AssertionError(f"no backend of {self.name} supports all inputs")

    def require(self, wanted: str) -> None:
        """Check that a backend exists and is installed.

        Raises:
            ValueError: the backend does not exist.
            MissingPackageError: it is not installed; the message says how to install it.

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
    """Record that a backend runs an operator; the first time is logged."""
    if (operation, backend) not in _CHOSEN:
        _CHOSEN[operation, backend] = None
        _LOG.info("%s is computed by %s", operation, backend)


def chosen() -> tuple[tuple[str, str], ...]:
    """Return the operators and backends that have run in this process, in the order of their first use."""
    return tuple(_CHOSEN)


def operations() -> tuple[Operation, ...]:
    """Return the operators with several backends whose modules have been imported."""
    return tuple(_OPERATIONS.values())


def report() -> dict[str, dict[str, str]]:
    """Return, for each operator that has run, ``ran`` or ``untested: …`` for each of its backends.

    ``untested`` only means that a backend has not run in this process.
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
