"""Read and write the published word-problem files: ``train_A5_L256_P050.bin`` and the like.

The format, as read in ``state_tracking/dataset.py`` of the published code
(markschoene/implicit_languagemodels, the repository of Schöne et al., "Implicit Language Models are RNNs",
ICML 2025): ``torch.save`` of a dict with

- ``inputs`` and ``targets``: int64, (samples, length), aligned, no shift;
- ``vocab_size``: int64 of shape (1,), the size of group × monoid.

A file is named ``{train|test}_{group}_L{length}_P{int(100·p):03d}.bin``. The name leaves the monoid out and
cuts p off at two digits (and ``int(100 * 0.29)`` is 28): trust the contents. Training splits hold 16 384 ·
512 samples and, as the script's ``--dtype`` is ignored, take 34 GB at length 256; smaller integers are read
too. Its readme says the tensors are (samples, batch, length), its code writes two dimensions; both are
read. Its own loader fails on ``torch.load(..., weight_only=True)``; the files are sound.
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
    """A split as it stands in its file; with ``mmap`` only the rows that are used are read.

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
        """Tokens in a sequence."""
        return self.inputs.shape[1]

    def batch(self, position: int, count: int) -> Batch:
        """Give samples [position, position + count) of the file.

        Raises:
            ValueError: samples beyond the end; ids outside the vocabulary.

        """
        check_range(position, count)
        if position + count > len(self):
            raise ValueError(
                f"{self.path} holds {len(self)} samples; {position} to {position + count - 1} go beyond them"
            )
        rows = slice(position, position + count)
        # Copies: rows that need no conversion would be views of the file.
        inputs = self.inputs[rows].to(torch.int64, copy=True)
        labels = self.targets[rows].to(torch.int64, copy=True)
        for name, ids in (("inputs", inputs), ("targets", labels)):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"{name} of {self.path} hold ids from {int(ids.min())} to {int(ids.max())} in samples "
                    f"{position} to {position + count - 1}, outside its vocabulary of {self.vocab_size}; "
                    "generate the file again"
                )
        return Batch(inputs=inputs, labels=labels)


def published_name(split: str, *, group: str, length: int, identity_probability: float) -> str:
    """Name the file of a split (``train`` or ``test``) as the published script does."""
    return f"{split}_{group}_L{length}_P{int(100 * identity_probability):03d}.bin"


def write_published(
    path: str | Path,
    inputs_BL: Tensor,
    targets_BL: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Write a split as the published script does.

    Args:
        path: of the file.
        inputs_BL: token ids, (samples, length).
        targets_BL: prefix products, the same shape.
        vocab_size: number of ids.
        dtype: int64 as published, or a smaller integer (uint8 takes an eighth).

    Raises:
        ValueError: shapes that differ or aren't two-dimensional; ids outside the vocabulary; a type that
            doesn't hold it.

    """
    _check_shapes(Path(path), inputs_BL, targets_BL)
    if dtype not in _INTEGERS or vocab_size - 1 > torch.iinfo(dtype).max:
        raise ValueError(f"dtype {dtype} can't hold a vocabulary of {vocab_size}; use torch.int64")
    for name, ids in (("inputs", inputs_BL), ("targets", targets_BL)):
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} run from {low} to {high}; all ids must be from 0 to {vocab_size - 1}")
    # A slice would be saved with the whole storage that it views.
    content = {
        "inputs": inputs_BL.to(dtype).clone(),
        "targets": targets_BL.to(dtype).clone(),
        "vocab_size": torch.tensor([vocab_size]),
    }
    torch.save(content, path)


def read_published(path: str | Path, *, mmap: bool = True) -> PublishedSplit:
    """Open a split.

    Args:
        path: of the file.
        mmap: map it, so that opening 34 GB reads next to nothing; False reads it whole.

    Raises:
        ValueError: no such file; not in the format described above; cut short.

    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no word-problem file {path}; check the path")
    try:
        content = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # a crafted file can make its reader raise anything
        raise ValueError(
            f"{path} can't be read as a torch file of tensors ({_first_line(error)}): cut short, or of "
            "another format; generate or copy it again"
        ) from error
    tensors = {}
    if isinstance(content, dict):
        tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    missing = {"inputs", "targets", "vocab_size"} - set(tensors)
    if missing:
        found = list(tensors) or type(content).__name__
        raise ValueError(
            f"{path} lacks {', '.join(sorted(missing))}: a word-problem file is a dict of the tensors "
            f"inputs, targets and vocab_size, this one holds {found}"
        )
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(f"{name} of {path} is sparse, quantized or without values; save a plain tensor")
    if tensors["vocab_size"].numel() != 1 or tensors["vocab_size"].dtype not in _INTEGERS:
        raise ValueError(f"vocab_size of {path} is not a whole number: {tensors['vocab_size']!r}")
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
            "both are (samples, length), and not empty"
        )
    for name, ids in (("inputs", inputs), ("targets", targets)):
        if ids.dtype not in _INTEGERS:
            raise ValueError(f"{name} of {path} are {ids.dtype}; token ids are integers, int64 as published")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
