"""Queries of the active transformations: compilation, ``torch.func``, forward mode, autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


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
