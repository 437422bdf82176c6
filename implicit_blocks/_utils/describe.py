"""Tensors and other values in messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def shape_and_type(tensor: Tensor) -> str:
    """Describe a tensor: ``(2, 3) of float32``."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def described(value: Any) -> str:
    """Describe any value: ``a tensor (2, 3) of float32``, ``a list``."""
    return f"a tensor {shape_and_type(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
