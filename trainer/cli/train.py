"""The command line: ``python -m trainer --spec zoo/word_problem_s3.yaml [path.to.key=value …] …``.

Exit codes: 0 done; 1 a bug, or another process of the run ended; 2 the request cannot be carried out; 3 the
loss is NaN or infinite; 4 a checkpoint or the metrics could not be written; 75 stopped by SIGTERM or SIGUSR1,
130 by SIGINT (Ctrl-C). A stopped run is saved and continues by ``--resume``, so that a job script can requeue
a job that ends with 75.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from implicit_blocks._utils.hints import without_torch
from implicit_blocks._utils.programs import CommandParser
from implicit_blocks.specs import load_spec, spec_name
from trainer.cli.exit_codes import (
    INTERRUPTED,
    LOST,
    NOT_SAVED,
    TO_BE_RESUMED,
    code_of,
    refuse,
    short_of_memory,
)
from trainer.errors import CallbackError, DataError, NonFiniteLossError
from trainer.reporting.display import duration
from trainer.specs.run import RunSpec

if TYPE_CHECKING:
    from trainer.run.build import Run
    from trainer.run.look_ahead import Turns


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="python -m trainer",
        description="Train a model described by a spec.",
        epilog="Override settings of the spec by path.to.key=value: data.group=A4 training.max_steps=200. "
        "Other programs: python -m trainer.tokenize (text to train on), trainer.report (plots of runs), "
        "trainer.evaluate (benchmarks, perplexity), trainer.sweep (a grid of runs), trainer.experiments (of "
        "the paper), implicit_blocks (specs, generation, exports, plugins).",
    )
    add = command.add_argument
    add("--spec", metavar="FILE", help="YAML file of the run, or its name in the zoo")
    add("overrides", nargs="*", metavar="path.to.key=value", help="overrides of the spec")
    add("--output", type=Path, metavar="DIR", help="folder of the run (default: runs/<spec>-<time>)")
    add("--resume", action="store_true", help="resume the run in the output folder")
    add(
        "--checkpoint",
        metavar="NAME",
        help="resume from this checkpoint, such as step-00000120 (default: the newest complete one)",
    )
    add("--stop-at", type=int, metavar="STEP", help="save and stop after this step; continue by --resume")
    add("--dry-run", action="store_true", help="print size, cost, memory and phases without training")
    add("--ranks", type=int, metavar="N", help="dry run: number of processes (default: 1)")
    add(
        "--rate",
        metavar="TOKENS/S",
        help="dry run: measured rate for the duration estimate, or one per phase: bounded=20000,free=9000",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, … (default: cuda if available)")
    return command


def main(arguments: Sequence[str] | None = None, *, turns: Turns | None = None) -> int:
    """Run the command line and return the exit code; ``turns``: of a run that shares its process."""
    command = parser()
    options = command.parse_intermixed_args(arguments)
    if options.spec is None and not (options.resume and options.output):
        command.error("give a spec by --spec, or a run to resume by --resume --output DIR")
    if options.stop_at is not None and options.stop_at < 1:
        command.error(f"--stop-at must be at least 1, got {options.stop_at}")
    if options.ranks is not None and options.ranks < 1:
        command.error(f"--ranks must be at least 1, got {options.ranks}")
    if not options.dry_run and (options.ranks is not None or options.rate is not None):
        command.error("--ranks and --rate require --dry-run; torchrun sets the number of processes of a run")
    try:
        command_line = ["python", "-m", "trainer", *(arguments or sys.argv[1:])]
        code = _carry_out(options, command=command_line, turns=turns)
        if not options.dry_run and code in (0, INTERRUPTED, TO_BE_RESUMED):
            from trainer.distributed import leave

            leave()  # after the run: its references to the process group must be gone
        return code
    except ModuleNotFoundError as error:
        return refuse(without_torch(error))
    except SystemExit as error:  # the trainer does not call sys.exit below; a component of the run did
        place = traceback.extract_tb(error.__traceback__)[-1]
        return refuse(
            f"{place.filename}:{place.lineno} called sys.exit({error.code!r}) during the run; components "
            "must raise an exception instead. Use --resume to continue from the last checkpoint",
            LOST,
        )
    except KeyboardInterrupt:
        message = "stopped without saving; use --resume to continue from the last checkpoint"
        return refuse(message, INTERRUPTED)


def prepare_environment() -> None:
    """Set the variables of the environment that torch reads."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch loads; spinning slows busy CPUs
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # read when torch first allocates memory on a GPU
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _carry_out(options: argparse.Namespace, *, command: Sequence[str], turns: Turns | None) -> int:
    # Until the run is built, a ValueError is about the user's request and is shown without a traceback.
    # During training a ValueError is a bug and keeps its traceback.
    try:
        name, spec = _spec(options)
        if options.dry_run:
            from trainer.estimate.dry_run import dry_run_report  # imports no torch, so that it is fast

            print(dry_run_report(spec, name=name, ranks=options.ranks or 1, rate=options.rate))
            return 0
        prepare_environment()
        from trainer.distributed import join, require_same_spec
        from trainer.run.build import build
        from trainer.storage.run_folder import folder_of_job, folder_to_resume

        ranks = join(options.device, timeout_minutes=spec.training.distributed.timeout_minutes)
        # Before the folder is created; `build` compares its own arguments.
        require_same_spec(ranks, {}, options={"--stop-at": options.stop_at})
        resume = options.resume or options.checkpoint is not None
        output = options.output
        if not resume and (begun := ranks.run_on_rank0(lambda: folder_of_job(output, name))) is not None:
            output, resume = begun, True
        if output is None and resume:
            output = folder_to_resume(name)
        run = build(
            spec,
            name=name,
            output=output,
            ranks=ranks,
            resume=resume,
            checkpoint=options.checkpoint,
            command=command,
        )
        if turns is not None:
            run.loop.share_process(turns)
    except (ValueError, OSError) as error:
        return refuse(error)
    except Exception as error:
        if (short := short_of_memory(error)) is None:
            raise
        return refuse(
            f"out of memory before the first step ({short}); choose a smaller model, or shard it over "
            "processes by training.distributed.kind=fsdp (--dry-run --ranks estimates the memory of each)"
        )
    return _train(run, stop_at=options.stop_at)


