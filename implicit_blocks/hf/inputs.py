"""Conversion of the arguments of transformers callers to the library's.

Shape legend: B batch, L tokens of this call, T tokens so far, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.hf.cache import ImplicitCache
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.windows import SequenceState

_OF_THE_LIBRARY = frozenset({"start", "exit"})
"""Options of a search that the transformers classes do not offer."""
_KNOBS = (*(name for name in SearchOptions.names() if name not in _OF_THE_LIBRARY), "window_length")
_WITHOUT_EFFECT = frozenset(
    {
        "num_items_in_batch",  # used by the loss
        "token_type_ids",  # added by tokenizers
        "cache_position",
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),  # position_ids suffice
        "seq_idx",
    }
)
_UNAVAILABLE = ("output_attentions",)


def check_options(model: str, options: Mapping[str, Any]) -> None:
    """Reject unknown arguments, and outputs that the models do not have.

    Raises:
        ValueError: attention weights are requested.
        TypeError: an argument is unknown.

    """
    for name, value in options.items():
        if name in _UNAVAILABLE:
            if value:
                raise ValueError(f"{model} cannot output {name.removeprefix('output_')}; omit {name}")
        elif name in _OF_THE_LIBRARY:
            raise TypeError(
                f"{model}.forward has no argument {name!r}; call the library's model, "
                "implicit_blocks.hf.to_library(model), which has it"
            )
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"{model}.forward has no argument {name!r}; {did_you_mean(name, _KNOBS)}")


def one_cache(name: str, given: Mapping[str, Any]) -> ImplicitCache | None:
    """Return the cache passed by the argument that the family uses.

    Raises:
        ValueError: the cache is passed by the other family's argument, or has the wrong type.

    """
    mine: ImplicitCache | None = None
    for other, cache in given.items():
        if cache is None:
            continue
        if other != name:
            raise ValueError(f"pass the cache of these models as {name}, not as {other}")
        if not isinstance(cache, ImplicitCache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; pass an implicit_blocks.hf.ImplicitCache, "
                "or no cache and use_cache=True"
            )
        mine = cache
    return mine


def mask_of_these(attention_mask: Tensor | None, x_BLD: Tensor, *, past: int) -> Tensor | None:
    """Return the mask of this call's tokens, (B, L), from a mask of these or of all tokens so far."""
    if attention_mask is None:
        return None
    batch, length = x_BLD.shape[:2]
    if tuple(attention_mask.shape) not in ((batch, length), (batch, past + length)):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected one flag per token, "
            f"{(batch, length)}, or with the {past} previous tokens {(batch, past + length)}"
        )
    return attention_mask[:, -length:]


def documents_of(
    position_ids: Tensor | None, mask_BL: Tensor | None, x_BLD: Tensor, state: SequenceState | None
) -> Tensor | None:
    """Return the documents that positions separate, (B, L) int64; None if they only count the tokens.

    Raises:
        ValueError: positions neither count the tokens nor restart at 0.

    """
    if position_ids is None:
        return None
    batch, length = x_BLD.shape[:2]
    if tuple(position_ids.shape) not in ((1, length), (batch, length)):
        raise ValueError(f"position_ids have shape {tuple(position_ids.shape)}; expected {(batch, length)}")
    positions = position_ids.expand(batch, length)
    first = 0 if state is None else state.next_position[:, None]
    if mask_BL is None:
        steps = positions.new_ones(batch, length).cumsum(1)
        counted = positions == first + steps - 1
    else:
        counted = (positions == first + mask_BL.cumsum(1) - 1) | ~mask_BL.bool()
    if bool(counted.all()):
        return None
    unpadded = mask_BL is None or bool(mask_BL.all())
    starts = positions == 0
    follows = positions[:, 1:] == positions[:, :-1] + 1
    if state is None and unpadded and bool(starts[:, 0].all()) and bool((starts[:, 1:] | follows).all()):
        return starts.cumsum(1) - 1
    raise ValueError(
        "position_ids neither count the unmasked tokens nor restart at 0 with each document; omit them"
    )
