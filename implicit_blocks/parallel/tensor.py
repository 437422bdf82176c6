"""Tensor parallelism: ranks that divide the heads and hidden channels of every layer among them.

Each rank keeps its part of a parameter as an ordinary tensor, so that the weight cache, kernels and the
iterated map work as in one process. The residual stream is the same on all ranks: one sum per mixer and MLP
in the forward pass, and one in the backward pass.

Shape legend: R rows, C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.layers import Linear, RMSNorm, WeightNorm, at_least_float32
from implicit_blocks.parallel.collectives import copied, shared_sum, summed
from implicit_blocks.specs.tensor_plan import Divided, Section, TensorPlan


class Piece(NamedTuple):
    """Consecutive entries that a rank has along the divided dimension; ``copied``: all ranks have them."""

    start: int
    """The first entry in the rank's part."""
    size: int
    whole_start: int
    """The first entry in the whole parameter."""
    copied: bool


class LocalPart(NamedTuple):
    """A rank's part of a parameter."""

    shape: torch.Size
    """Of the whole parameter."""
    dim: int
    pieces: tuple[Piece, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return the rank's part of the whole parameter."""
        found = [whole.narrow(self.dim, piece.whole_start, piece.size) for piece in self.pieces]
        return torch.cat(found, self.dim)


def local_part(shape: torch.Size, divided: Divided, *, rank: int, ranks: int) -> LocalPart:
    """Return the part of a parameter of this shape that a rank of ``ranks`` has."""
    pieces, start, whole_start = [], 0, 0
    for section in divided.sections:
        size = section.local_size(ranks)
        offset = rank * size if section.splits else 0
        pieces.append(Piece(start, size, whole_start + offset, not section.splits))
        start, whole_start = start + size, whole_start + section.size
    assert whole_start == shape[divided.dim], "a plan covers the whole dimension"
    return LocalPart(shape, divided.dim, tuple(pieces))


def divide(module: nn.Module, plan: TensorPlan, group: dist.ProcessGroup) -> dict[str, LocalPart]:
    """Reduce a component, which has the same weights on all ranks, to this rank's part.

    Returns:
        the parts of its parameters, by name.

    """
    parts: dict[str, LocalPart] = {}
    for name, divided in plan.parameters.items():
        owner, leaf = _owner(module, name)
        for inner, division in _stored(owner, leaf, divided, group):
            holder, last = _owner(owner, inner)
            parameter = holder._parameters[last]
            assert parameter is not None
            part = local_part(parameter.shape, division, rank=group.rank(), ranks=group.size())
            local = nn.Parameter(part.take(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
            holder._parameters[last] = local
            parts[f"{name.removesuffix(leaf)}{inner}"] = part
        _resize(owner, leaf, divided, group.size())
    for name, sections in plan.sizes.items():
        owner, leaf = _owner(module, name)
        setattr(owner, leaf, sum(section.local_size(group.size()) for section in sections))
    for name in plan.reads:
        _submodule(module, name).register_forward_pre_hook(_Copies(group))
    for name in plan.writes:
        _sum_output(cast("Linear", _submodule(module, name)), group)
    for name, groups in plan.norms.items():
        owner, leaf = _owner(module, name)
        norm = getattr(owner, leaf)
        if groups % group.size():
            setattr(owner, leaf, DividedRMSNorm(norm, group))
        else:
            norm.groups = groups // group.size()
    return parts


class DividedRMSNorm(nn.Module):
    """An RMS norm over a width of which each rank has a part; the mean square is that of all ranks."""

    def __init__(self, norm: RMSNorm, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.groups, self.group = norm.eps, norm.groups, group
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's part, (…, width / ranks)."""
        wide = at_least_float32(x)
        squares = shared_sum(wide.square().sum(-1, keepdim=True), self.group)
        scale = torch.rsqrt(squares / (x.shape[-1] * self.group.size()) + self.eps)
        return (wide * scale * self.weight.to(wide.dtype)).to(x.dtype)


class DividedWeightNorm(WeightNorm):
    """Weight norm of a matrix, (R, C), of whose columns each rank has a part; row norms are of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def compute(self, g: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]  # needs the group
        """Return this rank's columns of ``g · v / ‖v‖``."""
        wide = at_least_float32(v)
        squares = shared_sum(wide.square().sum(1, keepdim=True), self.group)
        norm = torch.where(squares > 0, squares, 1.0).sqrt()  # the root of 0 has no derivative
        return (g * (wide / norm)).to(v.dtype)


class _Copies:
    """A hook: the input of a module is the same on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (copied(arguments[0], self.group), *arguments[1:])


_SUMMED: dict[type[nn.Module], type[nn.Module]] = {}


def _sum_output(layer: Linear, group: dist.ProcessGroup) -> None:
    """Make a linear layer sum its products over the ranks before it adds its bias."""
    base: type[nn.Module] = type(layer)
    if base not in _SUMMED:

        def forward(self: Any, input: Tensor) -> Tensor:
            weight, bias = (self.weight, self.bias) if self.cached is None else self.cached
            out = summed(F.linear(input.to(weight.dtype), weight), self.rank_group)
            return out if bias is None else out + bias.to(out.dtype)

        _SUMMED[base] = type(f"Summed{base.__name__}", (base,), {"forward": forward})
    layer.__class__ = cast("type[Linear]", _SUMMED[base])
    vars(layer)["rank_group"] = group


def _stored(
    owner: nn.Module, leaf: str, divided: Divided, group: dist.ProcessGroup
) -> Iterator[tuple[str, Divided]]:
    """Yield the stored parameters of ``owner.leaf`` with their divisions: with weight norm g and v."""
    chains: Any = owner._modules.get("parametrizations")
    if chains is None or leaf not in chains:
        yield leaf, divided
        return
    chain = chains[leaf]
    if len(chain) != 1 or not isinstance(chain[0], WeightNorm):
        raise ValueError(
            f"{type(owner).__name__}.{leaf} has parametrizations besides weight norm, which ranks cannot "
            "divide; remove them, or set training.distributed.tensor=1"
        )
    gains = divided
    if divided.dim > 0:
        if any(section.splits for section in divided.sections):
            chain[0] = DividedWeightNorm(group)
        gains = Divided(0, (Section(len(chain.original0), 1),))  # of whole rows, from every rank's columns
    yield f"parametrizations.{leaf}.original0", gains
    yield f"parametrizations.{leaf}.original1", divided


def _resize(owner: nn.Module, leaf: str, divided: Divided, ranks: int) -> None:
    """Set the sizes that torch's modules record."""
    if leaf != "weight":
        return
    size = divided.local_size(ranks)
    if isinstance(owner, nn.Linear):
        setattr(owner, "in_features" if divided.dim else "out_features", size)
    elif isinstance(owner, nn.Embedding) and divided.dim:
        owner.embedding_dim = size


def _submodule(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name) if name else module


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return _submodule(module, path), leaf
