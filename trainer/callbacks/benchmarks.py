"""The callback ``benchmarks``: runs evaluation tasks with every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from implicit_blocks.hf.tokenizer import check_tokenizer_fits, load_tokenizer
from trainer.baselines.transformers_model import TransformersLM
from trainer.callbacks.base import Callback, CallbackContext
from trainer.evaluation.evaluate import EvaluationResult
from trainer.evaluation.tasks import build_tasks, locate_all, require_packages
from trainer.reporting.metrics import MetricsFile
from trainer.specs.callbacks import BenchmarksSpec

if TYPE_CHECKING:
    from trainer.evaluation.harness import HarnessLM

BENCHMARKS_FILE = "benchmarks.jsonl"


class Benchmarks(Callback):
    """Runs all tasks after every evaluation and appends a line to ``benchmarks.jsonl``.

    With several processes each one runs the tasks on its replica and rank 0 writes. Sharded models are not
    supported; evaluate their checkpoints by ``python -m trainer.evaluate``.
    """

    def __init__(self, spec: BenchmarksSpec) -> None:
        require_packages()
        self._spec = spec
        named = [(task.kind, task) for task in spec.tasks]
        locate_all(named, data=Path(spec.data))
        self._tasks = build_tasks(named, data=Path(spec.data))
        self._tokenizer: Any = load_tokenizer(Path(spec.tokenizer))

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Check the model and the tasks; remove rows that a resumed run will write again."""
        # RWKV halves weights in place when it is evaluated, and training would continue from them.
        if isinstance(run.model, TransformersLM) and run.model.rescales_weights:
            raise ValueError(
                "RWKV of transformers changes its weights when it is evaluated; remove the callback, and "
                "evaluate the checkpoints by python -m trainer.evaluate"
            )
        rows = getattr(run.spec.model, "padded_vocab_size", None)
        if rows is not None:
            check_tokenizer_fits(self._tokenizer, rows, name=self._spec.tokenizer)
        if any(isinstance(parameter, DTensor) for parameter in run.model.parameters()):
            raise ValueError(
                "the callback 'benchmarks' does not support sharded models; remove it, and evaluate the "
                "checkpoints by python -m trainer.evaluate"
            )
        from trainer.evaluation.scores import check_lengths  # needs packages that __init__ requires

        training = run.model.training
        check_lengths(
            self._lm(run), self._tasks, limit=self._spec.limit, truncate=self._spec.max_length is not None
        )
        run.model.train(training)
        if run.is_main:
            again = step == run.spec.total_steps  # a run resumed at its end is evaluated again
            MetricsFile(run.folder / BENCHMARKS_FILE).truncate_after(step - again)

    def on_evaluation(self, run: CallbackContext, *, step: int, results: Sequence[EvaluationResult]) -> None:
        """Run all tasks and write the scores."""
        from trainer.evaluation.scores import run_tasks

        training = run.model.training
        (scores,) = run_tasks(self._lm(run), self._tasks, limit=self._spec.limit)
        run.model.train(training)
        columns = ", ".join(f"{header} {value:.4g}" for header, value in scores.columns().items())
        if run.is_main:
            run.log(f"benchmarks after step {step}: {columns}")
            file = MetricsFile(run.folder / BENCHMARKS_FILE)
            file.write({"step": step, **scores.as_row()})
            file.close()

    def _lm(self, run: CallbackContext) -> HarnessLM:
        """Return the model for lm-eval, in evaluation mode."""
        from trainer.evaluation.eval_model import as_transformers, longest_request
        from trainer.evaluation.harness import HarnessLM

        return HarnessLM(
            as_transformers(run.model).eval(),
            self._tokenizer,
            batch_size=self._spec.batch_size,
            max_length=self._spec.max_length or longest_request(run.model),
            window=run.spec.data.seq_len,
            precision=run.spec.training.precision,
        )
