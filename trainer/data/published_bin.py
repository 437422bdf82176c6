"""Read and write the published word-problem files, such as ``train_A5_L256_P050.bin``.

The format is that of ``state_tracking/dataset.py`` in the published code
(markschoene/implicit_languagemodels, the repository of Schöne et al., "Implicit Language Models are RNNs",
ICML 2025): ``torch.save`` of a dict with

- ``inputs`` and ``targets``: int64, (samples, length), aligned, without a shift;
- ``vocab_size``: int64 of shape (1,), the order of group × monoid.

Files are named ``{train|test}_{group}_L{length}_P{int(100·p):03d}.bin``. The name omits the monoid and
truncates p to two digits (``int(100 * 0.29)`` is 28), so rely on the contents. Training splits contain 16 384
· 512 samples; because the published script ignores its ``--dtype``, they take 34 GB at length 256. Smaller
integer types can be read too. The published readme describes the tensors as (samples, batch, length), but its
code writes two dimensions; both are supported. The published loader fails on ``torch.load(...,
weight_only=True)``; the files themselves are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.data.source import Batch, check_range

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)


@dataclass(frozen=True)
class PublishedSplit:
    """A split backed by its file; with ``mmap`` only the rows in use are read.

    `inputs` and `targets` are (samples, length), of the file's integer type.
    """

    path: Path
    inputs: Tensor
    targets: Tensor
    vocab_size: int

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.inputs.shape[1]

    def batch(self, position: int, count: int) -> Batch:
        """Return samples [position, position + count) of the file.

        Raises:
            ValueError: the range exceeds the file; IDs are outside the vocabulary.

        """
        check_range(position, count)
        if position + count > len(self):
            raise ValueError(
                f"{self.path} has {len(self)} samples; {position} to {position + count - 1} are out of range"
            )
        rows = slice(position, position + count)
        # Copy explicitly: rows that need no conversion would be views of the file.
        inputs = self.inputs[rows].to(torch.int64, copy=True)
        labels = self.targets[rows].to(torch.int64, copy=True)
        for name, ids in (("inputs", inputs), ("targets", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{name} of {self.path} contain IDs from {int(ids.min())} to {int(ids.max())} in samples "
                    f"{position} to {position + count - 1}, outside its vocabulary of {self.vocab_size}; "
                    "generate the file again"
                )
        return Batch(inputs=inputs, labels=labels)


def published_name(split: str, *, group: str, length: int, identity_probability: float) -> str:
    """Return the published file name of a split (``train`` or ``test``)."""
    return f"{split}_{group}_L{length}_P{int(100 * identity_probability):03d}.bin"


def write_published(
    path: str | Path,
    inputs_BL: Tensor,
    targets_BL: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Write a split in the published format.

    Args:
        path: output file.
        inputs_BL: token IDs, (samples, length).
        targets_BL: prefix products, the same shape.
        vocab_size: number of token IDs.
        dtype: int64 as published, or a smaller integer type (uint8 takes an eighth of the space).

    Raises:
        ValueError: the shapes differ or are not two-dimensional, IDs are outside the vocabulary, or the dtype
            is too small for it.

    """
    _check_shapes(Path(path), inputs_BL, targets_BL)
    if dtype not in _INTEGERS or vocab_size - 1 > torch.iinfo(dtype).max:
        raise ValueError(f"dtype {dtype} is too small for a vocabulary of {vocab_size}; use torch.int64")
    for name, ids in (("inputs", inputs_BL), ("targets", targets_BL)):
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} range from {low} to {high}; all IDs must be from 0 to {vocab_size - 1}")
    # Clone, because torch saves a view with its whole storage.
    content = {
        "inputs": inputs_BL.to(dtype).clone(),
        "targets": targets_BL.to(dtype).clone(),
        "vocab_size": torch.tensor([vocab_size]),
    }
    torch.save(content, path)


def read_published(path: str | Path, *, mmap: bool = True) -> PublishedSplit:
    """Open a split.

    Args:
        path: the file.
        mmap: memory-map the file, so that opening 34 GB reads almost nothing; False reads it completely.

    Raises:
        ValueError: the file does not exist, is not in the format above, or is truncated.

    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no word-problem file {path}; check the path")
    try:
        content = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # a crafted file can make its reader raise anything
        raise ValueError(
            f"{path} cannot be read as a torch file of tensors ({_first_line(error)}): truncated, or of "
            "another format; generate or copy it again"
        ) from error
    tensors = {}
    if isinstance(content, dict):
        tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    missing = {"inputs", "targets", "vocab_size"} - set(tensors)
    if missing:
        found = list(tensors) or type(content).__name__
        raise ValueError(
            f"{path} lacks {', '.join(sorted(missing))}: a word-problem file is a dict of tensors "
            f"inputs, targets and vocab_size, but this file contains {found}"
        )
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} of {path} is sparse, quantized or on the meta device; save a dense CPU tensor"
            )
    if tensors["vocab_size"].numel() != 1 or tensors["vocab_size"].dtype not in _INTEGERS:
        raise ValueError(f"vocab_size of {path} is not a single integer: {tensors['vocab_size']!r}")
    inputs, targets = tensors["inputs"], tensors["targets"]
    if inputs.ndim == 3:
        inputs = inputs.flatten(0, 1)
    if targets.ndim == 3:
        targets = targets.flatten(0, 1)
    _check_shapes(path, inputs, targets)
    if tensors["vocab_size"].numel() != 1:
        raise ValueError(f"vocab_size of {path} has {tensors['vocab_size'].numel()} values; it has one")
    return PublishedSplit(path, inputs, targets, int(tensors["vocab_size"]))


def _check_shapes(path: Path, inputs: Tensor, targets: Tensor) -> None:
    if inputs.ndim != 2 or inputs.shape != targets.shape or not inputs.numel():
        raise ValueError(
            f"inputs and targets of {path} have shapes {tuple(inputs.shape)} and {tuple(targets.shape)}; "
            "both must be (samples, length) and not empty"
        )
    for name, ids in (("inputs", inputs), ("targets", targets)):
        if ids.dtype not in _INTEGERS:
            raise ValueError(f"{name} of {path} have dtype {ids.dtype}; token IDs must be integers")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
