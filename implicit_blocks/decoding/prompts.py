"""Validation of models, options and prompts, and the layout of prompts as one batch.

Shape legend: B batch, L tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchKwargs

Prompts = Tensor | Sequence[Sequence[int] | Tensor]


def check_model(model: LanguageModel) -> None:
    """Check that a model can decode.

    Raises:
        ValueError: for a model of another library, a model in training mode, or a mixer that sees later
            tokens.

    """
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"the model is a {type(model).__name__}; give an ImplicitLM or an ExplicitLM. Convert models of "
            "implicit_blocks.hf with implicit_blocks.hf.to_library(model); other transformers models have "
            "their own generate method"
        )
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if model.bidirectional:
        raise ValueError(
            "a mixer of the model sees later tokens, so that it cannot predict the next one; choose a causal "
            "mixer (causal: true)"
        )


def check_search(search: SearchKwargs) -> None:
    """Check that the search options of a call are those of decoding.

    Raises:
        ValueError: for ``start`` or ``trajectory``, whose points belong to one window of tokens.

    """
    for name in ("start", "trajectory"):
        value = search.get(name)
        if value is not None and not (isinstance(value, Sequence) and not value):
            raise ValueError(
                f"{name} concerns the points of one window, and decoding solves many; leave it out, or call "
                f"the model itself: model(tokens, {name}=…)"
            )


def needed_ids(model: LanguageModel, ids_BL: Tensor) -> Tensor | None:
    """Return the tokens for ``model.encode`` where a mixer reads them, as value embeddings do; else None."""
    return ids_BL if model.needs_token_ids else None


def check_prompts(
    ids_BL: Tensor,
    attention_mask: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    limit: str = "max_length",
) -> Tensor | None:
    """Return where the tokens are real, (B, L) bool; None: everywhere.

    Args:
        ids_BL: prompts, padded on either side.
        attention_mask: (B, L), 0 at padding.
        vocab_size: IDs must be below it; None: they are not checked.
        max_length: maximum number of tokens per prompt; None: no limit.
        limit: the name of ``max_length`` in the error.

    Raises:
        ValueError: for no prompts, an empty or too long prompt, or an unknown ID.

    """
    if ids_BL.ndim != 2 or 0 in ids_BL.shape:
        raise ValueError(
            f"the prompts have shape {tuple(ids_BL.shape)}; give (rows, tokens), with at least one token each"
        )
    if attention_mask is not None and attention_mask.shape != ids_BL.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the prompts {tuple(ids_BL.shape)}; "
            "give one flag per token"
        )
    valid = None if attention_mask is None else attention_mask.bool()
    counts = [ids_BL.shape[1]] * len(ids_BL) if valid is None else valid.sum(1).tolist()
    for row, count in enumerate(counts):
        if count == 0:
            raise ValueError(
                f"prompt {row} is empty; give at least one token, such as the beginning-of-text token"
            )
        if max_length is not None and count > max_length:
            raise ValueError(
                f"prompt {row} has {count} tokens, more than the {max_length} of {limit}; shorten it, or "
                "raise the limit"
            )
    if vocab_size is not None:
        known = (ids_BL >= 0) & (ids_BL < vocab_size)
        if valid is not None:
            known = known | ~valid
        if not bool(known.all()):
            row, column = (~known).nonzero()[0].tolist()
            raise ValueError(
                f"prompt {row} has token {int(ids_BL[row, column])}, and the model knows 0 to "
                f"{vocab_size - 1}; use the model's own tokenizer"
            )
    return None if valid is None or bool(valid.all()) else valid


def check_stop_token_ids(stop_token_ids: Sequence[int], *, vocab_size: int) -> list[int]:
    """Return the stop tokens as a list of integers.

    Raises:
        ValueError: for a single number, or tokens outside the vocabulary.

    """
    if isinstance(stop_token_ids, Integral):
        raise ValueError(
            f"stop_token_ids is the number {stop_token_ids}; give a list of tokens, [{stop_token_ids}]"
        )
    for token in stop_token_ids:
        if not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise ValueError(
                f"stop_token_ids have {token!r}, and the model knows 0 to {vocab_size - 1}; use the model's "
                "own tokenizer"
            )
    return [int(token) for token in stop_token_ids]


def lay_out(
    prompts: Prompts, attention_mask: Tensor | None = None, *, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return prompts as (B, L) int64 IDs and where they are real; None: everywhere.

    Shorter lists are padded on the right, so that the windows of a row, which count positions, do not depend
    on the length of other rows.

    Raises:
        ValueError: for no prompts, an empty one, text, non-integer numbers, or a mask in addition to lists.

    """
    if isinstance(prompts, Tensor):
        mask = None if attention_mask is None else attention_mask.to(device)
        return _whole(prompts, "the tensor of prompts").to(device), mask
    if attention_mask is not None:
        raise ValueError("attention_mask was given with lists of tokens, which do not need it; omit it")
    rows = token_rows(prompts, device=device)
    ids, lengths = pad_sequence(rows, batch_first=True), [len(row) for row in rows]
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    return ids, mask if min(lengths) < max(lengths) else None


def token_rows(
    texts: Sequence[Sequence[int] | Tensor], *, device: torch.device, name: str = "prompt"
) -> list[Tensor]:
    """Return the tokens of each text, (L,) int64; ``name`` is the name of a text in errors.

    Raises:
        ValueError: for no texts, an empty one, or one that is not a list of integers.

    """
    for number, row in enumerate([texts] if isinstance(texts, str) else texts):
        if isinstance(row, str):
            raise ValueError(
                f"{name} {number} is the text {row[:40]!r}; give its tokens, from the model's own tokenizer"
            )
    rows: list[Tensor] = []
    for number, text in enumerate(texts):
        row = torch.as_tensor(text)
        row = (_whole(row, f"{name} {number}") if row.numel() else row).to(device)
        rows.append(row)
        if row.ndim == 0:
            raise ValueError(
                f"{name} {number} is the number {int(row)}; give a list of {name}s, each a list of tokens, "
                "such as [[0, 3, 2]] for a single one"
            )
        if row.ndim != 1 or not row.numel():
            raise ValueError(
                f"{name} {number} has shape {tuple(row.shape)}; give a list of tokens, at least one"
            )
    if not rows:
        raise ValueError(f"there are no {name}s; give at least one")
    return rows


def _whole(tokens: Tensor, name: str) -> Tensor:
    """Return tokens as int64.

    Raises:
        ValueError: for a dtype other than an integer, which the conversion would truncate.

    """
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{name} holds {tokens.dtype}; give tokens as integers")
    return tokens.long()
