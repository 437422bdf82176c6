"""The lm-eval adapter: a backend for transformers models with attention masks and search statistics.

Shape legend: B requests of a batch, L tokens, T scored tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from implicit_blocks.layers import at_least_float32
from implicit_blocks.solution import Solution
from trainer.distributed import Ranks
from trainer.errors import DataError
from trainer.evaluation.eval_model import ANY_LENGTH, DEFAULT_LENGTH

Padding = Literal["right", "left"]
Scored = tuple[float, bool]


@dataclass(frozen=True, kw_only=True)
class SearchTally:
    """Statistics of the searches for many sequences.

    ``iterations`` is the mean over sequences of the slowest token's iterations, ``token_iterations`` the mean
    over tokens (None if they are not counted per token); ``non_converged`` and ``diverged`` are fractions of
    the sequences, ``residual`` is a mean and ``residual_max`` the maximum.
    """

    sequences: int
    iterations: float
    iterations_max: int
    token_iterations: float | None
    residual: float
    residual_max: float
    non_converged: float
    diverged: float

    @classmethod
    def of(
        cls,
        iterations: Tensor,
        residual: Tensor,
        converged: Tensor,
        diverged: Tensor,
        by_token: Tensor,
        tokens: Tensor,
    ) -> Self:
        """Return the statistics of sequences (B,); ``by_token`` sums the iterations of their tokens."""
        return cls(
            sequences=len(iterations),
            iterations=float(iterations.double().mean()),
            iterations_max=int(iterations.max()),
            token_iterations=float(by_token.sum() / tokens.sum()) if bool((by_token > 0).all()) else None,
            residual=float(residual.double().mean()),
            residual_max=float(residual.max()),
            non_converged=float((~converged).double().mean()),
            diverged=float(diverged.double().mean()),
        )


class HarnessLM(HFLM):  # type: ignore[misc]  # lm-eval is untyped
    """An lm-eval model for a causal model of transformers (or of the library, by ``from_library``).

    It differs from lm-eval's own backend in properties that must not affect the scores: padding is masked on
    either side, only scored logits are computed, and requests with the same tokens share one forward pass.
    With a ``max_length``, longer contexts are truncated on the left, as in lm-eval, and counted in
    ``truncated``. Several ranks share the requests, and all of them have all answers.

    Args:
        model: the model; it stays on its device.
        tokenizer: a tokenizer of transformers.
        batch_size: sequences per forward pass, sorted by length.
        padding: padding side.
        max_length: maximum tokens per request; None: unlimited. ``check_lengths`` checks requests in advance.
        window: window in tokens for scoring whole documents, at most ``max_length``.
        precision: ``bfloat16`` uses autocast.
        ranks: the processes, all of which make the same calls; None: one.

    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 16,
        padding: Padding = "right",
        max_length: int | None = None,
        window: int = DEFAULT_LENGTH,
        precision: Literal["float32", "bfloat16"] = "float32",
        ranks: Ranks | None = None,
    ) -> None:
        self._max_length: int = ANY_LENGTH if max_length is None else max_length
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=self._max_length,
            mixed_precision_dtype="bfloat16" if precision == "bfloat16" else None,
        )
        self.padding = padding
        self.window = min(window, self.max_length)
        self.ranks = Ranks(self.device) if ranks is None else ranks
        self.search: dict[str, float] = {}
        self.truncated = 0
        self._solutions: list[tuple[Tensor, ...]] = []
        self._counts: list[tuple[int, int]] | None = None

    # ------------------------------------------------------------------------------------ tally

    def restart(self, *, search: Mapping[str, float] | None = None) -> None:
        """Clear the statistics and set options of the search, which explicit models ignore."""
        self.search = dict(search or {})
        self.truncated = 0
        self._solutions = []

    def tally(self) -> SearchTally | None:
        """Return the statistics since ``restart``; None without searches (explicit models, generation).

        They are those of all ranks, each of which must call this.
        """
        solutions = [row for rows in self.ranks.gather_objects(self._solutions) for row in rows]
        return SearchTally.of(*map(torch.cat, zip(*solutions, strict=True))) if solutions else None

    def _note(self, solution: Solution | None, mask_BL: Tensor) -> None:
        if solution is None:
            return
        tokens = mask_BL.sum(1)
        by_token = torch.zeros_like(tokens)
        if solution.token_iterations is not None:
            by_token = (solution.token_iterations * mask_BL).sum(1)
        row = (solution.iterations, solution.residual.float(), solution.converged, solution.diverged)
        self._solutions.append(tuple(part.cpu() for part in (*row, by_token, tokens)))

    # ------------------------------------------------------------------------------------ lengths

    @property
    def limited(self) -> bool:
        """Whether requests can be too long."""
        return bool(self.max_length < ANY_LENGTH)

    def token_counts(self, requests: Sequence[Any]) -> list[tuple[int, int]]:
        """Return the number of context and continuation tokens of each request, without scoring.

        The continuation of a generation request is the maximum number of generated tokens plus one, because
        generated tokens are read as well. Whole documents are scored in windows and have no length here: (0,
        0).
        """
        counts: list[tuple[int, int]] = []
        for request in requests:
            if request.request_type == "loglikelihood":
                self._counts = counts
                try:
                    self.loglikelihood([request], disable_tqdm=True)  # encodes as lm-eval does
                finally:
                    self._counts = None
            elif request.request_type == "generate_until":
                context, options = request.args
                counts.append((len(self.tok_encode(context)), self._new_tokens(options) + 1))
            else:
                counts.append((0, 0))
        return counts

    def _new_tokens(self, options: Mapping[str, Any]) -> int:
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        return int(next((options[name] for name in names if name in options), self.max_gen_toks))

    # ------------------------------------------------------------------------------------ log-likelihoods

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole documents in windows, each token once."""
        longest, self._max_length = self._max_length, self.window
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            return found
        finally:
            self._max_length = longest

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Scored]:
        """Score the requests, with a progress bar on a terminal only."""
        quiet = disable_tqdm or not sys.stderr.isatty()
        found: list[Scored] = super().loglikelihood(requests, disable_tqdm=quiet)
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Scored]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        if self._counts is not None:
            self._counts += [(len(context), len(continuation)) for _, context, continuation in requests]
            return []
        # The model reads all tokens but the last; requests with equal inputs share a forward pass.
        readers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            tokens = context + continuation
            if len(continuation) > self.max_length:
                raise DataError(
                    f"a continuation has {len(continuation)} tokens, more than the model's maximum of "
                    f"{self.max_length}; raise it (--max-length), or omit the task"
                )
            self.truncated += len(tokens) > self.max_length + 1
            readers[tuple(tokens[-(self.max_length + 1) :][:-1])].append(number)
        # Longest first, so that out-of-memory errors occur early.
        inputs = sorted(readers, key=lambda tokens: (-len(tokens), tokens))
        size = override_bs or int(self.batch_size)
        batches = [inputs[first : first + size] for first in range(0, len(inputs), size)]

        def answer_share() -> dict[int, Scored]:
            answers = {}
            for batch in batches[self.ranks.rank :: self.ranks.world_size]:
                wanted = [
                    (row, number, requests[number][2])
                    for row, tokens in enumerate(batch)
                    for number in readers[tokens]
                ]
                for (_, number, _), answer in zip(wanted, self._score(batch, wanted), strict=True):
                    answers[number] = answer
            return answers

        shares = self.ranks.gather_objects(self.ranks.run_all(answer_share))
        found = {number: answer for share in shares for number, answer in share.items()}
        return [found[number] for number in range(len(requests))]

    @torch.no_grad()
    def _score(
        self, batch: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, int, list[int]]]
    ) -> Iterable[Scored]:
        """Score the requests of a batch: (row, index of the request, its continuation)."""
        lengths = [len(tokens) for tokens in batch]
        longest = max(lengths)
        starts = [0 if self.padding == "right" else longest - length for length in lengths]
        ids_BL = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask_BL = torch.zeros((len(batch), longest), dtype=torch.int64)
        for row, (tokens, start) in enumerate(zip(batch, starts, strict=True)):
            ids_BL[row, start : start + len(tokens)] = torch.tensor(tokens)
            mask_BL[row, start : start + len(tokens)] = 1
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        # Number of final tokens that cover all scored positions.
        kept = max(longest - ends[row] + len(continuation) for row, _, continuation in wanted)
        logits_BLV = self._logits(ids_BL.to(self.device), mask_BL.to(self.device), kept)
        left_out = longest - logits_BLV.shape[1]
        rows = torch.tensor([row for row, _, continuation in wanted for _ in continuation])
        columns = torch.tensor(
            [
                ends[row] - len(continuation) + position - left_out
                for row, _, continuation in wanted
                for position in range(len(continuation))
            ]
        )
        targets_T = torch.tensor([token for _, _, continuation in wanted for token in continuation])
        targets_T = targets_T.to(self.device)
        scores_TV = logits_BLV[rows.to(self.device), columns.to(self.device)].log_softmax(-1)
        log_likelihoods_T = scores_TV.gather(1, targets_T[:, None])[:, 0].cpu()
        is_greedy_T = (scores_TV.argmax(-1) == targets_T).cpu()
        counts = [len(continuation) for _, _, continuation in wanted]
        for scores, is_greedy in zip(log_likelihoods_T.split(counts), is_greedy_T.split(counts), strict=True):
            yield float(scores.sum()), bool(is_greedy.all())

    def _logits(self, ids_BL: Tensor, mask_BL: Tensor, kept: int) -> Tensor:
        with torch.autocast(
            self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        ):
            output = self.model(ids_BL, attention_mask=mask_BL, **self._savings(kept), **self.search)
        self._note(getattr(output, "solution", None), mask_BL)
        return at_least_float32(output.logits[:, -kept:])

    def _savings(self, kept: int) -> dict[str, Any]:
        """Return the arguments that save work, as far as the model's forward accepts them."""
        known = inspect.signature(self.model.forward).parameters
        wanted = {"use_cache": False, "logits_to_keep": kept}
        return {name: value for name, value in wanted.items() if name in known}

    # ------------------------------------------------------------------------------------ generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate the continuation of every request."""
        count = self.ranks.world_size
        own = list(requests[self.ranks.rank :: count])
        generate = super().generate_until
        shares = self.ranks.gather_objects(
            self.ranks.run_all(lambda: generate(own, disable_tqdm=disable_tqdm) if own else [])
        )
        return [shares[number % count][number // count] for number in range(len(requests))]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generate as lm-eval's backend does, with this search."""
        generated: Tensor = super()._model_generate(context, max_length, stop, **options, **self.search)
        return generated
