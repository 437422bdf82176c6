"""Continuous decoding: rows at different tokens, and at different iterations of them, share every call.

A batch that waits for its slowest row at every token pays for the longest search each time. Here a row
whose search has ended commits its token, chooses the next and begins to search for that, while the others go
on with theirs; and a prompt that waits takes the place of a text that has ended.

Shape legend: S lanes, R of them in a step, D model width, U injection width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.backbone import BoundMap
from implicit_blocks.committed import Committed
from implicit_blocks.decoding.generation import check_model
from implicit_blocks.decoding.lane_search import LaneSearch
from implicit_blocks.decoding.prompts import check_prompts, lay_out
from implicit_blocks.decoding.sampling import Sampling, uniforms
from implicit_blocks.interfaces import Window
from implicit_blocks.model import LanguageModel
from implicit_blocks.search_options import SearchOptions


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be continued: by ``max_new_tokens``, or up to the first of ``stop_tokens``.

    ``seed`` is of the generator that the row draws with.
    """

    prompt: Sequence[int] | Tensor
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class NewToken:
    """A token that was made: of which request, and whether it is the last.

    ``logits`` (V,) are those that it was chosen from; ``iterations``, ``residual`` and ``converged`` say how
    the search behind them went, and are None in explicit models.
    """

    request: int
    token: int
    last: bool
    logits: Tensor
    iterations: int | None = None
    residual: float | None = None
    converged: bool | None = None


