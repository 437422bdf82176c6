"""Whether modules have hooks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules import module as _of_all_modules


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, which run only if the module is called.

    False while a compiler traces: compiled code is created once, and hooks may be added later.
    """
    return not torch.compiler.is_compiling() and _hooked(module)


def any_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules has hooks, or global hooks exist, as counting and tracing tools set."""
    return bool(_of_all_modules._has_any_global_hook()) or any(map(_hooked, modules))


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
