"""Saving checkpoints in the background: each process writes its share, and the result is atomic."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from implicit_blocks.checkpoints.find import MODEL_PREFIX, list_checkpoints
from implicit_blocks.checkpoints.sharded import expect_one_process
from implicit_blocks.checkpoints.tensor_index import INDEX, index_text
from trainer.checkpoint.folder import (
    FORMAT,
    OPTIMIZER_PREFIX,
    STATE_FILE,
    TEMPORARY,
    TRAINING_PREFIX,
    TrainingProgress,
    prune,
    rank_file,
    remove_tree,
    remove_unfinished,
    step_name,
)
from trainer.checkpoint.rng import random_state
from trainer.checkpoint.staging import Staging, own_share
from trainer.distributed import Ranks
from trainer.distributed.tensor_parts import TensorParts, parts_of, tensor_ranks
from trainer.errors import FailedSaveError, LostPeerError, PeerError
from trainer.optim.ema import WeightAverage
from trainer.optim.optimizers import optimizer_state
from trainer.storage.files import digest, fsync_path, read_json, sha256_of, write_atomically, write_json


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the model's state, and for each further name of a tensor its first name.

    Tied weights are one tensor, which is stored once.
    """
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        if first.setdefault(id(tensor), name) != name:
            others[name] = first[id(tensor)]
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    others = {name: to for name, to in others.items() if name in tensors and to in tensors}
    return {name: value for name, value in tensors.items() if name not in others}, others


@dataclass(frozen=True)
class SaveTimes:
    """Duration and size of a checkpoint's save on this rank.

    ``staging_seconds`` is the time to copy the tensors, during which training waits. ``seconds`` is the time
    until the checkpoint is complete. ``size`` is that of all ranks' tensors, in bytes.
    """

    step: int
    staging_seconds: float
    seconds: float
    size: int


