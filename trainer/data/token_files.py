"""Memory-mapped token files, raw little-endian integers or ``.npy``; several shards form one sequence.

A shard is ``NAME.bin``, tokens as raw little-endian uint16 or uint32, or ``NAME.npy``, a one-dimensional
array of integers. An optional sidecar ``NAME.json`` contains ``{"dtype": "uint16", "count": 1000,
"vocab_size": 50277}``, with every key optional: it declares the dtype, detects truncated files and allows IDs
to be checked. An optional ``NAME.documents`` contains the document ends: raw little-endian int64, for each
document the offset in the shard after its last token. An optional ``NAME.targets`` has a byte per token, 1 if
the token is a target of training: an answer in a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import DOCUMENTS_SUFFIX, TARGETS_SUFFIX

TokenDtype = Literal["uint16", "uint32"]

_NPY_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True)
class Shard:
    """One memory-mapped token file; only requested tokens are read."""

    path: Path
    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int | None
    document_ends: npt.NDArray[np.int64] | None = None
    targets: npt.NDArray[np.uint8] | None = None

    def read(self, start: int, stop: int, *, vocab_size: int | None) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of this file, checked against the vocabulary.

        Raises:
            ValueError: an ID is outside the vocabulary; names the file and the token's offset.

        """
        tokens = self.tokens[start:stop].astype(np.int64)
        limit = vocab_size if vocab_size is not None else np.iinfo(np.int64).max
        wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"token ID {tokens[first]} at offset {start + first} of {self.path} is outside the "
                f"vocabulary of {vocab_size}; check the file's dtype, and that it was written with this "
                "model's tokenizer"
            )
        return tokens


def open_shards(path: str | Path, *, dtype: TokenDtype | None = None) -> list[Shard]:
    """Open the shards at a path: a file, or a directory's ``.bin`` and ``.npy`` files sorted by name.

    Args:
        path: file or directory.
        dtype: type of ``.bin`` files whose sidecar does not declare it.

    Raises:
        ValueError: the path does not exist; a file is neither ``.bin`` nor ``.npy``, empty or truncated; the
            dtype is unknown or contradicts the sidecar or header; shards have different vocabularies; a
            sidecar cannot be read.

    """
    path = Path(path)
    if dtype is not None and dtype not in get_args(TokenDtype):
        raise ValueError(f"dtype {dtype!r} is not a token dtype; use uint16 or uint32")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy"))
        if not files:
            raise ValueError(
                f"directory {path} contains no .bin or .npy file; write tokens by python -m trainer.tokenize"
            )
    elif path.is_file():
        if path.suffix not in (".bin", ".npy"):
            raise ValueError(
                f"{path} is not a token file (.bin or .npy); tokenize text by python -m trainer.tokenize "
                f"{path} --output DIR --tokenizer FILE, with the model's tokenizer, and use DIR"
            )
        files = [path]
    else:
        raise ValueError(
            f"there is no token file or directory '{path}'; check the path, or make tokens of a text by "
            f"python -m trainer.tokenize TEXT --tokenizer FILE --output {path}"
        )
    shards = [_open(file, dtype) for file in files]
    vocabularies = {s.vocab_size for s in shards if s.vocab_size is not None}
    if len(vocabularies) > 1:
        raise ValueError(
            f"the sidecars in {path} declare different vocabularies, {sorted(vocabularies)}; "
            "keep shards of different tokenizers in different directories"
        )
    return shards


def write_tokens(
    path: str | Path,
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    vocab_size: int,
    dtype: TokenDtype | None = None,
) -> Path:
    """Write ``path`` (``.bin`` or ``.npy``) and its sidecar.

    Args:
        path: output file.
        tokens: IDs, each at least 0 and below `vocab_size`.
        vocab_size: number of IDs.
        dtype: None selects the smallest one that fits the vocabulary.

    Raises:
        ValueError: the suffix is unknown, IDs are outside the vocabulary, the dtype is too small, or there
            are no tokens.

    """
    path = Path(path)
    if path.suffix not in (".bin", ".npy"):
        raise ValueError(f"{path} has suffix {path.suffix!r}; token files end in .bin or .npy")
    chosen = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    if chosen not in get_args(TokenDtype) or not 1 <= vocab_size <= np.iinfo(chosen).max + 1:
        raise ValueError(f"dtype {chosen!r} does not fit a vocabulary of {vocab_size}; use uint16 or uint32")
    array = np.asarray(tokens)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"tokens have shape {array.shape}; give a non-empty one-dimensional sequence")
    if array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(
            f"token IDs range from {array.min()} to {array.max()}; all must be from 0 to {vocab_size - 1}"
        )
    array = array.astype(np.dtype(chosen).newbyteorder("<"))
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    sidecar = {"dtype": chosen, "count": len(array), "vocab_size": vocab_size}
    path.with_suffix(".json").write_text(json.dumps(sidecar) + "\n", encoding="utf-8")
    return path


