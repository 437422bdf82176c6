"""What is measured of a trained run: held-out text, other numbers of loops, the fixed point, longer text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks.mixers import Attention, RopeScaling
from implicit_blocks.models.counting import expected_loops
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.solvers import AndersonSpec, PicardSpec
from implicit_blocks.specs import SolverSpec
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.data.token_folder import open_tokens
from trainer.data.tokens import TokenData
from trainer.evaluation.evaluate import EvaluationResult, evaluate
from trainer.experiments.common.runs import data_of, evaluation_set
from trainer.reporting.metrics import rounded
from trainer.specs.run import RunSpec

LOOPS = (16,)
"""Numbers of loops at which the whole reported set is evaluated, besides the trained one."""
FEW_LOOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of loops at which a part of it is evaluated."""
BUDGETS = (16, 32)
"""Iterations within which tokens may converge."""
TOLERANCE = 1e-3
SEARCHED = 32
"""Sequences of the searches for the fixed point, which run in float32."""
LONG, LONG_SEQUENCES = 8, 32
"""Length of long sequences, in training lengths, and their largest number."""
ROPE_SCALINGS = ("linear", "llama3")
"""Scalings of the rotary frequencies by that factor, applied to long sequences without further training."""
SOLVERS: dict[str, SolverSpec] = {
    "picard 1": PicardSpec(),
    "picard 0.8": PicardSpec(damping=0.8),
    "picard 0.65": PicardSpec(damping=0.65),
    "picard 0.5": PicardSpec(damping=0.5),
    "anderson": AndersonSpec(),
}
"""Solvers of the searches, by name."""
BRIEF_SOLVER = "picard 0.8"
"""The one with which most tokens converged, where only one search is made."""

CHOICE, REPORT = "choice", "report"
"""The sets: text held out from training, on which recipes are chosen; books that decide nothing."""


def evaluation_sets(spec: RunSpec, report: Path, *, sequences: int | None = None) -> dict[str, EvaluationSet]:
    """Return both sets of a run: the validation split of its tokens, and the tokens in ``report``.

    Raises:
        ValueError: there is no validation split, or a folder cannot be read.

    """
    data = data_of(spec)
    count = spec.evaluation.sequences if sequences is None else sequences
    if not data.evaluation_sets(spec.evaluation.at(spec.data.seq_len)):
        raise ValueError(
            f"the tokens in {getattr(spec.data, 'path', None)} have no validation split, on which recipes "
            "are chosen; tokenize with --validation"
        )
    chosen = evaluation_set(spec, data, spec.data.seq_len, count)
    books = TokenData(
        report,
        length=spec.data.seq_len,
        seed=spec.evaluation.seed,
        vocab_size=getattr(spec.model, "vocab_size", None),
    )
    reported = EvaluationSet(name=REPORT, source=books, sequences=min(count, books.samples))
    return {CHOICE: chosen, REPORT: reported}


def windows(sets: Mapping[str, EvaluationSet]) -> dict[str, Any]:
    """Return an identifier of the evaluation windows: text, number and length of the sequences."""
    return {
        name: {"text": dict(one.source.identity()), "sequences": one.sequences, "length": one.length}
        for name, one in sets.items()
    }


