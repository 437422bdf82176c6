"""A run, from its spec to its summary: builds the parts, makes or resumes the folder, trains, reports."""

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
from implicit_blocks._utils.own_parts import install_extra
from implicit_blocks.specs import load_spec
from trainer.checkpoint.load import Checkpointer, TrainingProgress, list_checkpoints, load_checkpoint
from trainer.checkpoint.rng import seed_everything
from trainer.distributed import Layout, Ranks, require_same_data, require_same_spec
from trainer.errors import RunFolderError
from trainer.evaluation.evaluate import EvaluationResult
from trainer.reporting.display import Display, make_display
from trainer.reporting.report import draw, read_run
from trainer.reporting.summary import summarize
from trainer.reporting.throughput import NUMBERS, REQUIRED, in_words
from trainer.run.init_from import Origin, find_start
from trainer.run.loop import Loop
from trainer.run.parts import lay_out_model, make_parts
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
"""Damaged lines of metrics that are named one by one."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to train, and its folder."""

    name: str
    spec: RunSpec
    folder: RunFolder
    model: nn.Module
    ranks: Ranks
    loop: Loop
    manifest: dict[str, Any]

    @property
    def display(self) -> Display:
        """Where the run speaks."""
        return self.loop.display

    def train(self, *, stop_at: int | None = None) -> dict[str, Any] | None:
        """Train, evaluate, and write ``summary.json`` and ``report.png``; return the summary.

        Returns None where the run was stopped before its end, by ``stop_at`` (a step) or an interrupt; it
        can be resumed then. Raises :class:`~trainer.errors.NonFiniteLossError` where the loss stops being a
        number. With several processes all of them call this; one writes.
        """
        self.ranks.run_on_rank0(self.folder.hold)  # it was let go of where this run has been trained before
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
            last_row=self.loop.last_row,
            results=results,
            manifest=self.manifest,
            # One after the other: a run of months has millions.
            rows=self.folder.metrics.rows(required=REQUIRED, numbers=NUMBERS, damaged=damaged.append),
            stopped=self.loop.callbacks.stop_reason,
            saves=self.loop.checkpointer.saves,
            stall_seconds=self.loop.stalled_seconds,
        )
        write_json(self.folder.summary_path, summary)
        for complaint in damaged[:_SHOWN]:
            self.display.log(f"WARNING: {complaint}; the summary leaves it out")
        if len(damaged) > _SHOWN:
            self.display.log(f"WARNING: and {len(damaged) - _SHOWN} more lines of that kind")
        for phase in summary["phases"]:
            if phase["measured"] is not None:
                self.display.log(in_words(phase["name"], phase["measured"]))
        try:
            draw([read_run(self.folder.path, damaged=lambda _: None)], self.folder.report_path)
        except ImportError:
            self.display.log(f"no picture: matplotlib is not installed ({install_extra('train')})")
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
    """Build what ``spec`` describes, and make its folder, or find it and load its checkpoint.

    Everything that may be refused is refused before the folder is made.

    Args:
        spec: the run.
        name: what records call it.
        output: its folder; None is ``runs/<name>-<time>``. To resume it must be given.
        device: such as ``cpu`` or ``cuda:1``; ``auto`` is CUDA where there is one. Not read where ``ranks``
            are given.
        resume: go on with the run in ``output``, from its newest checkpoint that is whole.
        checkpoint: go on from this one (such as ``step-00000120``) and no other.
        command: what to note as the command.
        display: where to show progress; None: a live bar on a terminal, else lines.
        ranks: the processes of the run, each of which calls this (`trainer.distributed.join`); None: this one
            alone. The main one makes the folder and speaks.

    Raises:
        ValueError: something in the spec can't be built, no such device, the folder holds another run, the
            checkpoint is damaged or of another model, the ranks have different specs, or a layout is asked
            for that they can't have. Where one rank is refused all are.

    """
    resume = resume or checkpoint is not None
    training, dumped = spec.training, spec.model_dump(mode="json")
    ranks = Ranks(choose_device(device)) if ranks is None else ranks
    require_same_spec(ranks, dumped, options={"output": str(output), "resume": resume, "from": checkpoint})
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
        if not ranks.is_main:  # what is drawn while training, such as dropout, must differ between ranks
            seed_everything(training.seed + ranks.rank)
        optimizer = registry.build(training.optimizer, model=model)
        schedule = registry.build(spec.schedule_spec(), total_steps=spec.total_steps)
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
                data=data,
                changes=changes,
                manifest=manifest,
                display=display,
                ranks=ranks,
            )
        else:
            if output is None:  # another run may have been given the same name in the same second
                folder = RunFolder(ranks.run_on_rank0(lambda: claim_folder(name)))
                refused.callback(folder.release)
            ranks.run_on_rank0(lambda: folder.create(spec=dumped, manifest=manifest))
        _warn(display, origin, folder)

        loop = Loop(
            spec,
            layout=layout,
            optimizer=optimizer,
            schedule=schedule,
            sources=parts.sources,
            evaluation_sets=parts.evaluation_sets,
            folder=folder,
            display=display,
            checkpointer=Checkpointer(
                folder.checkpoints,
                model=model,
                optimizer=optimizer,
                spec_digest=digest(dumped),
                keep=training.keep_checkpoints,
                keep_every=training.keep_every,
                ranks=ranks,
            ),
            progress=progress,
            callbacks=parts.callbacks,
        )
        refused.pop_all()  # it is not: the folder stays held
    return Run(name=name, spec=spec, folder=folder, model=model, ranks=ranks, loop=loop, manifest=manifest)


