"""Weight norm for the matrices of a fixed-point map, computed once a forward pass.

T. Salimans and D. Kingma, "Weight normalization", NeurIPS 2016: ``w = g · v / ‖v‖`` for each output row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_blocks.ops.accelerated import available


class ComputedWeight(Tensor):
    """A weight that was computed from ``g`` and ``v``, whose ``data`` can be assigned to like a parameter's.

    Tools that change weights write ``layer.weight.data += …``, as peft does to merge LoRA. In a value that is
    computed anew at the next call that would be lost without a word; here it is written to ``g`` and ``v``.
    Nothing but an assignment to ``data`` is: ``layer.weight.mul_(2)`` changes this value alone.
    """

    # What is made of it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as for nn.Parameter
    sources: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, weight: Tensor, *, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight as one that can be written to, gradients and all."""
        computed = weight.as_subclass(cls)
        computed.sources = (g, v)
        return computed

    @property
    def data(self) -> Tensor:
        """The values, without gradients."""
        return self.detach().as_subclass(Tensor)

    @data.setter
    @torch.no_grad()
    def data(self, value: Tensor) -> None:
        g, v = self.sources
        if value.shape != v.shape:
            raise ValueError(
                f"the weight has shape {tuple(v.shape)}, what is assigned to its data {tuple(value.shape)}"
            )
        value = value.to(v)
        g.copy_(_row_norm(value))
        v.copy_(value)


class WeightNorm(nn.Module):
    """The parametrization ``(g, v) → g · v / ‖v‖``, rows being the first dimension.

    ``g`` has the weight's number of dimensions, (rows, 1, …), ``v`` its shape. While a weight is *held* (see
    ``implicit_blocks.held_weights``) the held value is returned and nothing is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor | None = None

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight; in a way that it can be assigned to, unless that is in the way of a compiler."""
        if self.held is not None:
            return self.held
        weight = self.compute(g, v)
        if type(weight) is not Tensor or torch.compiler.is_compiling():
            return weight
        return ComputedWeight.of(weight, g=g, v=v)

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


def normed_parts(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return ``g`` and ``v`` of a module's weight; None where weight norm isn't all that makes it."""
    # By the plain dictionaries: asked for each of a hundred matrices while the device waits for them.
    parts: Any = module._modules.get("parametrizations")
    chain: Any = None if parts is None else parts._modules.get("weight")
    made = [] if chain is None else list(chain._modules.values())
    if len(made) != 1 or not isinstance(made[0], WeightNorm):
        return None
    return chain.original0, chain.original1


def fused(
    modules: Sequence[nn.Module], layouts: Sequence[tuple[torch.dtype, int, int]], groups: Sequence[int]
) -> dict[int, Tensor]:
    """Return the normed weights of those modules whose kernels serve, by the modules' place in the list.

    Each is in the type of its layout and padded by so many zero rows and columns. Left out are modules
    without weight norm, off the GPU, or in other precisions than the kernels'. Those of a group, by its
    number, come from one node of autograd, which goes backwards once.
    """
    if not available("triton") or torch.compiler.is_compiling():  # the kernels read addresses from a table
        return {}
    from implicit_blocks.ops.kernels.weight_norm import LARGEST_ROW, Layout, normed_weights

    served: dict[int, tuple[Tensor, Tensor, Layout]] = {}
    devices = set()
    for place, (module, layout) in enumerate(zip(modules, layouts, strict=True)):
        if (parts := normed_parts(module)) is None:
            continue
        g, v = parts
        row = v.numel() // max(1, len(v)) + layout[2]
        whole = v.ndim == 2 or not any(layout[1:])  # only matrices are padded
        plain = g.is_contiguous() and g.dtype == v.dtype == torch.float32
        if v.is_cuda and plain and whole and 0 < row <= LARGEST_ROW:
            served[place] = (*parts, Layout(*layout))
            devices.add(v.device)
    if len(devices) != 1:  # none, or a model spread over several
        return {}
    gains, weights, kept = zip(*served.values(), strict=True)
    numbers = [groups[place] for place in served]
    return dict(zip(served, normed_weights(gains, weights, kept, numbers), strict=True))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _row_norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norm.view(-1, *[1] * (weight.ndim - 1))


def add_weight_norm(module: nn.Module) -> None:
    """Put weight norm on every parameter called ``weight`` of two or more dimensions in ``module``.

    State-dict names become ``….parametrizations.weight.original0`` (g) and ``….original1`` (v). Modules of
    one type share one class from here on, so that what torch's ``parametrize`` does to a module's class is
    for none of them alone: its removal fails, and a parametrization of a bias is looked for in all.
    """
    for part in list(module.modules()):
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim >= 2:
            plain = type(part)
            parametrize.register_parametrization(part, "weight", WeightNorm(), unsafe=weight.is_meta)
            # torch makes a class for each instance; with one for all, compiled code serves every layer. It
            # inherits the property ``weight``: torch's removal from one layer, which deletes that from the
            # layer's own class, then fails before anything is changed, instead of taking all layers' weights.
            if plain not in _CLASSES:
                _CLASSES[plain] = type(type(part).__name__, (type(part),), {})
            part.__class__ = _CLASSES[plain]


def plain_weight(module: nn.Module) -> Tensor:
    """Return ``module.weight`` as an ordinary tensor, which compilers know better."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.as_subclass(Tensor) if isinstance(weight, ComputedWeight) else weight


@torch.no_grad()
def assign_weight(module: nn.Module, weight: Tensor) -> None:
    """Set ``module.weight`` to these values, whether it is a parameter or parametrized."""
    if parametrize.is_parametrized(module, "weight"):
        module.weight = weight
    else:
        parameter = module.weight
        assert isinstance(parameter, Tensor)
        parameter.copy_(weight)
