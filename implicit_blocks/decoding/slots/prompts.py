"""Prompts of texts that enter slots: those that are alike are solved together, on a GPU by captured calls.

A search over a prompt has some 20 calls of the map. Launched kernel by kernel they take the host 0.1 s, and
no text is decoded meanwhile.

Shape legend: B prompts, L tokens of the longest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from implicit_blocks.cuda.procedures import put_
from implicit_blocks.decoding.prompts import needed_ids
from implicit_blocks.decoding.slots.batch import SlotBatch
from implicit_blocks.decoding.slots.texts import Text
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.map_graphs import MapGraphs
from implicit_blocks.models.outputs import Encoded
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.windows import SequenceState

TOGETHER = 8192
"""The maximum number of tokens of prompts that are solved together."""
CAPTURED = 2048
"""The maximum number of tokens of prompts that a graph solves together, padding included."""
SHORTEST = 16
"""The minimum length to which captured prompts are padded."""
SHAPES = 36
"""The number of shapes of captured prompts: rows and lengths are powers of two."""

Entering = Sequence[tuple[int, Text]]
"""Slots, and the texts that enter them."""


class SlotPrompts:
    """Solves the prompts of texts that enter slots.

    Args:
        batch: the slots.
        window_length: number of tokens per window; None: one window.

    """

    def __init__(self, batch: SlotBatch, *, window_length: int | None) -> None:
        self.batch, self.window_length = batch, window_length
        implicit = isinstance(batch.model, ImplicitLM) and window_length is None
        self.captured = (
            implicit and batch.captured is not None and all(each.windows for each in batch.every_states())
        )
        """Whether short prompts are solved by graphs of the map."""
        self._graphs = MapGraphs(most=SHAPES, compact=False)

    def groups(self, entering: Entering) -> list[Entering]:
        """Return groups of texts with the same limits whose prompts are solved together."""
        by_limits: dict[tuple[float | None, int | None], list[tuple[int, Text]]] = defaultdict(list)
        for slot, text in entering:
            by_limits[text.request.tolerance, text.request.max_iterations].append((slot, text))
        groups: list[Entering] = []
        for group in by_limits.values():
            group.sort(key=lambda one: one[1].length)  # those of similar lengths need little padding
            first = 0
            for end in range(1, len(group) + 1):
                if end == len(group) or not self._are_alike(group[first : end + 1]):
                    groups.append(sorted(group[first:end], key=lambda one: one[0]))  # as they entered
                    first = end
        return sorted(groups, key=lambda group: group[0][0])

    def _are_alike(self, group: Entering) -> bool:
        """Whether these prompts, the last of which is the longest, are solved together."""
        shortest, longest = group[0][1].length, group[-1][1].length
        fits = self.captured and _padded(len(group), longest) is not None
        return fits or (shortest == longest and len(group) * longest <= TOGETHER)

    def solve(self, group: Entering) -> Solution | None:
        """Solve the prompts of a group, commit each to its slot, and return their solution.

        Their limits also apply to the next searches of the slots. A single prompt that is not captured is
        written in place; for others, keys and states are copied to the slots.
        """
        batch, slots = self.batch, [slot for slot, _ in group]
        prompts, request = [text.ids for _, text in group], group[0][1].request
        options = limited_options(batch, slots, request.tolerance, request.max_iterations)
        lengths = [text.length for _, text in group]
        shape = _padded(len(group), max(lengths)) if self.captured else None
        if shape is not None:
            encoded = self._solve_captured(prompts, shape, options)
        else:
            if len(group) == 1:
                layers = tuple(states.prefill(slots[0]) for states in batch.every_states())
                state = SequenceState(1, 0, batch.lengths_S.new_zeros(1), layers)
            else:
                state = batch.model.initial_state(len(group), max_seq_len=lengths[0])
            encoded = encode_tokens(
                batch, torch.cat(prompts), state, options, window_length=self.window_length
            )
        commit_prompts(batch, slots, encoded, lengths=lengths)
        return encoded.solution

    def _solve_captured(
        self, prompts: list[Tensor], shape: tuple[int, int], options: SearchOptions
    ) -> Encoded:
        """Solve prompts by graphs of the map: padding at the end and repeated rows give few shapes."""
        batch, (rows, length) = self.batch, shape
        prompts = prompts + prompts[:1] * (rows - len(prompts))
        ids_BL = pad_sequence([prompt[0] for prompt in prompts], batch_first=True)
        ids_BL = pad(ids_BL, (0, length - ids_BL.shape[1]))
        lengths_B = torch.tensor([prompt.shape[1] for prompt in prompts])
        mask_BL = torch.arange(length) < lengths_B[:, None]  # on the host, where it is read
        stack, state = batch.model.backbone, batch.model.initial_state(rows)
        before, stack.graphs = stack.graphs, stack.graphs or self._graphs
        try:
            return encode_tokens(batch, ids_BL, state, options, attention_mask=mask_BL)
        finally:
            stack.graphs = before


def _padded(rows: int, length: int) -> tuple[int, int] | None:
    """Return rows and tokens of a captured call for prompts up to this length; None for too many tokens."""
    shape = 1 << (rows - 1).bit_length(), max(SHORTEST, 1 << (length - 1).bit_length())
    return shape if shape[0] * shape[1] <= CAPTURED else None


def limited_options(
    batch: SlotBatch, slots: Sequence[int], tolerance: float | None, max_iterations: int | None
) -> SearchOptions:
    """Set the limits of these slots, and return the options of a search with them."""
    search, stopping = batch.search, batch.search.stopping
    if search.limits is None or stopping is None:
        return batch.options
    stopping = SearchOptions(tolerance=tolerance, max_iterations=max_iterations).stopping(stopping)
    search.set_limits(slots, stopping.tolerance, stopping.max_iterations)  # numbers, also if given as strings
    return batch.options.limited(tolerance, max_iterations)


def commit_prompts(
    batch: SlotBatch, slots: Sequence[int], encoded: Encoded, *, lengths: Sequence[int], before: int = 0
) -> None:
    """Store the states and outputs of prompts in their slots; the first rows are those of the slots.

    ``encoded`` is that of the tokens after the first ``before`` ones.
    """
    assert encoded.state is not None
    ends = batch.ends
    # All at once: a launch for each of 256 slots takes a while.
    of_slots = torch.empty(3, len(slots), dtype=torch.int64, device=batch.device)
    put_(of_slots, [slots, lengths, range(len(slots))])
    slots_B, lengths_B, rows_B = of_slots.unbind()
    whole = encoded.state.batch_size == len(slots)
    for block, states, layer in zip(
        batch.model.state_blocks(), batch.every_states(), encoded.state.layers, strict=True
    ):
        own = layer if whole else block.mixer.select_rows(layer, rows_B)
        states.commit_rows(block.mixer, slots, slots_B, own)
    batch.lengths_S[slots_B] = lengths_B
    batch.busy_S.index_fill_(0, slots_B, True)
    ends.pending_S.index_fill_(0, slots_B, False)
    last = rows_B, lengths_B - 1 - before
    ends.hidden_SD[slots_B] = encoded.hidden_BLD[last].to(ends.hidden_SD.dtype)
    if encoded.solution is not None:
        ends.core_SC[slots_B] = encoded.solution.z[last].to(ends.core_SC.dtype)
        for name, value_B in _of_tokens(encoded.solution, *last).items():
            kept_S = getattr(batch.search, name)
            kept_S[slots_B] = value_B.to(kept_S.dtype)


def _of_tokens(solution: Solution, rows_B: Tensor, positions_B: Tensor) -> dict[str, Tensor]:
    """Return iterations, residual and converged of one token of each row, or of the row, each (B,)."""
    names = ("iterations", "residual", "converged")
    if solution.token_iterations is None:
        return {name: getattr(solution, name)[rows_B] for name in names}
    return {name: getattr(solution, f"token_{name}")[rows_B, positions_B] for name in names}


def encode_tokens(
    batch: SlotBatch,
    ids_BL: Tensor,
    state: SequenceState,
    options: SearchOptions,
    *,
    window_length: int | None = None,
    attention_mask: Tensor | None = None,
) -> Encoded:
    """Solve tokens after ``state``, and return them with the state after them."""
    with batch.precision():
        encoded: Encoded = batch.model.encode(
            batch.model.embedding(ids_BL),
            ids_BL=needed_ids(batch.model, ids_BL),
            attention_mask=attention_mask,
            state=state,
            return_state=True,
            window_length=window_length,
            search=options,
            weights=batch.weights,
        )
    return encoded
