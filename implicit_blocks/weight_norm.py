"""Weight norm for the matrices of a fixed-point map, computed once a forward pass.

T. Salimans and D. Kingma, "Weight normalization", NeurIPS 2016: ``w = g · v / ‖v‖`` for each output row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class WeightNorm(nn.Module):
    """The parametrization ``(g, v) → g · v / ‖v‖``, rows being the first dimension.

    ``g`` has the weight's number of dimensions, (rows, 1, …), ``v`` its shape. While a weight is *held* (see
    ``implicit_blocks.held_weights``) the held value is returned and nothing is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor | None = None

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight."""
        return self.compute(g, v) if self.held is None else self.held

    @staticmethod
    def compute(g: Tensor, v: Tensor) -> Tensor:
        """Return ``g · v / ‖v‖``, the norm taken in float32 or better, of ``v``'s type."""
        v_wide = v.to(torch.promote_types(v.dtype, torch.float32))
        return (g * (v_wide / _row_norm(v_wide))).to(v.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``g = ‖weight‖`` and ``v = weight``: assigning a weight leaves it as it is."""
        return _row_norm(weight), weight

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightNorm:
        return WeightNorm()  # a held value belongs to a forward pass, never to a copy


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _row_norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norm.view(-1, *[1] * (weight.ndim - 1))


def add_weight_norm(module: nn.Module) -> None:
    """Put weight norm on every parameter called ``weight`` of two or more dimensions in ``module``.

    State-dict names become ``….parametrizations.weight.original0`` (g) and ``….original1`` (v).
    """
    for part in list(module.modules()):
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim >= 2:
            plain = type(part)
            parametrize.register_parametrization(part, "weight", WeightNorm(), unsafe=weight.is_meta)
            # torch makes a class for each instance; with one for all, compiled code serves every layer.
            part.__class__ = _CLASSES.setdefault(plain, type(part))


@torch.no_grad()
def assign_weight(module: nn.Module, weight: Tensor) -> None:
    """Set ``module.weight`` to these values, whether it is a parameter or parametrized."""
    if parametrize.is_parametrized(module, "weight"):
        module.weight = weight
    else:
        parameter = module.weight
        assert isinstance(parameter, Tensor)
        parameter.copy_(weight)