class ContinuousDecoder:
    """Continues any number of prompts, ``lanes`` of them at a time; each as it would be continued alone.

    ```python
    decoder = ContinuousDecoder(model, lanes=16, capacity=512)
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=100))
    for made in decoder.run():
        print(made.request, made.token)
    ```

    A step calls the map once, on all busy lanes. States have their room from the start: the keys of
    attention layers are written where they stay, and lanes are indexed, not copied. The busy lanes are
    filled up to one of ``buckets`` sizes, so that few shapes occur.

    Pays where searches are of unequal length or texts are; where every token takes the same number of
    iterations, ``generate`` does the same with less bookkeeping.

    Args:
        model: of this library, in evaluation mode; its weights must not change while texts are made.
        lanes: texts in work at once.
        capacity: tokens that a text may have, its prompt included.
        buckets: sizes of a step, each at most ``lanes``; None: ``lanes`` and its half, quarter and eighth.
        window_length: of the windows that prompts are solved in; None: one.
        tolerance: of the searches, instead of the spec's; so are the next four, as in ``forward``.
        max_iterations: of each search.
        damping: of the solver.
        warm_start: begin each token's search at the solution of the one before.
        moving_average: α of an average over the iterates, for noisy maps.

    Raises:
        ValueError: for sizes that make no sense, a model in training mode, or a mixer that has no lanes.

    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        *,
        lanes: int,
        capacity: int,
        buckets: Sequence[int] | None = None,
        window_length: int | None = None,
        tolerance: float | None = None,
        max_iterations: int | None = None,
        damping: float | None = None,
        warm_start: bool = False,
        moving_average: float | None = None,
    ) -> None:
        check_model(model)
        for name, size in (("lanes", lanes), ("capacity", capacity)):
            if size < 1:
                raise ValueError(f"{name} is {size}; choose at least 1")
        sizes = {-(-lanes // part) for part in (1, 2, 4, 8)} if buckets is None else {*buckets, lanes}
        if not all(1 <= size <= lanes for size in sizes):
            raise ValueError(f"buckets are {sorted(sizes)}; choose sizes from 1 to the {lanes} lanes")
        self.model, self.capacity, self.buckets = model, capacity, sorted(sizes)
        self.window_length = window_length
        self.options = SearchOptions(
            tolerance=tolerance,
            max_iterations=max_iterations,
            damping=damping,
            warm_start=warm_start,
            moving_average=moving_average,
        )
        self.weights = model.hold_weights()
        embedding = model.embedding.weight
        self.device = embedding.device
        self.states = [
            block.mixer.lanes(lanes, device=self.device, dtype=embedding.dtype, capacity=capacity)
            for block in model.backbone.blocks()
        ]
        solver, stopping = model.how_to_search(self.options) or (None, None)
        self.search = LaneSearch(
            solver,
            stopping,
            lanes=lanes,
            width=model.spec.d_model,
            device=self.device,
            dtype=model.stream_dtype,
            moving_average=moving_average,
        )
        self.lengths_S = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        self.u_SU: Tensor | None = None  # made with the first token, which knows its type
        self.texts: list[_Text | None] = [None] * lanes
        self.waiting: deque[_Text] = deque()
        self.submitted = 0
        self.calls = 0
        """Calls of the map on busy lanes so far, those for prompts left out."""
        self.rows_called = 0
        """Rows of those calls, filled-up ones included."""
        self._map: tuple[BoundMap, Tensor, Tensor] | None = None

    def submit(self, request: Request) -> int:
        """Let a prompt wait for a lane; return its number, counted from 0.

        Raises:
            ValueError: for a prompt that is empty, too long or has unknown tokens, or no tokens to be made.

        """
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; choose at least 1")
        ids, _ = lay_out([request.prompt], device=self.device)
        room = self.capacity - request.max_new_tokens
        limit = f"the capacity {self.capacity} without the {request.max_new_tokens} to be made"
        check_prompts(ids, vocab_size=self.model.spec.vocab_size, max_length=room, limit=limit)
        self.waiting.append(_Text(self.submitted, request, ids))
        self.submitted += 1
        return self.submitted - 1

    def run(self) -> Iterator[NewToken]:
        """Yield tokens as they are made, until no text is in work and none waits."""
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether a text is in work, or waits."""
        return bool(self.waiting) or any(text is not None for text in self.texts)

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Fill free lanes, call the map once, and return the tokens that this made, or none."""
        made = self._admit()
        if not any(text is not None for text in self.texts):
            return made
        f, rows, busy = self._bound()
        z = self.search.z[rows]
        committing = self.search.done[rows] & busy
        which = committing.nonzero().squeeze(1)
        self.calls += 1
        self.rows_called += len(rows)
        if len(which):
            mapped, after = f.commit(z[:, None])
            index = None if len(rows) == len(self.texts) else rows
            for lane_states, layer in zip(self.states, after, strict=True):
                lane_states.write(index, layer, committing)
        else:
            mapped = f(z[:, None])
        fz = mapped[:, 0]
        if self.search.solver is not None:
            self.search.take(rows, fz, busy & ~committing, lambda z_RD: f(z_RD[:, None])[:, 0])
        if len(which):
            lanes = rows[which]
            self.lengths_S[lanes] += 1
            made += self._choose(lanes, fz[which])
        return made

    def _bound(self) -> tuple[BoundMap, Tensor, Tensor]:
        """Return the map of the lanes in the next call, which they are, and which of them are busy."""
        if self._map is not None:
            return self._map
        busy = [lane for lane, text in enumerate(self.texts) if text is not None]
        idle = [lane for lane, text in enumerate(self.texts) if text is None]
        size = next(size for size in self.buckets if size >= len(busy))
        chosen = sorted(busy + idle[: size - len(busy)])
        rows = torch.tensor(chosen, device=self.device)
        index = None if size == len(self.texts) else rows
        lengths = self.lengths_S[rows]
        window = Window(
            batch_size=size,
            start=1,  # at least; how many each lane has is in the states
            length=1,
            positions_BL=lengths[:, None],
            dtype=self.model.stream_dtype,
        )
        f = self.model.backbone.bind(
            window,
            u_BLU=None if self.u_SU is None else self.u_SU[rows][:, None],
            states=tuple(states.at(index, lengths) for states in self.states),
            start_BLD=self.search.z[rows][:, None],
            weights=self.weights,
        )
        taken = torch.tensor([self.texts[lane] is not None for lane in chosen], device=self.device)
        self._map = f, rows, taken
        return self._map

    # ------------------------------------------------------------------------------------ tokens

    def _admit(self) -> list[NewToken]:
        """Solve the prompts that find a free lane, each by itself, and choose their first tokens."""
        made: list[NewToken] = []
        for lane in range(len(self.texts)):
            while self.waiting and self.texts[lane] is None:  # again, where a text ends with its first token
                self.texts[lane] = text = self.waiting.popleft()
                state = Committed(
                    1,
                    0,
                    torch.zeros(1, dtype=torch.int64, device=self.device),
                    tuple(states.enter(lane) for states in self.states),
                )
                encoded = self.model.encode(
                    self.model.embedding(text.ids),
                    state=state,
                    return_state=True,
                    window_length=self.window_length,
                    search=self.options,
                    weights=self.weights,
                )
                assert encoded.state is not None
                for states, layer in zip(self.states, encoded.state.layers, strict=True):
                    states.settle(lane, layer)
                lanes = torch.tensor([lane], device=self.device)
                self.lengths_S[lane] = text.ids.shape[1]
                solution = encoded.solution
                if solution is not None:
                    of_tokens = solution.token_iterations is not None
                    for name in ("iterations", "residual", "converged"):
                        last = (
                            getattr(solution, f"token_{name}")[:, -1]
                            if of_tokens
                            else getattr(solution, name)
                        )
                        getattr(self.search, name)[lanes] = last
                made += self._choose(lanes, encoded.hidden_BLD[:, -1])
        return made

    def _choose(self, lanes: Tensor, hidden_RD: Tensor) -> list[NewToken]:
        """Choose the next token of lanes whose last is committed, and begin to search for its solution."""
        logits = self.model.predict(hidden_RD)[:, : self.model.spec.vocab_size]
        made, on = [], []
        in_work = [text for lane in lanes.tolist() if (text := self.texts[lane]) is not None]
        tokens = _chosen(logits, in_work)
        reports = self._reports(lanes)
        for number, (lane, text) in enumerate(zip(lanes.tolist(), in_work, strict=True)):
            last = text.take(tokens[number])
            new = NewToken(text.number, tokens[number], last, logits[number], *reports[number])
            made.append(new)
            if new.last:
                self.texts[lane] = None
                self.lengths_S[lane] = 0
            else:
                on.append(number)
        self._map = None
        if on:
            chosen = torch.tensor([[made[number].token] for number in on], device=self.device)
            index = torch.tensor(on, device=self.device)
            x = self.model.embedding(chosen)
            u, start = self.model.inject(x, self.weights)
            if u is not None:
                if self.u_SU is None:
                    self.u_SU = u.new_zeros(len(self.texts), u.shape[-1])
                self.u_SU[lanes[index]] = u[:, 0]
            warm = self.options.warm_start and u is not None
            self.search.begin(lanes[index], hidden_RD[index].to(start.dtype) if warm else start[:, 0])
        return made

    def _reports(self, lanes: Tensor) -> list[tuple[Any, ...]]:
        """Return iterations, residual and converged of the searches behind these lanes' last tokens."""
        if self.search.solver is None:
            return [()] * len(lanes)
        parts = (self.search.iterations, self.search.residual, self.search.converged)
        return list(zip(*(part[lanes].tolist() for part in parts), strict=True))


class _Text:
    """A text in work: its request, and how many tokens have been made."""

    def __init__(self, number: int, request: Request, ids: Tensor) -> None:
        self.number, self.request, self.ids = number, request, ids
        self.made = 0
        count, sampling = request.max_new_tokens, request.sampling
        self.uniform_N = uniforms([request.seed], count, device=ids.device)[0] if sampling.draws else None

    def take(self, token: int) -> bool:
        """Count a token; return whether it is the last."""
        self.made += 1
        return self.made == self.request.max_new_tokens or token in self.request.stop_tokens


def _chosen(logits_RV: Tensor, texts: Sequence[_Text]) -> list[int]:
    """Return the next token of each text, those with one rule for choosing at once."""
    tokens = [0] * len(texts)
    by_rule: dict[Sampling, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        by_rule[text.request.sampling].append(number)
    for sampling, numbers in by_rule.items():
        drawn = [u[texts[n].made] for n in numbers if (u := texts[n].uniform_N) is not None]
        chosen = sampling.choose(logits_RV[numbers], torch.stack(drawn) if drawn else None)
        for number, token in zip(numbers, chosen.tolist(), strict=True):
            tokens[number] = token
    return tokens
