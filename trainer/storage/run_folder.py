"""The folder of a run: resolved spec, manifest, metrics, checkpoints, summary and report."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import CHECKPOINTS, SPEC, read_json
from implicit_blocks.specs.tree import dump_yaml
from trainer.errors import RunFolderError
from trainer.reporting.metrics import MetricsFile
from trainer.storage.files import write_atomically, write_json
from trainer.storage.lock import LOCK, FolderLock, LockedError

_MARKS = (SPEC, "manifest.json", "metrics.jsonl", CHECKPOINTS)
_FOLDERS = ("exports", "profiles", "tensorboard", "wandb")
"""Folders that a run writes to, in addition to that of its checkpoints."""
_SHAPE_VALUES = ("implicit_blocks", "torch", "numpy")
"""Packages whose version can change the values that a run computes."""


class RunFolder:
    """The files of a run, under ``path``.

    A process that writes locks the folder (:meth:`hold`, :meth:`release`); reading needs no lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec_path = path / SPEC
        self.manifest_path = path / "manifest.json"
        self.summary_path = path / "summary.json"
        self.report_path = path / "report.png"
        self.checkpoints = path / CHECKPOINTS
        self.exports = path / "exports"
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.evaluations = MetricsFile(path / "evaluations.jsonl")
        self._lock: FolderLock | None = None

    @property
    def holds_a_run(self) -> bool:
        """Whether the folder contains files of a run."""
        return any((self.path / mark).exists() for mark in _MARKS)

    def hold(self) -> None:
        """Lock the folder, which must exist, so that no other process trains in it until :meth:`release`.

        Does nothing if this object holds the lock already. Rank 0 of a run holds it.

        Raises:
            RunFolderError: another process, or another run of this process, trains in the folder; or a folder
                that the run writes to is a symbolic link.

        """
        if self._lock is not None:
            return
        for name in (CHECKPOINTS, *_FOLDERS):
            if (self.path / name).is_symlink():
                raise RunFolderError(
                    f"{self.path / name} is a symbolic link, but a run writes only inside its own folder; "
                    "replace the link by a folder"
                )
        try:
            self._lock = FolderLock(self.path / LOCK)
        except LockedError as error:
            raise RunFolderError(
                f"the run in {self.path} is in progress already ({error.holder}); wait for it, or stop it; "
                f"if its machine no longer exists, remove {self.path / LOCK}"
            ) from None

    def release(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    @property
    def not_locked(self) -> str | None:
        """Why the folder is not locked, such as a file system without locks; None: it is locked or unused."""
        return None if self._lock is None else self._lock.trouble

    def require_free(self) -> None:
        """Refuse a folder that holds a run, or a path that is not a folder."""
        if self.holds_a_run:
            raise RunFolderError(
                f"the output folder {self.path} already holds a run; continue it by --resume, "
                "or choose another folder by --output"
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"the output {self.path} is not a directory; choose another one by --output")

    def require_run(self) -> None:
        """Refuse a folder without a run to resume, or with a damaged manifest."""
        if not self.spec_path.is_file():
            raise RunFolderError(
                f"nothing to resume: {self.path} holds no run (spec.yaml is missing); "
                "give the folder of the run by --output, or start a run without --resume"
            )
        self._manifest()

    def run_name(self) -> str:
        """Return the name of the run from the manifest, or the name of the folder if that is missing."""
        return str(self._manifest().get("name", self.path.name))

    @property
    def job(self) -> str | None:
        """The torchrun job that created the run (`torchrun_job`); None: another program, or no run."""
        return self._manifest().get("job") if self.spec_path.is_file() else None

    def _manifest(self) -> dict[str, Any]:
        """Read the manifest. It may be missing, since no run depends on it, but it must not be damaged."""
        if not self.manifest_path.is_file():
            return {}
        try:
            found = read_json(self.manifest_path)
        except ValueError as error:
            raise RunFolderError(f"{error}; move it away to continue") from error
        if not _is_manifest(found):
            raise RunFolderError(
                f"{self.manifest_path} is truncated or was not written by the trainer; "
                "move it away to continue"
            )
        manifest: dict[str, Any] = found
        return manifest

    def create(self, *, spec: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Create and lock the folder, and write the resolved spec and the manifest."""
        self.require_free()
        self.path.mkdir(parents=True, exist_ok=True)
        self.hold()
        self.require_free()  # another process may have started a run meanwhile
        self._write_spec(spec)
        write_json(self.manifest_path, dict(manifest))

    def noted_data(self) -> dict[str, Any]:
        """Return the identity of the data that the run was last trained on; empty if unknown."""
        history = self._manifest()
        noted = [entry["data"] for entry in (history, *history.get("resumed", ())) if entry.get("data")]
        return dict(noted[-1]) if noted else {}

    def require_data(self, identity: Mapping[str, Any]) -> None:
        """Refuse data that differ from those the run was last trained on, if both identities are known."""
        noted = self.noted_data()
        if noted and identity and (changes := differences(noted, dict(identity))):
            raise RunFolderError(
                f"the data of {self.path} differ from those it was trained on ({'; '.join(changes)}); "
                "restore them, or set data.path=… to continue with the new data"
            )

    def version_changes(self, now: Mapping[str, Any]) -> list[str]:
        """Return the packages that can change values and whose version differs from the last start."""
        history = self._manifest()
        starts = (history, *history.get("resumed", ()))
        before: dict[str, Any] = next(
            (start["versions"] for start in reversed(starts) if start.get("versions")), {}
        )
        return [
            f"{name} {before[name]} → {now[name]}"
            for name in _SHAPE_VALUES
            if name in before and name in now and before[name] != now[name]
        ]

    def record_resume(
        self,
        *,
        spec: Mapping[str, Any],
        manifest: Mapping[str, Any],
        step: int,
        changes: Sequence[str],
        stored: bool = True,
    ) -> None:
        """Record in the manifest that the run is resumed after ``step``, with these changes to its spec.

        A changed spec is written, unless ``stored`` is False because no step is trained with it.
        """
        history = self._manifest()
        resumes = [*history.get("resumed", []), {"step": step, "changes": list(changes), **manifest}]
        write_json(self.manifest_path, {**history, "resumed": resumes})
        if changes and stored:
            # A copy, so that the folder has a spec if the process is killed between the two writes.
            before = self.spec_path.read_text(encoding="utf-8")
            write_atomically(self.path / f"spec.until-step-{step:08d}.yaml", before)
            self._write_spec(spec)

    def set_results_aside(self) -> None:
        """Rename the summary and the report of an earlier end of a run that continues to train.

        They would otherwise present the run as finished.
        """
        if not self.summary_path.is_file():
            return
        try:
            steps = int(read_json(self.summary_path)["steps"])
        except (ValueError, TypeError, KeyError):
            steps = 0
        for path in (self.report_path, self.summary_path):
            if path.is_file():
                path.replace(path.with_name(f"{path.stem}.until-step-{steps:08d}{path.suffix}"))

    def record_backends(self, report: Mapping[str, Mapping[str, str]]) -> None:
        """Record in the manifest which backends ran since the current start."""
        history = self._manifest()
        part = (history.get("resumed") or [history])[-1]
        part["backends"] = {operation: dict(found) for operation, found in report.items()}
        write_json(self.manifest_path, history)

    def _write_spec(self, spec: Mapping[str, Any]) -> None:
        text = dump_yaml(spec, default_flow_style=None, width=110)
        write_atomically(self.spec_path, text)


def _is_manifest(value: Any) -> bool:
    """Return whether the parts of a JSON value that are read of a manifest have the expected types."""
    if not isinstance(value, dict) or not isinstance(value.get("resumed", []), list):
        return False
    starts = [value, *value.get("resumed", [])]
    return all(
        isinstance(start, dict) and isinstance(start.get(key) or {}, dict)
        for start in starts
        for key in ("data", "versions")
    )


def default_folder(name: str, *, root: Path = Path("runs")) -> Path:
    """Return ``runs/<name>-<UTC time>``, with a number appended if that folder exists."""
    return next(path for path in _candidates(name, root) if not path.exists())


def claim_folder(name: str, *, root: Path = Path("runs")) -> Path:
    """Create the folder of :func:`default_folder` exclusively and return it.

    Processes that start in the same second get different folders.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in _candidates(name, root):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the candidates are endless")


def _candidates(name: str, root: Path) -> Iterator[Path]:
    stem = f"{name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    yield root / stem
    for number in itertools.count(2):
        yield root / f"{stem}-{number}"


def folder_to_resume(name: str, *, root: Path = Path("runs")) -> Path:
    """Return the only run of the spec ``name`` under ``runs``."""
    found = sorted(path for path in root.glob(f"{name}-*") if RunFolder(path).spec_path.is_file())
    # One name may be a prefix of another (word_problem_s3, word_problem_s3_explicit): the time begins with a
    # digit.
    found = [path for path in found if path.name[len(name) + 1 :][:1].isdigit()]
    if not found:
        raise RunFolderError(
            f"nothing to resume: there is no run of {name} under {root}/; give its folder by --output"
        )
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise RunFolderError(f"several runs of {name} could be resumed: {listed}; choose one by --output")
    return found[0]


def torchrun_job() -> str | None:
    """Return what identifies a torchrun job in all attempts, on the machine of rank 0; None: no job."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if job is None else f"{job} of process {os.getppid()} on {platform.node()}"


def folder_of_job(output: Path | None, name: str, *, root: Path = Path("runs")) -> Path | None:
    """Return the folder, which may be ``output``, that an earlier attempt of this torchrun job began."""
    if (job := torchrun_job()) is None:
        return None
    candidates = sorted(root.glob(f"{name}-*")) if output is None else [output]
    return next((path for path in candidates if RunFolder(path).job == job), None)


def make_manifest(
    *,
    name: str,
    command: Sequence[str],
    device: str,
    seed: int,
    threads: int,
    processes: int = 1,
    layout: str = "none",
    data: Mapping[str, Any] | None = None,
    started_from: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what is needed to repeat a run: versions, machine, device, seed, command, initial weights."""
    from implicit_blocks.ops import accelerated  # imports torch, which a dry run does not need

    return {
        "name": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "seed": seed,
        "device": device,
        "threads": threads,
        "processes": processes,
        "job": torchrun_job(),
        "layout": layout,
        "data": dict(data or {}),
        "started_from": None if started_from is None else dict(started_from),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": versions(),
        "accelerated": accelerated.report(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that a run uses."""
    found: dict[str, str | None] = {}
    for name in ("implicit_blocks", "torch", "numpy", "pydantic", "safetensors", "matplotlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def of_values(change: str) -> bool:
    """Whether a change of a spec, one of `differences`, can change values; a choice of backends cannot."""
    field = change.partition(":")[0].rpartition(".")[2]
    return field != "backend" and not field.endswith("_backend")


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the paths at which two nested JSON values differ, each with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: list[str] = []
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in old:
                found.append(f"{inner}: not set → {new[key]!r}")
            elif key not in new:
                found.append(f"{inner}: {old[key]!r} → not set")
            else:
                found += differences(old[key], new[key], inner)
        return found
    same = old == new or repr(old) == repr(new)  # NaN is not equal to itself
    return [] if same else [f"{path}: {old!r} → {new!r}"]
