"""A run from its spec to its summary: builds the components, creates or resumes the folder, trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks import registry
from implicit_blocks._utils.devices import choose_device, device_name
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.checkpoints.find import list_checkpoints
from implicit_blocks.specs import load_spec
from trainer.callbacks import CallbackContext, CallbackDispatcher
from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.rng import seed_everything
from trainer.checkpoint.writer import Checkpointer
from trainer.distributed import Layout, Ranks, require_same_data, require_same_spec
from trainer.errors import RunFolderError
from trainer.evaluation.evaluate import EvaluationResult
from trainer.optim.ema import WeightAverage
from trainer.optim.schedules import Schedule
from trainer.reporting.backends import BackendRecord
from trainer.reporting.display import Display, make_display
from trainer.reporting.recorder import StepRecorder, ThroughputMeter
from trainer.reporting.report import draw, read_run
from trainer.reporting.summary import NUMBERS, REQUIRED, in_words, summarize
from trainer.run.evaluating import Evaluator
from trainer.run.init_from import Origin, find_start
from trainer.run.length import resolve_epochs
from trainer.run.loop import Loop
from trainer.run.parts import Parts, lay_out_model, make_parts
from trainer.run.phases import ActivePhase
from trainer.run.resume import resume as resume_run
from trainer.specs.run import RunSpec
from trainer.storage.files import digest, write_json
from trainer.storage.run_folder import (
    RunFolder,
    claim_folder,
    default_folder,
    differences,
    make_manifest,
    of_values,
)

_SHOWN = 3
"""Maximum number of damaged lines of metrics that are reported one by one."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    name: str
    spec: RunSpec
    folder: RunFolder
    model: nn.Module
    ranks: Ranks
    loop: Loop
    manifest: dict[str, Any]

    @property
    def display(self) -> Display:
        """The display of the run's progress."""
        return self.loop.display

    def train(self, *, stop_at: int | None = None) -> dict[str, Any] | None:
        """Train, evaluate, and write ``summary.json`` and ``report.png``; return the summary.

        Returns None if the run was stopped before its end by ``stop_at`` (a step) or a signal; it can be
        resumed then. With several processes all of them call this, and rank 0 writes.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite; other errors as `Loop.run`.

        """
        self.ranks.run_on_rank0(self.folder.hold)  # an earlier call of `train` has released it
        try:
            results = self.loop.run(stop_at=stop_at)
            if results is None:
                return None
            summary: dict[str, Any] = self.ranks.run_on_rank0(lambda: self._finish(results))
            return summary
        finally:
            self.folder.release()

    def _finish(self, results: Sequence[EvaluationResult]) -> dict[str, Any]:
        damaged: list[str] = []
        summary = summarize(
            name=self.name,
            spec=self.spec,
            model=self.model,
            progress=self.loop.progress,
            last_row=self.loop.recorder.last_row,
            results=results,
            manifest=self.manifest,
            # An iterator, because a long run has millions of rows.
            rows=self.folder.metrics.rows(required=REQUIRED, numbers=NUMBERS, damaged=damaged.append),
            stopped=self.loop.callbacks.stop_reason,
            saves=self.loop.checkpoints.saves,
            stall_seconds=self.loop.checkpoints.stalled_seconds,
        )
        if self.loop.average is not None:
            summary["weights"] = self.loop.average.weights
        write_json(self.folder.summary_path, summary)
        for message in damaged[:_SHOWN]:
            self.display.log(f"WARNING: {message}; the summary ignores it")
        if len(damaged) > _SHOWN:
            self.display.log(f"WARNING: and {len(damaged) - _SHOWN} more damaged lines")
        for phase in summary["phases"]:
            if phase["measured"] is not None:
                self.display.log(in_words(phase["name"], phase["measured"]))
        try:
            draw([read_run(self.folder.path, damaged=lambda _: None)], self.folder.report_path)
        except ImportError:
            self.display.log(f"no report.png: matplotlib is not installed ({install_extra('train')})")
        return summary