def _claim(folder: RunFolder, *, resume: bool) -> None:
    """Refuse a folder that can't be used as asked; one with a run to go on with is held from now on."""
    if resume:
        folder.require_run()
        folder.hold()
    else:
        folder.require_free()


def _origin(spec: RunSpec, folder: RunFolder, changes: Sequence[str], *, resume: bool) -> Origin | None:
    """Find the weights of another run to begin with; None where there are none, or the run has begun."""
    if resume and list_checkpoints(folder.checkpoints):
        if changed := [change for change in changes if change.startswith("training.init_from")]:
            raise RunFolderError(
                f"{folder.path} has begun already, so it can't be started from elsewhere "
                f"({'; '.join(changed)}); leave that as it was, or start anew in another folder"
            )
        return None
    return None if spec.training.init_from is None else find_start(spec.training.init_from, spec)


def _display(spec: RunSpec, given: Display | None, ranks: Ranks) -> Display:
    """Return where this process speaks: only the main one does."""
    if not ranks.is_main:
        return Display()
    return given or make_display(log_every=spec.training.log_every, accuracy=spec.data.task is not None)


def _warn(display: Display, origin: Origin | None, folder: RunFolder) -> None:
    """Say what is doubtful about the run's beginning."""
    for complaint in () if origin is None else origin.complaints:
        display.log(f"WARNING: {complaint}")
    if folder.not_locked is not None:
        display.log(
            f"WARNING: {folder.path} can't be locked ({folder.not_locked}); see to it that no other "
            "process trains in it"
        )


def _beginning(
    spec: RunSpec,
    origin: Origin | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> TrainingProgress:
    """Return where the run begins; what it takes over from ``origin`` beside the weights is loaded."""
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
    """Return what is noted of this start of the run: command, machine, data, where its weights are from."""
    ranks = layout.ranks
    return make_manifest(
        name=name,
        command=sys.argv if command is None else command,
        device=device_name(ranks.device),
        seed=spec.training.seed,
        threads=torch.get_num_threads(),
        processes=ranks.world_size,
        layout=layout.kind,
        data=data,
        started_from=ranks.run_on_rank0(lambda: None if origin is None else origin.record()),
    )


def _changes(folder: RunFolder, spec: RunSpec, *, resume: bool) -> list[str]:
    """Return how a resumed run's spec differs from that in the folder; another model is refused.

    Fields that a phase could change too, such as solver and gradient, don't make it another one. A new run
    changes nothing.
    """
    if not resume:
        return []
    # Validated again, so that fields this version added have their defaults on both sides.
    old = load_spec(str(folder.spec_path)).model_dump(mode="json")
    changes = differences(old, spec.model_dump(mode="json"))
    free = tuple(f"model.{name}{end}" for name in spec.model.changeable for end in (".", ":"))
    of_model = [c for c in changes if c.startswith("model") and not c.startswith(free) and of_values(c)]
    if of_model:
        raise RunFolderError(
            f"{folder.path} holds a run of another model, so it can't be resumed with this spec "
            f"({'; '.join(of_model)}); resume it with its own spec, {folder.spec_path}, "
            "or start anew in another folder"
        )
    return changes