@dataclass(frozen=True, kw_only=True)
class Pieces(DataSource):
    """Each sequence of a source cut into pieces, so that short windows read the text of long ones."""

    source: DataSource
    pieces: int

    @property
    def vocab_size(self) -> int | None:
        """Number of token IDs."""
        return self.source.vocab_size

    @property
    def length(self) -> int:
        """Tokens per piece."""
        return self.source.length // self.pieces

    @property
    def samples(self) -> int | None:
        """Pieces per epoch."""
        return None if self.source.samples is None else self.source.samples * self.pieces

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`."""
        first, last = position // self.pieces, (position + count - 1) // self.pieces
        whole = self.source.batch(first, last - first + 1)
        cut = Batch(
            inputs=whole.inputs.view(-1, self.length).clone(),
            labels=whole.labels.view(-1, self.length).clone(),
        )
        skipped = position - first * self.pieces
        return cut.rows(skipped, skipped + count)

    def evaluation_sets(self, evaluation: Any) -> Mapping[str, EvaluationSet]:
        """Return none: this source is itself one of evaluation."""
        return {}


def long_sets(
    spec: RunSpec, report: Path, *, sequences: int = LONG_SEQUENCES
) -> tuple[EvaluationSet, EvaluationSet] | None:
    """Return long sequences of the reported text, and the same text cut to the training length.

    None: the text has no sequence of that length.
    """
    length = LONG * spec.data.seq_len
    if open_tokens(report).tokens <= length:
        return None
    source = TokenData(
        report, length=length, seed=spec.evaluation.seed, vocab_size=getattr(spec.model, "vocab_size", None)
    )
    count = min(sequences, source.samples)
    pieces = Pieces(source=source, pieces=LONG)
    return (
        EvaluationSet(name="long", source=source, sequences=count),
        EvaluationSet(name="cut", source=pieces, sequences=count * LONG),
    )


@dataclass(frozen=True)
class Measuring:
    """Measures a trained model.

    ``meanwhile`` is called between batches, as to keep other models training.
    """

    model: nn.Module
    spec: RunSpec
    device: torch.device
    meanwhile: Callable[[], object] = lambda: None

    def measure(self, sets: Mapping[str, EvaluationSet], report: Path | None) -> dict[str, Any]:
        """Return perplexities on both sets and at 8 times the length; of an implicit model also its searches.

        Without ``report``, the tokens of the reported text, only the perplexities on both sets, and of an
        implicit model one search for the fixed point (`BRIEF_SOLVER`).

        ``loops``, ``few_loops`` and ``fixed_point`` are measured on the reported set, the last two on its
        first sequences, in float32 and with ``trained_loops_few`` beside them. Each token's
        convergence is that of the search with prefix scope: within the tolerance, and so are those before it;
        ``token_within`` counts the tokens whose own residual is.
        """
        precision, depth = self.spec.training.precision, self.trained_loops
        trained = {} if depth is None else {"loops": depth}
        found: dict[str, Any] = {name: self._row(one, precision, **trained) for name, one in sets.items()}
        whole = sets[REPORT]
        few = EvaluationSet(name=REPORT, source=whole.source, sequences=min(SEARCHED, whole.sequences))
        if report is None:
            if depth is not None:
                found["trained_loops_few"] = self._row(few, "float32", loops=depth)
                found["fixed_point"] = list(self._searches(few, (BRIEF_SOLVER,), (max(BUDGETS),)))
            return found
        long = long_sets(self.spec, report, sequences=min(LONG_SEQUENCES, max(1, whole.sequences // LONG)))
        if long is not None:
            found["lengths"] = [self._length_row(one, precision, **trained) for one in long]
            found["lengths_scaled"] = self._scaled_lengths(long[0], precision, **trained)
        if depth is None:
            return found
        found["loops"] = [
            {"loops": n, **self._row(whole, precision, loops=n)} for n in sorted({*LOOPS, depth})
        ]
        found["few_loops"] = [
            {"loops": n, **self._row(few, "float32", loops=n)} for n in sorted({*FEW_LOOPS, depth})
        ]
        found["trained_loops_few"] = self._row(few, "float32", loops=depth)
        found["fixed_point"] = list(self._searches(few, SOLVERS, BUDGETS))
        if long is not None:
            search = {"tolerance": self.tolerance, "max_iterations": max(BUDGETS)}
            short = [EvaluationSet(name=one.name, source=one.source, sequences=n)
                     for one, n in zip(long, (8, 8 * LONG), strict=True) if one.sequences >= n]  # fmt: skip
            found["lengths_fixed_point"] = [self._length_row(one, "float32", **search) for one in short]
        return found

    def _searches(
        self, few: EvaluationSet, solvers: Iterable[str], budgets: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of a search with each solver and each limit of iterations."""
        for name in solvers:
            with self._solver(SOLVERS[name]):
                for most in budgets:
                    row = self._row(few, "float32", tolerance=self.tolerance, max_iterations=most)
                    yield {"solver": name, "max_iterations": most, "tolerance": TOLERANCE, **row}

    @property
    def trained_loops(self) -> int | None:
        """Mean number of loops of the last training steps; None: it is an explicit model."""
        return round(expected_loops(self.model.spec)) if isinstance(self.model, ImplicitLM) else None

    @property
    def tolerance(self) -> float:
        """`TOLERANCE` for the undamped map: a damped injection makes the measured residual smaller."""
        return TOLERANCE * float(getattr(getattr(self.model.spec, "injection", None), "damping", 1.0))

    @contextmanager
    def _solver(self, solver: SolverSpec) -> Iterator[None]:
        """Search with this solver in evaluation."""
        assert isinstance(self.model, ImplicitLM)
        before = self.model.spec
        chosen = before.at_evaluation.model_copy(update={"solver": solver})
        self.model.reconfigure(before.model_copy(update={"at_evaluation": chosen}))
        try:
            yield
        finally:
            self.model.reconfigure(before)

    def _evaluate(self, one: EvaluationSet, precision: str, **search: Any) -> EvaluationResult:
        def stop() -> bool:
            self.meanwhile()
            return False

        spec = self.spec.evaluation
        tokens = spec.batch_size * self.spec.data.seq_len
        (result,) = evaluate(
            self.model,
            [one],
            device=self.device,
            precision=precision,
            batch_size=max(1, tokens // one.length),
            last_tokens=spec.last_tokens,
            search=search,
            stop=stop,
        )
        return result

    def _length_row(self, one: EvaluationSet, precision: str, **search: Any) -> dict[str, Any]:
        return {"length": one.length, **self._row(one, precision, **search)}

    def _scaled_lengths(self, one: EvaluationSet, precision: str, **search: Any) -> list[dict[str, Any]]:
        """Return the row of long sequences with each scaling of the rotary frequencies, of attention only."""
        mixers = [module for module in self.model.modules() if isinstance(module, Attention)]
        fields = {"factor": LONG, "original_max_position_embeddings": self.spec.data.seq_len}
        rows = []
        for kind in ROPE_SCALINGS if mixers else ():
            for mixer in mixers:
                mixer.rope_scaling = RopeScaling.model_validate({"rope_type": kind, **fields})
            rows.append({"scaling": kind, **self._length_row(one, precision, **search)})
        for mixer in mixers:
            mixer.rope_scaling = None  # as in every recipe
        return rows

    def _row(self, one: EvaluationSet, precision: str, **search: Any) -> dict[str, Any]:
        result = self._evaluate(one, precision, **search)
        row = {
            "loss": rounded(result.loss, 7),
            "perplexity": rounded(result.perplexity),
            "sequences": result.sequences,
        }
        found = result.search
        if found is None:
            return row
        return {
            **row,
            "iterations": rounded(found.iterations),
            "residual": rounded(found.residual),
            "residual_max": rounded(found.residual_max),
            "token_converged": result.token_converged,
            "token_within": result.token_within,
            "diverged": rounded(found.diverged),
        }
