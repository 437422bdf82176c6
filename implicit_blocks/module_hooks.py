"""Whether someone has asked to be called when a module runs."""

from __future__ import annotations

import torch
from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which only a call of it would call.

    Not asked while a compiler traces: what it makes is made once, and hooks may come later.
    """
    return not torch.compiler.is_compiling() and bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
