"""The folder of a run: its resolved spec, where it ran, its metrics, checkpoints and report."""

from __future__ import annotations

import itertools
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
"""Folders in a run's folder in which it writes, beside that of its checkpoints."""
_SHAPE_VALUES = ("implicit_blocks", "torch", "numpy")
"""Packages whose version can change what a run computes."""


class RunFolder:
    """The files of one run, under ``path``.

    Who writes here holds the folder (:meth:`hold`, :meth:`release`); reading takes no lock.
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
        """Whether a run was begun here."""
        return any((self.path / mark).exists() for mark in _MARKS)

    def hold(self) -> None:
        """Keep other processes from training in this folder, which must be there, until :meth:`release`.

        Nothing happens where it is held already. Of a run's processes the main one holds it.

        Raises:
            RunFolderError: another process, or another run of this one, trains here; or a folder in which
                the run writes is a link to elsewhere.

        """
        if self._lock is not None:
            return
        for name in (CHECKPOINTS, *_FOLDERS):
            if (self.path / name).is_symlink():
                raise RunFolderError(
                    f"{self.path / name} is a symbolic link, and a run writes into its own folder only; "
                    "put the folder itself in its place"
                )
        try:
            self._lock = FolderLock(self.path / LOCK)
        except LockedError as error:
            raise RunFolderError(
                f"the run in {self.path} is under way already ({error.holder}); wait for it, or stop it; "
                f"where it is gone and its whole machine with it, remove {self.path / LOCK}"
            ) from None

    def release(self) -> None:
        """Let others train here."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    @property
    def not_locked(self) -> str | None:
        """Why others are not kept from training here: the file system has no locks. None: all is well."""
        return None if self._lock is None else self._lock.trouble

    def require_free(self) -> None:
        """Refuse a folder that holds a run, or a path that is no folder."""
        if self.holds_a_run:
            raise RunFolderError(
                f"the output folder {self.path} already holds a run; go on with it by --resume, "
                "or give another folder by --output"
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(
                f"the output {self.path} is a file, not a folder; give another one by --output"
            )

    def require_run(self) -> None:
        """Refuse a folder that holds no run to resume, or a damaged manifest."""
        if not self.spec_path.is_file():
            raise RunFolderError(
                f"nothing to resume: {self.path} holds no run (spec.yaml is missing); "
                "name its folder by --output, or start it without --resume"
            )
        self._manifest()

    def run_name(self) -> str:
        """Return the name its run was started under; the folder's own where the manifest doesn't tell."""
        return str(self._manifest().get("name", self.path.name))

    def _manifest(self) -> dict[str, Any]:
        """Read the manifest. Nothing depends on it, so it may be missing; but it must not be damaged."""
        if not self.manifest_path.is_file():
            return {}
        try:
            found = read_json(self.manifest_path)
        except ValueError as error:
            raise RunFolderError(f"{error}; move it away to go on") from error
        if not _is_manifest(found):
            raise RunFolderError(
                f"{self.manifest_path} is cut short or not a JSON object as the trainer writes it; "
                "move it away to go on"
            )
        manifest: dict[str, Any] = found
        return manifest

    def create(self, *, spec: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Make the folder, hold it, and write the resolved spec and the manifest."""
        self.require_free()
        self.path.mkdir(parents=True, exist_ok=True)
        self.hold()
        self.require_free()  # what another process has begun meanwhile
        self._write_spec(spec)
        write_json(self.manifest_path, dict(manifest))

    def noted_data(self) -> dict[str, Any]:
        """Return what the manifest says of the data that the run was trained on last; empty: nothing."""
        history = self._manifest()
        noted = [entry["data"] for entry in (history, *history.get("resumed", ())) if entry.get("data")]
        return dict(noted[-1]) if noted else {}

    def require_data(self, identity: Mapping[str, Any]) -> None:
        """Refuse data that are not those the run was trained on last, as far as either says what they are."""
        noted = self.noted_data()
        if noted and identity and (changes := differences(noted, dict(identity))):
            raise RunFolderError(
                f"the data of {self.path} are not those it was trained on ({'; '.join(changes)}); give those "
                "back, or name the new ones by data.path=…, and the run goes on with them"
            )

    def version_changes(self, now: Mapping[str, Any]) -> list[str]:
        """Return which packages that matter have another version than when the run was trained last."""
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
        """Note in the manifest that the run goes on from ``step``, and what is changed from there on.

        A changed spec is stored, unless ``stored`` is False: nothing is trained with it.
        """
        history = self._manifest()
        resumes = [*history.get("resumed", []), {"step": step, "changes": list(changes), **manifest}]
        write_json(self.manifest_path, {**history, "resumed": resumes})
        if changes and stored:
            # A copy: killed between the two, the folder must not be without its spec.
            before = self.spec_path.read_text(encoding="utf-8")
            write_atomically(self.path / f"spec.until-step-{step:08d}.yaml", before)
            self._write_spec(spec)

    def set_results_aside(self) -> None:
        """Rename the summary and the report of an earlier end, after which training continues.

        They would present the run as finished, with metrics of a later state.
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
        """Note in the manifest which backends ran, for the part of the run that is under way."""
        history = self._manifest()
        part = (history.get("resumed") or [history])[-1]
        part["backends"] = {operation: dict(found) for operation, found in report.items()}
        write_json(self.manifest_path, history)

    def _write_spec(self, spec: Mapping[str, Any]) -> None:
        text = dump_yaml(spec, default_flow_style=None, width=110)
        write_atomically(self.spec_path, text)


def _is_manifest(value: Any) -> bool:
    """Return whether a JSON value has what is read of a manifest in the kinds that are relied on."""
    if not isinstance(value, dict) or not isinstance(value.get("resumed", []), list):
        return False
    starts = [value, *value.get("resumed", [])]
    return all(
        isinstance(start, dict) and isinstance(start.get(key) or {}, dict)
        for start in starts
        for key in ("data", "versions")
    )


def default_folder(name: str, *, root: Path = Path("runs")) -> Path:
    """Return ``runs/<name>-<UTC time>``, with a number behind it where that folder exists."""
    return next(path for path in _candidates(name, root) if not path.exists())


def claim_folder(name: str, *, root: Path = Path("runs")) -> Path:
    """Make the folder that :func:`default_folder` names, for this process alone, and return it.

    Of several processes that start in the same second each gets a folder of its own.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in _candidates(name, root):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the candidates have no end")


def _candidates(name: str, root: Path) -> Iterator[Path]:
    stem = f"{name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    yield root / stem
    for number in itertools.count(2):
        yield root / f"{stem}-{number}"


def folder_to_resume(name: str, *, root: Path = Path("runs")) -> Path:
    """Return the one run of the spec ``name`` under ``runs``; with several the user must say which."""
    found = sorted(path for path in root.glob(f"{name}-*") if RunFolder(path).spec_path.is_file())
    # A name may continue another one (word_problem_s3 and word_problem_s3_explicit are told apart by the
    # time's digit).
    found = [path for path in found if path.name[len(name) + 1 :][:1].isdigit()]
    if not found:
        raise RunFolderError(
            f"nothing to resume: there is no run of {name} under {root}/; name its folder by --output"
        )
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise RunFolderError(f"several runs of {name} could be resumed: {listed}; name one by --output")
    return found[0]


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
    """Return what must be known to repeat a run: versions, machine, device, seed, command, first weights."""
    from implicit_blocks.ops import accelerated  # brings torch, which a dry run does without

    return {
        "name": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "seed": seed,
        "device": device,
        "threads": threads,
        "processes": processes,
        "layout": layout,
        "data": dict(data or {}),
        "started_from": None if started_from is None else dict(started_from),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": versions(),
        "accelerated": accelerated.report(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that shape a run's numbers."""
    found: dict[str, str | None] = {}
    for name in ("implicit_blocks", "torch", "numpy", "pydantic", "safetensors", "matplotlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def of_values(change: str) -> bool:
    """Whether a change of a spec, one of `differences`, can change values: not a choice of backends."""
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
    same = old == new or repr(old) == repr(new)  # a NaN equals none
    return [] if same else [f"{path}: {old!r} → {new!r}"]
