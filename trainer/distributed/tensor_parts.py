"""Parameters of which ranks have parts: in checkpoints, in gradients, and as whole tensors again.

A part may in addition be sharded by FSDP along its first dimension: a rank then has some rows of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from implicit_blocks.parallel.tensor import LocalPart
from trainer.distributed.grid import Grid

_ATTRIBUTE = "tensor_parts"


class _Overlap(NamedTuple):
    """A rectangle that this rank has: where it begins in the whole tensor, and its entries."""

    offsets: tuple[int, ...]
    entries: Tensor
    copied: bool


@dataclass(frozen=True)
class TensorParts:
    """The divided parameters of a model, by name."""

    grid: Grid
    parts: Mapping[str, LocalPart]

    def attach(self, model: nn.Module) -> None:
        """Store the parts on the model, where ``parts_of`` finds them."""
        vars(model)[_ATTRIBUTE] = self

    def named(self, name: str, tensor: Tensor) -> LocalPart | None:
        """Return this rank's part of a parameter or of its optimizer state; None: it is not divided.

        ``name`` is that of the parameter, or as in a checkpoint ``model/NAME`` or ``optimizer/NAME/ENTRY``.

        Raises:
            ValueError: the entry of a divided parameter has another shape.

        """
        inner = name.partition("/")[2]
        known = (self.parts.get(each) for each in (name, inner, inner.rpartition("/")[0]))
        part = next((each for each in known if each is not None), None)
        if part is None or tensor.dim() == 0:
            return None
        if tensor.dim() != len(part.shape) or tensor.shape[part.dim] != sum(p.size for p in part.pieces):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, not that of its parameter, which ranks divide; "
                "choose optimizer adamw, or set training.distributed.tensor=1"
            )
        return part

    def divided(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the tensors that are parts."""
        return {name for name, tensor in tensors.items() if self.named(name, tensor) is not None}

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as torch's checkpoints store them: parts with their place in the whole."""
        first = self.grid.tensor_rank == 0
        return {
            name: tensor
            if (part := self.named(name, tensor)) is None
            else _StoredPart(tensor, part, first=first)
            for name, tensor in tensors.items()
        }

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole parameter, given this rank's part, gathered from FSDP; all ranks call this."""
        part, group = self.named(name, tensor), self.grid.tensor
        if part is None or group is None:
            return tensor
        whole = tensor.new_zeros(part.shape)
        for overlap in _overlaps(tensor.detach(), part):
            if self.grid.tensor_rank == 0 or not overlap.copied:
                sizes = zip(overlap.offsets, overlap.entries.shape, strict=True)
                whole[tuple(slice(first, first + size) for first, size in sizes)] = overlap.entries
        dist.all_reduce(whole, group=group)
        return whole

    def size(self, name: str, parameter: Tensor) -> int:
        """Return the number of entries of the whole parameter."""
        return math.prod(self.parts[name].shape) if name in self.parts else parameter.numel()

    @torch.no_grad()
    def sum_copies(self, model: nn.Module) -> None:
        """Sum the ranks' gradients of the copied sections of divided parameters."""
        gradients = [
            overlap.entries
            for name, parameter in model.named_parameters()
            if name in self.parts and parameter.grad is not None
            for overlap in _overlaps(parameter.grad, self.parts[name])
            if overlap.copied
        ]
        if not gradients or self.grid.tensor is None:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.grid.tensor)
        for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    @torch.no_grad()
    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Clip the gradients to the norm ``limit`` over all ranks; return the norm before clipping.

        Every entry of the whole model counts once, however many ranks have it.
        """
        entries: list[Tensor] = []
        shares: list[float] = []
        for entry, copies in self._gradients(model):
            entries.append(entry)
            shares.append(1.0 / copies)
        norms = torch.stack(torch._foreach_norm(entries)).double()
        total = (norms.square() * torch.tensor(shares, dtype=torch.float64, device=norms.device)).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor.to(entries[0].dtype))
        return norm.to(entries[0].dtype)

    def _gradients(self, model: nn.Module) -> Iterator[tuple[Tensor, int]]:
        """Yield this rank's gradients in pieces, with the number of ranks that have each."""
        heads = 1 if self.grid.tensor is None else self.grid.tensor.size()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            copies = self.grid.data.world_size
            if isinstance(gradient, DTensor):
                mesh = gradient.device_mesh
                copies = math.prod(
                    mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate()
                )
            if name not in self.parts:
                yield local_part(gradient), copies * heads
                continue
            for overlap in _overlaps(gradient, self.parts[name]):
                yield overlap.entries, copies * (heads if overlap.copied else 1)


def parts_of(model: nn.Module) -> TensorParts | None:
    """Return the divided parameters of a model; None: ranks do not divide it."""
    found: TensorParts | None = vars(model).get(_ATTRIBUTE)
    return found


def tensor_ranks(model: nn.Module) -> int:
    """Return the number of ranks that divide the heads of a model."""
    parts = parts_of(model)
    return 1 if parts is None or parts.grid.tensor is None else parts.grid.tensor.size()


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of the whole model, of which this rank may have a part."""
    parts = parts_of(model)
    return sum(p.numel() if parts is None else parts.size(name, p) for name, p in model.named_parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _overlaps(tensor: Tensor, part: LocalPart) -> Iterator[_Overlap]:
    """Yield what this rank has of a parameter or a tensor of its shape, as views."""
    local, first = local_part(tensor), 0
    if isinstance(tensor, DTensor):
        (box,) = tensor.__create_chunk_list__()
        first = box.offsets[0]  # FSDP shards the first dimension
    for piece in part.pieces:
        start, stop, offset = piece.start, piece.start + piece.size, 0
        if part.dim == 0:
            start, stop = max(start, first), min(stop, first + len(local))
            offset = start - piece.start
        if stop <= start or not local.numel():
            continue
        begin = [first] + [0] * (local.ndim - 1)
        begin[part.dim] = piece.whole_start + offset
        entries = local.narrow(part.dim, start - (first if part.dim == 0 else 0), stop - start)
        yield _Overlap(tuple(begin), entries, piece.copied)


class _StoredPart(Tensor):
    """A part of a whole tensor for ``torch.distributed.checkpoint``, which stores it in rectangles.

    The shape is that of the whole; copies are written by the first rank.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor, part: LocalPart, *, first: bool) -> _StoredPart:
        wrapper: _StoredPart = Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=tensor.dtype, device=torch.device("cpu")
        )
        wrapper.overlaps = list(_overlaps(tensor.detach(), part))
        wrapper.first = first
        return wrapper

    overlaps: list[_Overlap]
    first: bool

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a part of a tensor")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk, overlap in zip(self.__create_chunk_list__(), self.overlaps, strict=True)
            if self.first or not overlap.copied
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(each.offsets), sizes=each.entries.shape)
            for each in self.overlaps
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(each.entries for each in self.overlaps if each.offsets == tuple(index.offset or ()))
