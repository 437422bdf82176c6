"""What an operator has to know of the transformations it runs under."""

from contextlib import AbstractContextManager, nullcontext

import torch


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform, forward-mode differentiation or compilation is under way.

    An ``autograd.Function`` that writes into buffers supports none of them, and a compiler fuses plain
    operators better than it sees through tiles. torch has no public question for the first two;
    ``autograd.Function.apply`` asks the same.
    """
    return torch.compiler.is_compiling() or is_differentiated_forward()


def is_differentiated_forward() -> bool:
    """Whether a ``torch.func`` transform or forward mode is under way, which no kernel knows."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Switch autocast off: operators choose the types of their accumulations themselves."""
    # The meta device has none; asking torch whether a device has is more than its compiler can trace.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