def _open(path: Path, dtype: TokenDtype | None) -> Shard:
    sidecar = _read_sidecar(path.with_suffix(".json"))
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; write the tokens again")
    stated = sidecar.get("dtype", dtype)
    if dtype is not None and stated != dtype:
        raise ValueError(f"the sidecar of {path} declares {stated}, but dtype is {dtype}; omit dtype")
    tokens = _map_npy(path, stated) if path.suffix == ".npy" else _map_raw(path, stated)
    count = sidecar.get("count", len(tokens))
    if count != len(tokens):
        raise ValueError(
            f"{path} has {len(tokens)} tokens but its sidecar declares {count}: truncated or replaced; "
            "write or copy it again"
        )
    ends = _map_document_ends(path.with_suffix(DOCUMENTS_SUFFIX), len(tokens))
    targets = _map_targets(path.with_suffix(TARGETS_SUFFIX), len(tokens))
    return Shard(path, tokens, sidecar.get("vocab_size"), ends, targets)


def _map_targets(path: Path, tokens: int) -> npt.NDArray[np.uint8] | None:
    if not path.is_file():
        return None
    if path.stat().st_size != tokens:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes but its shard {tokens} tokens: truncated, or of another "
            "shard; write or copy it again"
        )
    return np.memmap(path, np.uint8, mode="r")


def _map_document_ends(path: Path, tokens: int) -> npt.NDArray[np.int64] | None:
    if not path.is_file():
        return None
    size = path.stat().st_size
    ends: npt.NDArray[np.int64] = np.zeros(0, dtype="<i8") if not size else np.memmap(path, "<i8", mode="r")
    if size % 8 or (size and not 0 < ends[0] <= ends[-1] <= tokens):
        raise ValueError(
            f"{path} doesn't match its {tokens} tokens: truncated, or of another shard; write or copy it "
            "again"
        )
    return ends


def _map_raw(path: Path, dtype: str | None) -> npt.NDArray[np.integer[Any]]:
    if dtype is None:
        raise ValueError(
            f"the dtype of {path} is unknown; set dtype to uint16 or uint32, or add it to "
            f"{path.with_suffix('.json').name}"
        )
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, not a multiple of {width} ({dtype}): truncated, or of another dtype"
        )
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _map_npy(path: Path, dtype: str | None) -> npt.NDArray[np.integer[Any]]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a crafted header can make its reader raise anything
        raise ValueError(
            f"{path} cannot be read as .npy ({error}): truncated or of another format; write it again"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.name not in _NPY_DTYPES or not len(tokens):
        raise ValueError(
            f"{path} has dtype {tokens.dtype} and shape {tokens.shape}; tokens must be a non-empty "
            f"one-dimensional array of {', '.join(_NPY_DTYPES)}"
        )
    if dtype is not None and tokens.dtype.name != dtype:
        raise ValueError(f"the header of {path} declares {tokens.dtype.name}, not {dtype}; omit dtype")
    result: npt.NDArray[np.integer[Any]] = tokens
    return result


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    remedy = 'write {"dtype": "uint16", "count": N, "vocab_size": V}, or remove the file'
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); {remedy}") from error
    if not isinstance(sidecar, dict):
        raise ValueError(f"{path} contains a {type(sidecar).__name__}, not an object; {remedy}")
    if "dtype" in sidecar and sidecar["dtype"] not in _NPY_DTYPES:
        raise ValueError(f"{path} has dtype {sidecar['dtype']!r}; use uint16 or uint32")
    for key in ("count", "vocab_size"):
        value = sidecar.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} in {path} must be a positive integer, got {value!r}")
    return sidecar