class Checkpointer:
    """Saves the checkpoints of a run to ``folder``, one at a time, in the background.

    With several processes each creates one, and all call its methods together with the same folder.
    :meth:`save` copies the tensors to host memory, for which training waits; a thread writes them. The next
    :meth:`wait` raises an error of the thread; earlier checkpoints stay intact.

    Args:
        folder: of all checkpoints of the run.
        model: the inner module, without a DDP wrapper; its tensors may be sharded.
        optimizer: its state is stored by the names of the model's parameters.
        spec_digest: stored with the checkpoint to identify the run's spec.
        keep: number of newest checkpoints to keep.
        keep_every: checkpoints at multiples of this number of steps are kept too.
        average: of the model's weights; stored in their place, beside the weights of training.
        ranks: the processes; None: this one only.
        pin: whether tensors on a GPU are copied to page-locked memory that is reused.

    """

    def __init__(
        self,
        folder: Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec_digest: str,
        keep: int,
        keep_every: int | None = None,
        average: WeightAverage | None = None,
        ranks: Ranks | None = None,
        pin: bool = True,
    ) -> None:
        self.folder = folder
        self._model = model
        self._optimizer = optimizer
        self._spec_digest = spec_digest
        self._keep = keep
        self._keep_every = keep_every
        self._average = average
        self._ranks = ranks or Ranks(torch.device("cpu"))
        self._group = self._ranks.host_group()
        self._staging = Staging(self._ranks.device, pin=pin)
        self._future: Future[Any] | None = None
        self._step = self._size = 0
        self._times: Callable[[], SaveTimes] | None = None
        self.saves: list[SaveTimes] = []
        """Duration and size of the checkpoints saved so far, in order."""

    def save(self, progress: TrainingProgress) -> None:
        """Start to save the checkpoint of ``progress.step``, after the previous save has ended.

        Raises:
            FailedSaveError: the previous save failed, or the folder cannot be created; nothing is started.
            LostPeerError: another process has ended.

        """
        self.wait()
        expect_one_process()
        began = time.perf_counter()
        self._step = progress.step
        try:
            self._ranks.run_on_rank0(self._make_folder)
        except (OSError, RuntimeError) as error:
            raise self._failure(error) from error
        tensors, aliases = named_tensors(self._model)
        of_optimizer, values = optimizer_state(self._optimizer, self._model)
        state = {
            "format": FORMAT,
            "progress": vars(progress),
            "spec_digest": self._spec_digest,
            "ranks": self._ranks.world_size,
            "tensor_ranks": tensor_ranks(self._model),
            "aliases": aliases,
            "optimizer_values": values,
        }
        of_training: dict[str, Tensor] = {}
        if self._average is not None:
            state["average_updates"] = self._average.updates
            if self._average.updates:
                of_training = {name: tensors[name] for name in self._average.tensors}
                tensors = {**tensors, **self._average.tensors}
        every = {
            **{MODEL_PREFIX + name: tensor for name, tensor in tensors.items()},
            **{TRAINING_PREFIX + name: tensor for name, tensor in of_training.items()},
            **{OPTIMIZER_PREFIX + name: tensor for name, tensor in of_optimizer.items()},
        }
        parts = parts_of(self._model)
        writer = _Writer(
            self._temporary,
            rank=self._ranks.rank,
            of_rank={"random_state": random_state()},
            state=state,
            publish=self._publish,
            staging=self._staging,
            parts=parts,
        )
        size = self._size = sum(tensor.numel() * tensor.element_size() for tensor in every.values())
        future = async_save(
            own_share(
                every,
                self._ranks,
                divided=() if parts is None else parts.divided(every),
                tensor_ranks=tensor_ranks(self._model),
            ),
            storage_writer=writer,
            process_group=self._group,
            no_dist=self._ranks.is_single,
        )
        assert isinstance(future, Future)  # because the writer stages itself
        self._future = future
        staged, ended = time.perf_counter() - began, list[float]()
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))

        def times() -> SaveTimes:
            end = ended[0] if ended else time.perf_counter()  # the callback may run after the waiting thread
            return SaveTimes(progress.step, staged, end - began, size)

        self._times = times

    def wait(self) -> None:
        """Wait for the end of the save in progress, if there is one.

        Raises:
            FailedSaveError: the checkpoint could not be written; its files are removed.
            LostPeerError: another process ended before all processes had written.

        """
        future, self._future = self._future, None
        if future is None:
            return
        try:
            future.result()
        except (CheckpointException, Exception) as error:  # CheckpointException is not an Exception
            room = self._missing_space()
            if self._ranks.is_main:
                remove_tree(self._temporary)
            raise self._failure(error, room) from error
        assert self._times is not None
        self.saves.append(self._times())

    @property
    def ended(self) -> bool:
        """Whether :meth:`wait` would return or raise immediately; never with several processes.

        Several processes must wait together, since one may end before the others.
        """
        return self._ranks.is_single and self._future is not None and self._future.done()

    @property
    def failed(self) -> bool:
        """Whether the save in progress has failed in this process; does not wait."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def _missing_space(self) -> str:
        """Return a message if the disk lacks space, since torch's errors for a full disk are cryptic."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return ""
        if free >= self._size:
            return ""
        return f"; the disk has {free / 1e6:,.2f} MB free, but a checkpoint takes {self._size / 1e6:,.2f} MB"

    def _failure(self, error: BaseException, room: str = "") -> FailedSaveError | LostPeerError:
        every = list_checkpoints(self.folder)
        kept = every[-1] if every else None
        # An error of one process is sent to all; any other RuntimeError is a failure of the communication.
        expected = isinstance(error, CheckpointException | OSError | PeerError)
        if isinstance(error, RuntimeError) and not expected and not self._ranks.is_single:
            return LostPeerError(step=self._step, reason=str(error), kept=kept)
        return FailedSaveError(step=self._step, reason=f"{self._reason(error)}{room}", kept=kept)

    def _reason(self, error: BaseException) -> str:
        if not isinstance(error, CheckpointException):
            return str(error)
        causes = [(rank, cause) for rank, (cause, _) in sorted(error.failures.items())]
        return "; ".join(
            f"{cause}" if self._ranks.is_single else f"rank {rank}: {cause}" for rank, cause in causes
        )

    @property
    def _temporary(self) -> Path:
        return self.folder / f"{step_name(self._step)}{TEMPORARY}save"

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder)
        self._temporary.mkdir()

    def _publish(self) -> None:
        """Rename the finished folder; on rank 0, after all processes have written."""
        final = self.folder / step_name(self._step)
        if final.exists():  # the run was resumed from an earlier checkpoint
            replaced = self.folder / f"{final.name}{TEMPORARY}replaced"
            final.rename(replaced)
            self._temporary.rename(final)
            remove_tree(replaced)
        else:
            self._temporary.rename(final)
        fsync_path(self.folder)
        prune(self.folder, newest=final, keep=self._keep, keep_every=self._keep_every)


class _Writer(FileSystemWriter):
    """The writer of ``torch.distributed.checkpoint``, extended by checksums, rank state and publishing.

    ``write_data`` runs on every rank, ``finish`` on rank 0 after all of them; both run in the thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        of_rank: Mapping[str, Any],
        state: Mapping[str, Any],
        publish: Any,
        staging: Staging,
        parts: TensorParts | None,
    ) -> None:
        super().__init__(path, sync_files=True)
        self._staging = staging
        self._parts = parts
        self._rank = rank
        self._of_rank = of_rank
        self._state = state
        self._publish = publish

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged: dict[str, Any]
        if self._staging.kept:
            self.per_thread_copy_ahead = 0  # as in the base class: no copies remain to be made
            staged = self._staging.stage(state_dict)
        else:
            staged = super().stage(state_dict)
        return staged if self._parts is None else self._parts.as_stored(staged)

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        folder = Path(self.path)
        names = sorted({result.storage_data.relative_path for result in written.value()})
        write_json(
            folder / rank_file(self._rank),
            {**self._of_rank, "files": {name: _measured(folder / name) for name in names}},
        )
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        # Replaces the method of the base class, which writes the index as a pickle.
        folder = Path(self.path)
        write_atomically(folder / INDEX, index_text(metadata, results))
        files = {INDEX: _measured(folder / INDEX)}
        for rank in range(self._state["ranks"]):
            name = rank_file(rank)
            files |= {name: _measured(folder / name), **read_json(folder / name)["files"]}
        state = {**self._state, "files": files}
        write_json(folder / STATE_FILE, {**state, "digest": digest(state)})
        fsync_path(folder)
        self._publish()


def _measured(file: Path) -> dict[str, Any]:
    return {"bytes": os.path.getsize(file), "sha256": sha256_of(file)}