def _train(run: Run, *, stop_at: int | None) -> int:
    """Train the run, report how it ended, and return the exit code."""
    ranks = run.ranks
    from trainer.distributed.tensor_parts import parameter_count

    parameters = parameter_count(run.model)
    others = "" if ranks.is_single else f" and {ranks.world_size - 1} more ({run.manifest['layout']})"
    device = f"{run.manifest['device']}{others}"
    run.display.log(f"{run.name}: {parameters:,} parameters on {device}, writing to {run.folder.path}")
    if not run.loop.evaluator.sets:
        run.display.log("no evaluation: the data have no validation tokens")
    try:
        summary = run.train(stop_at=stop_at)
    except Exception as error:
        if (code := code_of(error)) is None:
            raise
        return refuse(_describe(error, run), code)
    return _ended(run, summary, stop_at=stop_at)


def _describe(error: Exception, run: Run) -> str:
    """Return the message of an error that ended a run, with the last checkpoint if it lacks that."""
    if isinstance(error, NonFiniteLossError | DataError | CallbackError):
        kept = run.loop.last_checkpoint
        where = f"the last checkpoint, {kept}, is intact" if kept else "there is no checkpoint"
        return f"{error}; {where}"
    if isinstance(error, OSError):
        return f"{error}; free disk space and use --resume"
    if (short := short_of_memory(error)) is not None:
        return (
            f"{run.manifest['device']} is out of memory at step {run.loop.progress.step + 1} ({short}); "
            "lower training.micro_batch_size or data.seq_len (--dry-run estimates the memory of a step)"
        )
    return str(error)


def _ended(run: Run, summary: dict[str, Any] | None, *, stop_at: int | None) -> int:
    """Report how a run without errors ended (stopped, early, done) and return the exit code."""
    if summary is None:
        run.display.log(
            f"stopped after step {run.loop.progress.step}; continue by: "
            f"python -m trainer --resume --output {run.folder.path}"
        )
        requested = stop_at is not None and run.loop.progress.step >= stop_at
        if requested and run.loop.stopped_by is None:
            return 0
        return INTERRUPTED if run.loop.stopped_by == signal.SIGINT else TO_BE_RESUMED
    if summary["stopped"] is not None:
        run.display.log(f"ended early, after step {summary['steps']}: {summary['stopped']}")
    written = [path for path in (run.folder.summary_path, run.folder.report_path) if path.exists()]
    run.display.log(f"done in {duration(summary['seconds'])}: {', '.join(map(str, written))}")
    if run.loop.unsaved:
        kept = run.loop.last_checkpoint
        return refuse(
            f"the weights of step {summary['steps']} could not be saved and are lost; free disk space and "
            f"use --resume --output {run.folder.path} to continue from "
            f"{'the beginning' if kept is None else kept}",
            NOT_SAVED,
        )
    return 0


def _spec(options: argparse.Namespace) -> tuple[str, RunSpec]:
    if options.spec is None:
        from trainer.storage.run_folder import RunFolder

        folder = RunFolder(options.output)
        folder.require_run()
        source, name = str(folder.spec_path), folder.run_name()
    else:
        source, name = options.spec, spec_name(options.spec)
    spec = load_spec(source, options.overrides)
    if not isinstance(spec, RunSpec):
        raise ValueError(f"{source} is a spec of kind {spec.kind!r}; the trainer runs specs of kind 'run'")
    return name, spec
