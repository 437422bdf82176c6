"""How many tokens are in flight by default, how the number falls, and which models do not support several.

Shape legend: S slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache

import torch

from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.decoding.slots.wavefront import Wavefront
from implicit_blocks.exits import FixedExitSpec
from implicit_blocks.interfaces import SearchingSolver, SlotStates
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.specs.base import require_count

_LOG = logging.getLogger(__name__)

COLUMNS = 16
"""The default number of tokens in a call: the columns of a product by matrix units.

Reading the weights takes most of the time of such a call, which is nearly the same for one column and for 16.
"""
SIZES = (8, 4)
"""The default numbers of tokens in flight of a text, the first of which fits into the columns of a call."""


def most_in_flight(asked: int | None, *, texts: int, max_seq_len: int, fused: bool) -> int:
    """Return the maximum number of tokens in flight per text; 1: sequential decoding.

    Args:
        asked: the number asked for; None: the default.
        texts: the number of texts in a call: calls on many of them are bound by arithmetic.
        max_seq_len: the room of a text in tokens.
        fused: whether calls are captured, with weights in full precision: other calls cost more for every
            token in flight.

    Raises:
        ValueError: the number asked for is below 1 or above ``max_seq_len``.

    """
    if asked is not None:
        require_count("max_in_flight", asked)
        if asked > max_seq_len:
            raise ValueError(
                f"max_in_flight is {asked}, and max_seq_len leaves room for {max_seq_len} tokens; choose at "
                f"most {max_seq_len}, or increase max_seq_len"
            )
        return asked
    fitting = (size for size in SIZES if size * texts <= COLUMNS and size <= max_seq_len)
    return next(fitting, 1) if fused else 1


def drain(wavefront: Wavefront, call: Callable[[], None]) -> None:
    """Commit all solved tokens by a ``call``, and drop the provisional ones.

    Every slot that continues then has one token in flight, which begins anew.
    """
    flight, count_S, lengths_S = wavefront.flight, wavefront.count_S, wavefront.batch.lengths_S
    flying_S, solved_S = count_S > 0, flight.done.sum(1)
    at_S1 = solved_S.clamp(max=wavefront.tokens - 1)[:, None]
    begun_S = (count_S > solved_S) & ~flight.fresh.gather(1, at_S1)[:, 0]
    wavefront.counts_3[2] += begun_S.sum()
    count_S.copy_(solved_S)
    call()
    count_S.copy_(flying_S & (lengths_S < wavefront.limit_S))
    flight.fresh[:, 0] = count_S > 0


def land(wavefront: Wavefront) -> None:
    """Return the single tokens in flight of all slots to the batch, as ``drain`` leaves them."""
    batch, flying_S = wavefront.batch, wavefront.count_S > 0
    batch.tokens_S.copy_(torch.where(flying_S, wavefront.flight.tokens[:, 0], batch.tokens_S))
    batch.busy_S |= flying_S
    wavefront.count_S.zero_()
    wavefront.flight.fresh.zero_()


def wavefront_of(batch: SlotBatch, tokens: int, *, asked: bool) -> Wavefront | None:
    """Return the tokens in flight of a batch; None for sequential decoding, with the reason in the log.

    Where no number was ``asked`` for, whole calls are fused.
    """
    if tokens == 1 or not decodes_in_flight(batch.model, batch.options, batch.every_states(), asked=asked):
        return None
    wavefront = Wavefront(batch, tokens=tokens)
    if not asked and wavefront.whole is None:
        report_sequential("calls on several tokens are not fused for this model or search", asked)
        return None
    return wavefront


def decodes_in_flight(
    model: LanguageModel, options: SearchOptions, states: Iterable[SlotStates] | None = None, *, asked: bool
) -> bool:
    """Whether tokens can be in flight; the reason why not is logged once.

    Args:
        model: the model.
        options: of the searches.
        states: the states of all layers; None: small ones are made.
        asked: whether a number was asked for, so that the log warns.

    """
    if not isinstance(model, ImplicitLM):  # one call per token
        return False
    reason = _of_search(model, options)
    try:
        if reason is None:
            reason = _of_states(_small_states(model) if states is None else states)
    except ValueError as error:  # a mixer without slots
        reason = str(error)
    if reason is not None:
        report_sequential(reason, asked)
    return reason is None


def _of_search(model: ImplicitLM, options: SearchOptions) -> str | None:
    solver, stopping = model.search_config(options)
    criterion = model.spec.at_evaluation.exit if options.exit is None else options.exit
    if model.core_loops > 1:
        return "the model keeps one state per loop"
    if options.loops is not None or isinstance(criterion, FixedExitSpec):
        return "every token takes a fixed number of loops"
    if criterion.kind != "residual":
        return f"the exit criterion {criterion.kind!r} ends a search before its fixed point"
    if stopping.tolerance == 0:
        return "no search reaches the tolerance 0"
    if options.warm_start:
        return "warm_start begins at the solution of the token before"
    if options.moving_average is not None:
        return "moving_average averages the iterates of one map"
    if isinstance(solver, SearchingSolver):
        return f"the solver {type(solver).__name__} has a stopping rule of its own"
    return None


def _of_states(states: Iterable[SlotStates]) -> str | None:
    for each in states:
        if not each.windows:
            return f"{type(each).__name__} cannot mix provisional tokens (SlotStates.windows)"
    return None


def _small_states(model: ImplicitLM) -> Iterable[SlotStates]:
    weight = model.embedding.weight
    for block in model.state_blocks():
        yield block.mixer.slots(1, device=weight.device, dtype=weight.dtype, max_seq_len=1)


@cache
def report_sequential(reason: str, asked: bool) -> None:
    """Log once why tokens are decoded one after the other; warn if several in flight were ``asked`` for."""
    log = _LOG.warning if asked else _LOG.info
    log("tokens are decoded one after the other, without tokens in flight: %s", reason)
