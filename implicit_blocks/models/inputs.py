"""Inputs of a language model: checks, padding and documents, and their division into windows.

Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.search.options import SearchOptions


class Inputs(NamedTuple):
    """Embedded tokens and the flags that belong to them; ``ids_BL``, the masks and documents may be None.

    ``valid_BL`` (B, L) bool is False at padding, ``gaps`` says whether padding separates real tokens of a
    row. ``first`` is the number of tokens of the call before these.
    """

    x_BLD: Tensor
    ids_BL: Tensor | None
    valid_BL: Tensor | None
    documents_BL: Tensor | None
    gaps: bool
    first: int = 0

    @property
    def length(self) -> int:
        """The number of tokens, L."""
        return self.x_BLD.shape[1]

    def windows(self, length: int | None) -> list[Inputs]:
        """Return the inputs of consecutive windows of ``length`` tokens; the last may be shorter."""
        windows: list[Inputs] = []
        if length is None or length >= self.length:
            return [self]
        for first in range(0, self.length, length):
            part = slice(first, first + length)
            window = Inputs(
                self.x_BLD[:, part],
                None if self.ids_BL is None else self.ids_BL[:, part],
                None if self.valid_BL is None else self.valid_BL[:, part],
                None if self.documents_BL is None else self.documents_BL[:, part],
                self.gaps,
                first,
            )
            windows.append(window)
        return windows


def check_inputs(
    x_BLD: Tensor,
    *,
    ids_BL: Tensor | None,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    state: SequenceState | None,
    window_length: int | None,
) -> Inputs:
    """Return the inputs of ``encode`` with their padding found, after checking that they fit together.

    Raises:
        ValueError: where shapes or the state do not fit, the window is shorter than a token, or document
            numbers decrease.

    """
    batch, length = x_BLD.shape[:2]
    if window_length is not None:
        require_count("window_length", window_length)
    if state is not None and state.batch_size != batch:
        raise ValueError(
            f"the state has {state.batch_size} rows, the tokens have {batch}; give the next tokens of each "
            "row of the state"
        )
    valid, gaps = (None, False) if attention_mask is None else _padding(attention_mask, (batch, length))
    if documents is not None:
        _check_documents(documents, valid, (batch, length))
    return Inputs(x_BLD, ids_BL, valid, documents, gaps)


def check_windows(*, commit: bool, bidirectional: bool) -> None:
    """Raise ValueError where tokens are to be committed, but a mixer sees later tokens."""
    if commit and bidirectional:
        raise ValueError(
            "a mixer of this model sees later tokens, so that no token can be committed on its own; "
            "leave out return_state and window_length, and do not generate"
        )


def check_loops(search: SearchOptions | None, *, states: int) -> None:
    """Raise ValueError where a call chooses a number of loops other than that of the kept states."""
    if search is None or (search.loops in (None, states) and search.exit is None):
        return
    given = f"exit {search.exit!r}" if search.loops is None else f"loops {search.loops!r}"
    raise ValueError(
        f"the model keeps one state for each of its {states} loops, and the call asks for {given}; leave it "
        "out, or change at_evaluation.exit of the model's spec"
    )


def check_start(start: Tensor, like_BLC: Tensor) -> Tensor:
    """Return a given start of the search in the dtype of the stream.

    Raises:
        ValueError: for another shape or type.

    """
    if not isinstance(start, Tensor) or not start.is_floating_point():
        raise ValueError("start must be a floating-point tensor (batch, tokens, core width)")
    if start.shape != like_BLC.shape:
        raise ValueError(
            f"start has shape {tuple(start.shape)}; the state of the core has {tuple(like_BLC.shape)}"
        )
    return start.to(like_BLC)


def check_forward(input_ids: Tensor, labels: Tensor | None, *, vocab_size: int, return_logits: bool) -> None:
    """Check the tokens and labels of a forward pass, both (B, L).

    Raises:
        ValueError: for other shapes or dtypes, unknown IDs (checked on a CPU only), or no output requested.

    """
    check_token_ids(input_ids, vocab_size=vocab_size)
    if labels is not None:
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels is a {type(labels).__name__}; give a tensor, torch.tensor(…)")
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, input_ids {tuple(input_ids.shape)}; give one "
                "label per token, aligned with it"
            )
        check_label_ids(labels, vocab_size=vocab_size)
    if labels is None and not return_logits:
        raise ValueError("return_logits=False requires labels; without them nothing would be returned")


def check_token_ids(input_ids: Tensor, *, vocab_size: int) -> None:
    """Raise ValueError for anything but integers (B, L) below ``vocab_size``; values on a CPU only."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}; give a tensor, torch.tensor(…)")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; give (batch, tokens), neither of them 0"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids are {input_ids.dtype}; give token IDs as int64")
    if (unknown := _unknown(input_ids, vocab_size)) is not None:
        raise ValueError(f"input_ids have token {unknown}; use the model's own tokenizer")


def check_label_ids(labels: Tensor, *, vocab_size: int) -> None:
    """Raise ValueError for labels other than -100 or integers below ``vocab_size``; values on a CPU only."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}; give token IDs as int64")
    if (unknown := _unknown(labels, vocab_size, but=-100)) is not None:
        raise ValueError(f"labels have {unknown}; -100 marks an ignored position")


def _unknown(ids: Tensor, vocab_size: int, *, but: int | None = None) -> str | None:
    """Describe the first ID outside the embedding; None where reading the values would synchronize."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(ids):
        return None
    known = (ids >= 0) & (ids < vocab_size)
    known = known if but is None else known | (ids == but)
    if bool(known.all()):
        return None
    return f"{int(ids[~known][0])}, and the model knows 0 to {vocab_size - 1}"


def _padding(attention_mask: Tensor, shape: tuple[int, int]) -> tuple[Tensor | None, bool]:
    """Return where tokens are real, (B, L) bool, None where all are; and whether padding separates any."""
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the tokens {shape}; give one flag "
            "per token"
        )
    valid = attention_mask.bool()
    begun = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0]  # runs of real tokens
    whole, parted = torch.stack((valid.all(), (begun > 1).any())).cpu()  # one synchronization for both
    return (None, False) if bool(whole) else (valid, bool(parted))


def _check_documents(documents: Tensor, valid: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuse documents of another shape, and decreasing numbers, which not every mixer could tell apart."""
    if documents.shape != shape:
        raise ValueError(
            f"documents have shape {tuple(documents.shape)}, the tokens {shape}; give one number per token"
        )
    if documents.device.type != "cpu" or torch.compiler.is_compiling():  # reading would synchronize a GPU
        return
    if valid is not None:  # padding may carry any number: it counts to the document before it
        lowest = torch.iinfo(torch.int64).min
        documents = documents.long().masked_fill(~valid, lowest)
        documents = documents.where(valid, documents.cummax(1).values)
    back = (documents[:, 1:] < documents[:, :-1]).nonzero()
    if len(back):
        row, place = back[0].tolist()
        before, after = documents[row, place : place + 2].tolist()
        raise ValueError(
            f"documents of row {row} go back from {before} to {after}; number the documents of a row in "
            "ascending order"
        )