def build(
    spec: RunSpec,
    *,
    name: str = "run",
    output: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    checkpoint: str | None = None,
    command: Sequence[str] | None = None,
    display: Display | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """Build the run that ``spec`` describes; create its folder, or load the checkpoint of an existing run.

    Everything is validated before the folder is created.

    Args:
        spec: the run.
        name: of the run in its records.
        output: folder of the run; None: ``runs/<name>-<time>``. Required to resume.
        device: such as ``cpu`` or ``cuda:1``; ``auto`` is CUDA if available. Ignored if ``ranks`` is given.
        resume: resume the run in ``output`` from its newest complete checkpoint.
        checkpoint: resume from this checkpoint, such as ``step-00000120``.
        command: recorded as the command line.
        display: shows progress; None: a live bar on a terminal, plain lines elsewhere.
        ranks: the processes of the run (`trainer.distributed.join`), all of which call this function; None:
            a single process. Rank 0 creates the folder and prints.

    Raises:
        ValueError: a component cannot be built, the device does not exist, the folder holds another run, the
            checkpoint is damaged or of another model, the ranks have different specs, or the layout is not
            supported. An error of one rank is raised on all ranks.

    """
    resume = resume or checkpoint is not None
    ranks = Ranks(choose_device(device)) if ranks is None else ranks
    options = {"output": str(output), "resume": resume, "from": checkpoint}
    require_same_spec(ranks, spec.model_dump(mode="json"), options=options)
    spec = ranks.run_all(lambda: resolve_epochs(spec))
    training, dumped = spec.training, spec.model_dump(mode="json")
    folder = RunFolder(ranks.broadcast(output if output is not None else default_folder(name)))
    if output is not None:
        ranks.run_on_rank0(lambda: _claim(folder, resume=resume))
    with ExitStack() as refused:
        refused.callback(folder.release)
        changes = ranks.run_on_rank0(lambda: _changes(folder, spec, resume=resume))
        origin = ranks.run_on_rank0(lambda: _origin(spec, folder, changes, resume=resume))
        if training.threads is not None:
            torch.set_num_threads(training.threads)

        parts = ranks.run_all(lambda: make_parts(spec, origin=origin, processes=ranks.world_size))
        model, data = parts.model, parts.sources[-1].identity()
        require_same_data(ranks, [source.identity() for source in parts.sources])
        layout = lay_out_model(spec, model, ranks)
        # Random numbers of training, such as dropout, must differ between ranks with other tokens.
        if layout.grid.data.rank > 0:
            seed_everything(training.seed + layout.grid.data.rank)
        optimizer = registry.build(training.optimizer, model=model)
        schedule = registry.build(spec.schedule_spec(), total_steps=spec.total_steps)
        average = _average(spec, model)
        display = _display(spec, display, ranks)

        progress = _beginning(spec, origin, model=model, optimizer=optimizer, ranks=ranks)
        manifest = _manifest(spec, name=name, command=command, data=data, layout=layout, origin=origin)
        if resume:
            progress = resume_run(
                folder,
                spec,
                progress,
                checkpoint=checkpoint,
                model=model,
                optimizer=optimizer,
                average=average,
                data=data,
                changes=changes,
                manifest=manifest,
                display=display,
                ranks=ranks,
            )
        else:
            if output is None:  # another run may have taken the name in the same second
                folder = RunFolder(ranks.run_on_rank0(lambda: claim_folder(name)))
                refused.callback(folder.release)
            ranks.run_on_rank0(lambda: folder.create(spec=dumped, manifest=manifest))
        _warn(display, origin, folder)

        loop = _make_loop(
            spec,
            parts,
            layout=layout,
            optimizer=optimizer,
            schedule=schedule,
            average=average,
            folder=folder,
            display=display,
            progress=progress,
        )
        refused.pop_all()  # nothing was refused: the folder stays locked
    return Run(name=name, spec=spec, folder=folder, model=model, ranks=ranks, loop=loop, manifest=manifest)


def _make_loop(
    spec: RunSpec,
    parts: Parts,
    *,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    average: WeightAverage | None,
    folder: RunFolder,
    display: Display,
    progress: TrainingProgress,
) -> Loop:
    """Connect the components of a run."""
    model, ranks, training, callbacks = layout.model, layout.ranks, spec.training, parts.callbacks
    stop_on_failure = training.on_failed_save == "stop"
    context = CallbackContext(
        spec=spec,
        model=model,
        optimizer=optimizer,
        device=ranks.device,
        is_main=ranks.is_main,
        rank=ranks.rank,
        folder=folder.path,
        log=display.log,
        stop=callbacks.stop,
    )
    dispatcher = CallbackDispatcher(callbacks, context, ranks=ranks)
    checkpointer = Checkpointer(
        folder.checkpoints,
        model=model,
        optimizer=optimizer,
        spec_digest=digest(spec.model_dump(mode="json")),
        keep=training.keep_checkpoints,
        keep_every=training.keep_every,
        average=average,
        ranks=ranks,
    )
    return Loop(
        spec=spec,
        layout=layout,
        optimizer=optimizer,
        schedule=schedule,
        average=average,
        folder=folder,
        display=display,
        callbacks=callbacks,
        dispatcher=dispatcher,
        active=ActivePhase(spec, model=model, sources=parts.sources, grid=layout.grid, display=display),
        evaluator=Evaluator(
            spec,
            layout=layout,
            sets=parts.evaluation_sets,
            average=average,
            folder=folder,
            display=display,
            notify=dispatcher.notify,
        ),
        recorder=StepRecorder(
            folder,
            meter=ThroughputMeter(devices=ranks.world_size, device=ranks.device, peak=training.peak_flops),
            display=display,
            ranks=ranks,
            stop_on_failure=stop_on_failure,
        ),
        checkpoints=CheckpointManager(
            folder,
            checkpointer,
            layout=layout,
            average=average,
            display=display,
            notify=dispatcher.notify,
            begun_at=progress.step,
            stop_on_failure=stop_on_failure,
        ),
        backends=BackendRecord(folder if ranks.is_main else None, display),
        progress=progress,
    )


def _average(spec: RunSpec, model: nn.Module) -> WeightAverage | None:
    """Return the average of the weights that the spec asks for; it begins with the first steps."""
    ema = spec.training.ema
    return None if ema is None else WeightAverage(model, decay=ema.decay, start=spec.ema_start)


def _claim(folder: RunFolder, *, resume: bool) -> None:
    """Refuse a folder that cannot be used; lock the folder of a run to resume."""
    if resume:
        folder.require_run()
        folder.hold()
    else:
        folder.require_free()


def _origin(spec: RunSpec, folder: RunFolder, changes: Sequence[str], *, resume: bool) -> Origin | None:
    """Find the initial weights that the spec names; None if it names none, or if the run has checkpoints."""
    if resume and list_checkpoints(folder.checkpoints):
        if changed := [change for change in changes if change.startswith("training.init_from")]:
            raise RunFolderError(
                f"the run in {folder.path} has started already, so its initial weights can't change "
                f"({'; '.join(changed)}); revert this, or start a new run in another folder"
            )
        return None
    return None if spec.training.init_from is None else find_start(spec.training.init_from, spec)


def _display(spec: RunSpec, given: Display | None, ranks: Ranks) -> Display:
    """Return the display of this process; only rank 0 prints."""
    if not ranks.is_main:
        return Display()
    return given or make_display(log_every=spec.training.log_every, accuracy=spec.data.task is not None)


def _warn(display: Display, origin: Origin | None, folder: RunFolder) -> None:
    """Log problems at the start of the run."""
    for message in () if origin is None else origin.complaints:
        display.log(f"WARNING: {message}")
    if folder.not_locked is not None:
        display.log(
            f"WARNING: {folder.path} can't be locked ({folder.not_locked}); "
            "make sure that no other process trains in it"
        )


def _beginning(
    spec: RunSpec, origin: Origin | None, *, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> TrainingProgress:
    """Return the initial progress; load the optimizer state of ``origin`` if the spec asks for it."""
    start = spec.training.init_from
    if origin is None or start is None:
        return TrainingProgress()
    if start.optimizer:
        load_checkpoint(origin.path, model=model, optimizer=optimizer, verify=False, ranks=ranks)
    return TrainingProgress(samples=origin.progress["samples"] if start.position and origin.progress else 0)


def _manifest(
    spec: RunSpec,
    *,
    name: str,
    command: Sequence[str] | None,
    data: Mapping[str, Any],
    layout: Layout,
    origin: Origin | None,
) -> dict[str, Any]:
    """Return the record of this start of the run: command, machine, data, origin of the weights."""
    ranks = layout.ranks
    return make_manifest(
        name=name,
        command=sys.argv if command is None else command,
        device=device_name(ranks.device),
        seed=spec.training.seed,
        threads=torch.get_num_threads(),
        processes=ranks.world_size,
        layout=layout.resolved.name,
        data=data,
        started_from=ranks.run_on_rank0(lambda: None if origin is None else origin.record()),
    )


def _changes(folder: RunFolder, spec: RunSpec, *, resume: bool) -> list[str]:
    """Return how the spec of a resumed run differs from that in the folder; empty for a new run.

    A different model is refused, except for fields that a phase can change, such as solver and gradient.
    """
    if not resume:
        return []
    # Validated again, so that fields added by this version have their defaults on both sides.
    old = load_spec(str(folder.spec_path)).model_dump(mode="json")
    changes = differences(old, spec.model_dump(mode="json"))
    free = tuple(f"model.{name}{end}" for name in spec.model.changeable for end in (".", ":"))
    of_model = [c for c in changes if c.startswith("model") and not c.startswith(free) and of_values(c)]
    if of_model:
        raise RunFolderError(
            f"{folder.path} holds a run of another model, so it can't be resumed with this spec "
            f"({'; '.join(of_model)}); resume it with its own spec, {folder.spec_path}, "
            "or start a new run in another folder"
        )
    return changes
