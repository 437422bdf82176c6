"""How an operator is dispatched: the active transformations of torch, and the choice among its backends.

*Transformations* are compilation, ``torch.func``, forward mode and autocast; few kernels support all of them.

An operator lists its *backends* in order of preference. ``auto`` selects the first one that is installed,
supports the inputs and is worth using for them; a backend requested by name is used or refused, never
replaced. Selections are recorded for the log and the records of a run. The choice depends only on dtypes and
shapes: it does not synchronize with a device, and a compiler traces through it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from implicit_blocks.ops.accelerated import MissingPackageError, available, how_to_get, load

_LOG = logging.getLogger(__name__)

AUTO: Final = "auto"

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


# ------------------------------------------------------------------------------------ transformations


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform, forward-mode differentiation or compilation is active.

    An ``autograd.Function`` that writes into buffers supports none of them, and a compiler fuses plain
    operators better than tiled ones. torch has no public API for the first two; ``autograd.Function.apply``
    performs the same checks.
    """
    return torch.compiler.is_compiling() or is_differentiated_forward()


def is_differentiated_forward() -> bool:
    """Whether a ``torch.func`` transform or forward mode is active, which no kernel supports."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation is active, by ``torch.func.jvp`` or dual tensors."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def is_vmapped() -> bool:
    """Whether ``torch.func.vmap`` is active."""
    if torch.compiler.is_compiling():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Disable autocast: operators choose the dtypes of their accumulations themselves."""
    # The meta device has no autocast; torch's compiler cannot trace the query for a device's support.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def first_derivatives_only(what: str, remedy: str) -> Callable[[_Backward], _Backward]:
    """Decorate the ``backward`` of an ``autograd.Function`` that records no graph of what it computes.

    Unlike torch's ``once_differentiable`` it raises as soon as a graph is requested (``create_graph=True``).
    torch's raises only where a gradient that comes in carries a graph itself; elsewhere the second
    derivative would lack a term without an error.

    Args:
        what: the operation, which begins the message: "the gradient by the implicit function theorem".
        remedy: how to get second derivatives, which ends the message.

    """

    def decorate(backward: _Backward) -> _Backward:
        once = torch.autograd.function.once_differentiable(backward)

        @wraps(backward)
        def checked(*arguments: Any) -> Any:
            # While a graph is compiled, the mode of the tracer says nothing about the backward pass.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{what} has no second derivatives, and backward was called with create_graph=True; "
                    f"{remedy}"
                )
            return once(*arguments)

        return checked  # type: ignore[return-value]  # the same signature

    return decorate


# ------------------------------------------------------------------------------------ backends


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
        self.lacked: dict[str, str] = {}
        """Of each backend chosen by ``auto`` on a GPU: the missing package of a preferred one, or ""."""
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
                if inputs[0].is_cuda and not torch.compiler.is_compiling():
                    self._record_missing(backend, *inputs)
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

    def _record_missing(self, chosen: Backend, *inputs: Any) -> None:
        if chosen.name in self.lacked:
            return
        self.lacked[chosen.name] = ""
        for backend in self.backends[: self.backends.index(chosen)]:
            if backend not in self._present and backend.pays(*inputs) and not backend.refuses(*inputs):
                self.lacked[chosen.name] = backend.package
                return

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


def missing_package(operation: str, backend: str) -> str:
    """Return the package whose backend would have run on the GPU instead of this one, or ""."""
    return _OPERATIONS[operation].lacked.get(backend, "") if operation in _OPERATIONS else ""


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
