"""The command line: ``python -m trainer.evaluate --checkpoint RUN --tokenizer FILE --data DIR [--tasks …]``.

Evaluates a trained model on the benchmarks of the paper (or any other registered evaluation task) through
lm-eval, from local files, and writes ``results.json``, ``table.md`` and, if there are several points to plot,
``evaluation.png``.

The results are written after every task. A task that cannot run does not end the evaluation of the others.
Processes that torchrun has started share the requests of every task and the sequences of every set.

Exit codes: 0 success, 1 some tasks could not be run (named at the end), 2 the request cannot be carried out
(with a message), 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.hints import without_torch
from implicit_blocks._utils.programs import CommandParser
from trainer.cli.exit_codes import INTERRUPTED, LOST, refuse, short_of_memory
from trainer.errors import DataError
from trainer.evaluation.tasks import build_tasks, find_specs, require_packages
from trainer.reporting.display import counted

if TYPE_CHECKING:
    import torch

    from trainer.data.source import EvaluationSet
    from trainer.distributed import Ranks
    from trainer.evaluation.eval_model import EvalModel
    from trainer.evaluation.evaluate import EvaluationResult
    from trainer.evaluation.harness import HarnessLM
    from trainer.evaluation.scores import EvalTask, Scores

PAPER_TASKS = ("lambada", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")
_EXITS = {"tolerance": ("residual", "fixed"), "mean_iterations": ("residual",)}
_SETTINGS = ("limit", "batch_size", "tolerance", "mean_iterations", "max_length", "padding", "precision")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    command = CommandParser(
        prog="python -m trainer.evaluate", description="Evaluate a model on benchmarks, from local files."
    )
    add = command.add_argument
    add(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="a run directory, one of its checkpoints, a safetensors file, or a pretrained folder",
    )
    add("--spec", metavar="FILE", help="a YAML file or a zoo name (default: the run's own)")
    add("overrides", nargs="*", metavar="path.to.key=value", help="overrides of the spec")
    add("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json, a directory with one, or bytes")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="directory of the task files (data)")
    add(
        "--tasks",
        nargs="*",
        metavar="TASK",
        help="kinds of evaluation tasks, KIND=FILE for other files, lm-eval YAML files, or lm-eval's names "
        f"(default: {' '.join(PAPER_TASKS)}; none with --tokens)",
    )
    add(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="directory of lm-eval YAML files whose names --tasks then knows",
    )
    add("--limit", type=_positive, metavar="N", help="only the first N items per task, sequences per length")
    add("--batch-size", type=_positive, default=16, metavar="N", help="sequences per forward pass (16)")
    add(
        "--self-iterations",
        type=_positive,
        nargs="+",
        metavar="N",
        help="repeat the evaluation with each maximum number of iterations; the final call of the map, "
        "which gives the output, is not counted",
    )
    add("--tolerance", type=float, metavar="X", help="tolerance of the search (default: the spec's)")
    add(
        "--mean-iterations",
        type=float,
        metavar="N",
        help="with --tokens: adjust the tolerance so that sequences take N iterations on average",
    )
    add(
        "--max-length",
        type=_positive,
        metavar="N",
        help="maximum tokens per request; longer contexts are truncated on the left (default: the model's "
        "number of positions, without truncation)",
    )
    add(
        "--padding",
        choices=("right", "left"),
        default="right",
        help="padding side; the scores do not depend on it",
    )
    add("--precision", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    add("--device", default="auto", help="cpu, cuda, … (default: cuda if available)")
    add(
        "--tokens",
        type=Path,
        metavar="PATH",
        help="token files, or the output of python -m trainer.tokenize (its validation split): perplexity "
        "against length",
    )
    add(
        "--lengths",
        type=_positive,
        nargs="+",
        metavar="N",
        help="sequence lengths for --tokens (default: 1, 2, 4 and 8 times the training length)",
    )
    add("--output", type=Path, metavar="DIR", help="output directory (default: evaluations/<name>-<time>)")
    add("--log-samples", action="store_true", help="also write the response to every item")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parser().parse_args(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when lm-eval imports it
    try:
        from trainer.distributed import join, leave

        ranks = join(options.device)
    except ModuleNotFoundError as error:
        return refuse(without_torch(error))
    except ValueError as error:
        return refuse(error)
    with ExitStack() as stack:
        stack.callback(leave)
        if not ranks.is_main:
            stack.enter_context(redirect_stdout(None))
            stack.enter_context(redirect_stderr(None))
        return _main(options, ranks)


def _main(options: argparse.Namespace, ranks: Ranks) -> int:
    # The request is validated first, so that a ValueError here is a user error. Later it is a bug and
    # keeps its traceback.
    try:
        job = ranks.run_all(lambda: _prepare(options, ranks))
    except ModuleNotFoundError as error:
        return refuse(without_torch(error))
    except (ValueError, OSError) as error:
        return refuse(error)
    written: list[Path] = []
    try:
        return _run(job, options, written)
    except (DataError, OSError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        what = f"the results so far are in {written[0]}" if written else "nothing was written"
        return refuse(f"interrupted; {what}", INTERRUPTED)
    except Exception as error:
        if (short := short_of_memory(error)) is None:
            raise
        return refuse(
            f"{job.device} is out of memory ({short}); lower --batch-size or choose another --device"
        )


@dataclass(frozen=True)
class _Job:
    """A validated evaluation."""

    eval_model: EvalModel
    ranks: Ranks
    output: Path | None
    tokenizer: Any
    tasks: Sequence[EvalTask]
    tokens: Path | None
    sets: Sequence[EvaluationSet]

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.ranks.device


def _prepare(options: argparse.Namespace, ranks: Ranks) -> _Job:
    tasks = options.tasks if options.tasks is not None else () if options.tokens else PAPER_TASKS
    specs = find_specs(tasks, data=options.data, include_path=options.include_path)
    if not specs and options.tokens is None:
        raise ValueError("there is nothing to evaluate; set --tasks or --tokens")
    _require_used(options, tasks=bool(specs))
    # Perplexity of token files alone needs neither lm-eval nor, for a run, transformers.
    if specs:
        require_packages()
    elif (options.checkpoint / "config.json").is_file():
        require_packages("transformers")
    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # lm-eval warns about models that are already initialized

    from implicit_blocks.search.iteration_budget import FIRST, IterationBudget
    from implicit_blocks.search.options import SearchOptions
    from implicit_blocks.specs import Stopping
    from trainer.data.manifest import TRAIN
    from trainer.data.token_folder import split_folder, validation_folder
    from trainer.evaluation.eval_model import find_eval_model
    from trainer.evaluation.token_sets import token_sets

    eval_model = find_eval_model(options.checkpoint, spec=options.spec, overrides=options.overrides)
    for name in ("self_iterations", "tolerance", "mean_iterations"):
        if getattr(options, name) is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if not eval_model.implicit:
            raise ValueError(f"{eval_model.name} does not search for fixed points; omit {option}")
        if eval_model.exit not in _EXITS.get(name, (eval_model.exit,)):
            raise ValueError(
                f"{eval_model.name} ends its search by exit {eval_model.exit!r}, not at a tolerance; omit "
                f"{option}, or set model.at_evaluation.exit.kind=residual"
            )
    if specs and options.self_iterations and getattr(eval_model.spec, "state_policy", None) == "per_loop":
        raise ValueError(
            f"{eval_model.name} keeps one state per loop; for tasks, omit --self-iterations and set "
            "model.at_evaluation.exit.loops=N, once for each number of loops"
        )
    if options.mean_iterations is not None:
        first = FIRST if options.tolerance is None else options.tolerance
        IterationBudget(options.mean_iterations, tolerance=first)
        if options.mean_iterations >= min(options.self_iterations or [options.mean_iterations + 1]):
            raise ValueError("--mean-iterations must be below every limit of --self-iterations")
    if options.tolerance is not None:
        SearchOptions(tolerance=options.tolerance).stopping(Stopping())
    output: Path | None = options.output
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} already exists and is not an empty directory; choose another --output")
    tokens = None if options.tokens is None else validation_folder(options.tokens, None) or options.tokens
    if tokens is not None and split_folder(tokens, TRAIN) != tokens:
        raise ValueError(
            f"{tokens} has no validation split; give held-out tokens, or {tokens / TRAIN} to evaluate on the "
            "training text"
        )
    return _Job(
        eval_model=eval_model,
        ranks=ranks,
        output=output,
        tokenizer=_tokenizer(options.tokenizer, eval_model) if specs else None,
        tasks=build_tasks(specs, data=options.data),
        tokens=tokens,
        sets=token_sets(tokens, eval_model, lengths=options.lengths, limit=options.limit),
    )


def _require_used(options: argparse.Namespace, *, tasks: bool) -> None:
    """Reject options without an effect, and repeated values, which would be measured twice."""
    for option, chosen in (
        ("--max-length", options.max_length is not None),
        ("--padding", options.padding != "right"),
        ("--log-samples", options.log_samples),
        ("--tokenizer", options.tokenizer is not None),
        ("--include-path", options.include_path is not None),
    ):
        if chosen and not tasks:
            raise ValueError(f"{option} applies to tasks, but only --tokens is given; omit it")
    if options.mean_iterations is not None and (tasks or options.tokens is None):
        raise ValueError("--mean-iterations applies to --tokens alone; omit it, or the tasks")
    for option, values in (("--lengths", options.lengths), ("--self-iterations", options.self_iterations)):
        for value in values or ():
            if (times := values.count(value)) > 1:
                raise ValueError(f"{option} contains {value} {times} times; give each value once")


def _run(job: _Job, options: argparse.Namespace, written: list[Path]) -> int:
    """Evaluate, write the results, and append their directory to ``written``."""
    from implicit_blocks._utils.devices import device_name
    from trainer.evaluation.eval_model import longest_request
    from trainer.evaluation.results import RUNNING, Record
    from trainer.storage.run_folder import claim_folder

    for note in job.eval_model.notes:
        _log(f"WARNING: {note}")
    try:
        model = job.eval_model.load().to(job.device).eval()
    except ValueError as error:  # damaged weights, or those of another model
        return refuse(error)
    _log(f"{job.eval_model.name}: {job.eval_model.weights} on {device_name(job.device)}")
    longest = longest_request(model)
    job = replace(job, sets=_fitting_sets(job.sets, longest, named=options.lengths is not None))
    failed: dict[str, str] = {}
    lm, job = _checked_lm(model, job, options, longest, failed) if job.tasks else (None, job)
    found: list[Scores] = []
    lengths: list[EvaluationResult] = []
    settings = {name: getattr(options, name) for name in _SETTINGS}
    settings["overrides"] = list(options.overrides)
    settings["tokens"] = None if job.tokens is None else str(job.tokens)
    settings["documents"] = None if job.tokens is None else job.eval_model.documents

    def write(incomplete: str | None = None) -> None:
        record = Record(
            eval_model=job.eval_model,
            settings=settings,
            tasks=job.tasks,
            scores=found,
            lengths=lengths,
            incomplete=incomplete,
            failed=failed,
        )
        if not written:
            written.append(job.output or claim_folder(job.eval_model.name, root=Path("evaluations")))
        files = record.write(written[0], samples=options.log_samples)
        if incomplete != RUNNING:
            _log(f"\n{record.text()}")
            _log(f"written: {', '.join(map(str, files))}")

    ranks = job.ranks
    try:
        now = partial(ranks.run_on_rank0, partial(write, RUNNING))
        _evaluate_all(model, lm, job, options, found=found, lengths=lengths, failed=failed, write=now)
    except BaseException as error:  # finished results are kept after any error
        if ranks.is_main and (found or lengths):
            write("interrupted by the user" if isinstance(error, KeyboardInterrupt) else str(error))
        raise
    if failed and not (found or lengths):
        listed = "".join(f"\n  {name}: {error}" for name, error in failed.items())
        raise DataError(f"no task could be run:{listed}")
    ranks.run_on_rank0(write)
    if failed:
        return refuse(f"these tasks could not be run: {', '.join(failed)}", LOST)
    return 0


def _checked_lm(
    model: torch.nn.Module,
    job: _Job,
    options: argparse.Namespace,
    longest: int | None,
    failed: dict[str, str],
) -> tuple[HarnessLM, _Job]:
    """Return the model's lm-eval adapter, and the job without the tasks whose requests do not fit.

    Raises:
        DataError: no task fits.

    """
    from trainer.evaluation.eval_model import as_transformers
    from trainer.evaluation.harness import HarnessLM
    from trainer.evaluation.scores import check_lengths

    most = options.max_length
    lm = HarnessLM(
        as_transformers(model),
        job.tokenizer,
        batch_size=options.batch_size,
        padding=options.padding,
        max_length=longest if most is None else most if longest is None else min(most, longest),
        window=job.eval_model.length,
        precision=options.precision,
        ranks=job.ranks,
    )
    fitting: list[EvalTask] = []
    for task in job.tasks:
        try:
            check_lengths(lm, [task], limit=options.limit, truncate=most is not None)
        except DataError as error:
            failed[task.name] = str(error)
        else:
            fitting.append(task)
    if not fitting and not job.sets:
        check_lengths(lm, job.tasks, limit=options.limit, truncate=most is not None)
    for name, error_text in failed.items():
        _log(f"WARNING: {name} is left out: {error_text}")
    return lm, replace(job, tasks=fitting)


def _evaluate_all(
    model: torch.nn.Module,
    lm: HarnessLM | None,
    job: _Job,
    options: argparse.Namespace,
    *,
    found: list[Scores],
    lengths: list[EvaluationResult],
    failed: dict[str, str],
    write: Callable[[], object],
) -> None:
    """Run all tasks and evaluate all lengths, appending results to ``found`` and ``lengths``."""
    from trainer.evaluation.evaluate import evaluate

    budgets: Sequence[int | None] = options.self_iterations or (None,)
    search = {} if options.tolerance is None else {"tolerance": options.tolerance}
    if lm is not None:
        from trainer.evaluation.scores import run_tasks

        run_tasks(
            lm,
            job.tasks,
            budgets=budgets,
            limit_name=job.eval_model.limit,
            search=search,
            limit=options.limit,
            announce=_log,
            found=found,
            failed=failed,
            on_result=write,
        )
    for budget in budgets:
        evaluate(
            model,
            job.sets if budget is None else [_at(one, budget) for one in job.sets],
            device=job.device,
            precision=options.precision,
            batch_size=options.batch_size,
            last_tokens=1,
            search=search if budget is None else {**search, job.eval_model.limit: budget},
            mean_iterations=options.mean_iterations,
            announce=_log,
            ranks=job.ranks,
            on_result=lengths.append,
        )


def _fitting_sets(
    sets: Sequence[EvaluationSet], longest: int | None, *, named: bool
) -> Sequence[EvaluationSet]:
    """Return the sets whose sequences fit the model's positions.

    Raises:
        DataError: an explicitly given length does not fit, or no length does.

    """
    fitting = [one for one in sets if longest is None or one.length <= longest]
    left = [str(one.length) for one in sets if longest is not None and one.length > longest]
    if left and (named or not fitting):
        raise DataError(f"the model has positions for {longest} tokens; omit --lengths {' '.join(left)}")
    if left:
        _log(f"skipping lengths {', '.join(left)}: the model has positions for {longest} tokens")
    return fitting


def _log(text: str) -> None:
    print(text, flush=True)


def _tokenizer(path: Path | None, eval_model: EvalModel) -> Any:
    from implicit_blocks.hf.tokenizer import check_tokenizer_fits, load_tokenizer

    source = path or eval_model.tokenizer
    if source is None:
        raise ValueError(f"{eval_model.name} has no tokenizer; give its tokenizer.json by --tokenizer")
    tokenizer = load_tokenizer(source)
    if eval_model.rows is not None:
        check_tokenizer_fits(tokenizer, eval_model.rows, name=source)
    return tokenizer


def _at(evaluation_set: EvaluationSet, budget: int) -> EvaluationSet:
    """Return the set with a maximum number of self-iterations in its name and settings."""
    name = f"{evaluation_set.name}, {counted(budget, 'self-iteration')}"
    return replace(evaluation_set, name=name, settings={**evaluation_set.settings, "self_iterations": budget})


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}; overrides come first")
