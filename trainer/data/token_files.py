"""Files of tokens: raw little-endian integers or ``.npy``, memory-mapped, several shards read as one row.

A shard is ``NAME.bin``, tokens as raw little-endian uint16 or uint32, or ``NAME.npy``, a one-dimensional
array of integers. Beside it may stand ``NAME.json``: ``{"dtype": "uint16", "count": 1000, "vocab_size":
50277}``, every key optional; then the type need not be given, a file cut short is noticed, and ids are
checked. ``NAME.documents`` may say where documents end: raw little-endian int64, for each the offset in the
shard after its last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import DOCUMENTS_SUFFIX

TokenDtype = Literal["uint16", "uint32"]

_NPY_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True)
class Shard:
    """One file of tokens, mapped: reading touches only what is asked for."""

    path: Path
    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int | None
    document_ends: npt.NDArray[np.int64] | None = None

    def read(self, start: int, stop: int, *, vocab_size: int | None) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of this file, checked against the vocabulary.

        Raises:
            ValueError: an id outside the vocabulary, with the file and the token's offset in it.

        """
        tokens = self.tokens[start:stop].astype(np.int64)
        limit = vocab_size if vocab_size is not None else np.iinfo(np.int64).max
        wrong = np.flatnonzero((tokens < 0) | (tokens >= limit))
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"token id {tokens[first]} at offset {start + first} of {self.path} is outside the "
                f"vocabulary of {vocab_size}; "
                "check the file's dtype, or that it was made with this model's tokenizer"
            )
        return tokens


def open_shards(path: str | Path, *, dtype: TokenDtype | None = None) -> list[Shard]:
    """Open the shards at a path: a file, or a folder's ``.bin`` and ``.npy`` files in the order of names.

    Args:
        path: file or folder.
        dtype: of ``.bin`` files without a sidecar that says.

    Raises:
        ValueError: nothing there; a file that is neither ``.bin`` nor ``.npy``, such as text; an empty file,
            or one cut short; a type that is unknown or contradicts the
            sidecar or the header; shards with different vocabularies; an unreadable sidecar.

    """
    path = Path(path)
    if dtype is not None and dtype not in get_args(TokenDtype):
        raise ValueError(f"dtype {dtype!r} is not a token type; use uint16 or uint32")
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy"))
        if not files:
            raise ValueError(
                f"folder {path} holds no .bin or .npy file; write tokens there by python -m trainer.tokenize"
            )
    elif path.is_file():
        if path.suffix not in (".bin", ".npy"):
            raise ValueError(
                f"{path} is not a token file (these end in .bin or .npy); turn text into tokens by "
                f"python -m trainer.tokenize {path} --output DIR --tokenizer FILE, with the tokenizer of the "
                "model, and give DIR"
            )
        files = [path]
    else:
        raise ValueError(f"there is no token file or folder {path}; check the path")
    shards = [_open(file, dtype) for file in files]
    vocabularies = {s.vocab_size for s in shards if s.vocab_size is not None}
    if len(vocabularies) > 1:
        raise ValueError(
            f"the sidecars in {path} give different vocabularies, {sorted(vocabularies)}; "
            "keep shards of different tokenizers in different folders"
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
        path: of the file to write.
        tokens: ids, each at least 0 and below `vocab_size`.
        vocab_size: number of ids.
        dtype: None takes the smaller one that holds the vocabulary.

    Raises:
        ValueError: another suffix, ids outside the vocabulary, a type too small for it, or no tokens.

    """
    path = Path(path)
    if path.suffix not in (".bin", ".npy"):
        raise ValueError(f"{path} has suffix {path.suffix!r}; token files end in .bin or .npy")
    chosen = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    if chosen not in get_args(TokenDtype) or not 1 <= vocab_size <= np.iinfo(chosen).max + 1:
        raise ValueError(f"dtype {chosen!r} does not hold a vocabulary of {vocab_size}; use uint16 or uint32")
    array = np.asarray(tokens)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"tokens have shape {array.shape}; give a non-empty one-dimensional sequence")
    if array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(
            f"token ids run from {array.min()} to {array.max()}; all must be from 0 to {vocab_size - 1}"
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
        raise ValueError(f"{path} is empty; write its tokens again")
    stated = sidecar.get("dtype", dtype)
    if dtype is not None and stated != dtype:
        raise ValueError(
            f"{path} holds {stated} by its sidecar, but dtype {dtype} was asked for; leave it out"
        )
    tokens = _map_npy(path, stated) if path.suffix == ".npy" else _map_raw(path, stated)
    count = sidecar.get("count", len(tokens))
    if count != len(tokens):
        raise ValueError(
            f"{path} holds {len(tokens)} tokens where its sidecar says {count}: cut short or replaced; "
            "write or copy it again"
        )
    ends = _map_document_ends(path.with_suffix(DOCUMENTS_SUFFIX), len(tokens))
    return Shard(path, tokens, sidecar.get("vocab_size"), ends)


def _map_document_ends(path: Path, tokens: int) -> npt.NDArray[np.int64] | None:
    if not path.is_file():
        return None
    size = path.stat().st_size
    ends: npt.NDArray[np.int64] = np.zeros(0, dtype="<i8") if not size else np.memmap(path, "<i8", mode="r")
    if size % 8 or (size and not 0 < ends[0] <= ends[-1] <= tokens):
        raise ValueError(
            f"{path} doesn't fit its {tokens} tokens: cut short, or of another shard; write or copy it again"
        )
    return ends


def _map_raw(path: Path, dtype: str | None) -> npt.NDArray[np.integer[Any]]:
    if dtype is None:
        raise ValueError(
            f"the type of the tokens in {path} is unknown; set dtype to uint16 or uint32, "
            f"or write it to {path.with_suffix('.json').name}"
        )
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, not a multiple of {width} ({dtype}): cut short, or of another dtype"
        )
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _map_npy(path: Path, dtype: str | None) -> npt.NDArray[np.integer[Any]]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a crafted header can make its reader raise anything
        raise ValueError(
            f"{path} can't be read as .npy ({error}): cut short or of another format; write it again"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.name not in _NPY_DTYPES or not len(tokens):
        raise ValueError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; tokens are a non-empty one-dimensional "
            f"array of {', '.join(_NPY_DTYPES)}"
        )
    if dtype is not None and tokens.dtype.name != dtype:
        raise ValueError(f"{path} holds {tokens.dtype.name} by its header, not {dtype}; leave dtype out")
    result: npt.NDArray[np.integer[Any]] = tokens
    return result


def _read_sidecar(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    remedy = 'write {"dtype": "uint16", "count": N, "vocab_size": V}, or remove the file'
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); {remedy}") from error
    if not isinstance(sidecar, dict):
        raise ValueError(f"{path} holds {type(sidecar).__name__}, not an object; {remedy}")
    if "dtype" in sidecar and sidecar["dtype"] not in _NPY_DTYPES:
        raise ValueError(f"{path} has dtype {sidecar['dtype']!r}; use uint16 or uint32")
    for key in ("count", "vocab_size"):
        value = sidecar.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path} has {key} {value!r}; {key} is a number from 1 up")
    return sidecar
