"""Initial weights of a run from another run or file: finding, checking, reading, recording.

Finding them imports no torch, so that a dry run can do it; reading them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from implicit_blocks.checkpoints.find import CONFIG, MODEL, SAFETENSORS
from implicit_blocks.models.retrofit import core_of, retrofit, retrofit_spec
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec, load_spec
from implicit_blocks.specs.loading import read_model_spec
from trainer.checkpoint.folder import STATE_FILE, newest_sound_checkpoint, read_state, verify_checkpoint
from trainer.errors import CheckpointError
from trainer.specs.training import InitFromSpec
from trainer.storage.files import sha256_of
from trainer.storage.run_folder import RunFolder, differences, of_values

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.specs.run import RunSpec

_NOT_OF_THE_WEIGHTS = frozenset({"dropout", "embedding_std", "scale_residual_init"})
"""Fields of a model spec that do not matter for trained weights."""


class Origin(NamedTuple):
    """Weights that were found and checked, but not read.

    ``model`` is the spec of their model, ``optimizer`` the kind of optimizer that trained them, and ``task``
    the task they were trained on; each is None if unknown. ``progress`` is that of the other run, for a
    checkpoint; ``complaints`` are the faults of newer checkpoints.
    """

    path: Path
    form: Literal["checkpoint", "transformers", "safetensors"]
    model: ModelSpec | None = None
    optimizer: str | None = None
    progress: Mapping[str, Any] | None = None
    complaints: tuple[str, ...] = ()
    task: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the record for the manifest; the digest is that of the checkpoint's state or of the file."""
        progress = self.progress or {}
        inside = {"checkpoint": STATE_FILE, "transformers": SAFETENSORS, "safetensors": ""}
        file = self.path / inside[self.form]
        return {
            "path": str(self.path.resolve()),
            "form": self.form,
            "model": None if self.model is None else self.model.kind,
            **{name: progress.get(name) for name in ("step", "phase", "samples", "tokens")},
            "sha256": sha256_of(file) if file.is_file() else None,
        }


def find_start(start: InitFromSpec, spec: RunSpec) -> Origin:
    """Find the initial weights of a run and check everything that can be checked without reading them.

    Raises:
        ValueError: nothing is found, no checkpoint is complete, the model or the optimizer differs, or more
            than weights is requested of something other than a checkpoint.

    """
    origin = _find(Path(start.path))
    if origin.model is not None:
        require_fitting(origin.model, spec.model, path=origin.path)
    if None not in (origin.task, spec.data.task) and origin.task != spec.data.task:
        raise CheckpointError(
            f"training.init_from: {origin.path} was trained for another task, {origin.task}; this run's is "
            f"{spec.data.task}; choose a run of this task, or an exported folder to use the weights anyway"
        )
    more = [name for name in ("optimizer", "position") if getattr(start, name)]
    if more and origin.form != "checkpoint":
        raise ValueError(
            f"training.init_from: {origin.path} holds weights only, no {' and no '.join(more)}; "
            "choose a run or a checkpoint, or set "
            + " and ".join(f"training.init_from.{name}=false" for name in more)
        )
    if start.optimizer:
        ours = spec.training.optimizer.kind
        if origin.optimizer not in (None, ours):
            raise ValueError(
                f"training.init_from.optimizer: {origin.path} has the state of {origin.optimizer!r}, this "
                f"run's optimizer is {ours!r}; set training.init_from.optimizer=false"
            )
        if origin.model is not None and origin.model.kind != spec.model.kind:
            raise ValueError(
                f"training.init_from.optimizer: the weights of {origin.path}, a model of kind "
                f"{origin.model.kind!r}, are converted here, and its optimizer has no state for the result; "
                "set training.init_from.optimizer=false"
            )
    return origin


def _find(path: Path) -> Origin:
    if not path.exists():
        raise ValueError(
            f"training.init_from: {path} does not exist; give the folder of a run, a checkpoint, a "
            "pretrained folder of transformers, or a safetensors file"
        )
    if path.is_file():
        return Origin(path, "safetensors")
    if RunFolder(path).spec_path.is_file():
        checkpoint, complaints = newest_sound_checkpoint(RunFolder(path).checkpoints)
        return _checkpoint(checkpoint, path, complaints)
    if (path / STATE_FILE).is_file():
        verify_checkpoint(path)
        return _checkpoint(path, path.resolve().parents[1])
    if (path / CONFIG).is_file():
        return Origin(path, "transformers")
    if (path / SAFETENSORS).is_file():
        beside = read_model_spec(path / MODEL) if (path / MODEL).is_file() else None
        return Origin(path / SAFETENSORS, "safetensors", model=beside)
    raise ValueError(
        f"training.init_from: {path} is not a run, a checkpoint or an exported folder: it has no spec.yaml, "
        f"{STATE_FILE}, {CONFIG} or {SAFETENSORS}"
    )


def _checkpoint(path: Path, run: Path, complaints: list[str] | None = None) -> Origin:
    progress = read_state(path)["progress"]
    spec_path = RunFolder(run).spec_path
    spec: Any = load_spec(str(spec_path)) if spec_path.is_file() else None
    return Origin(
        path,
        "checkpoint",
        model=None if spec is None else spec.model,
        optimizer=None if spec is None else spec.training.optimizer.kind,
        progress=progress,
        complaints=tuple(complaints or ()),
        task=None if spec is None else spec.data.task,
    )


def require_fitting(theirs: ModelSpec, ours: ModelSpec, *, path: Path) -> None:
    """Refuse weights of another model; fields that a phase may change, such as the solver, do not count.

    Raises:
        CheckpointError: the models differ; lists the differences.

    """
    skipped = ours.changeable | theirs.changeable | _NOT_OF_THE_WEIGHTS
    retrofitted = _retrofitted(theirs, ours, path=path)
    if retrofitted is not None:
        theirs, skipped = retrofitted, skipped | {"z_init", "state_policy"}
    elif isinstance(theirs, ExplicitLMSpec) and isinstance(ours, ImplicitLMSpec):
        if ours.start.kind not in ("embedding", "prelude"):
            raise CheckpointError(
                f"training.init_from: {path} is of an explicit model; an implicit model that continues from "
                f"it must start its search at the embedding, got model.z_init={ours.start.kind}; set "
                "model.z_init=embedding"
            )
        skipped |= {"kind", *(set(ImplicitLMSpec.model_fields) - set(ExplicitLMSpec.model_fields))}
        if ours.weight_norm:  # weight norm is added without changing a weight
            skipped |= {"weight_norm"}
    old, new = (
        {name: value for name, value in model.model_dump(mode="json").items() if name not in skipped}
        for model in (theirs, ours)
    )
    if found := list(filter(of_values, differences(old, new, "model"))):
        raise CheckpointError(
            f"training.init_from: {path} is of another model ({'; '.join(found)}); "
            "choose weights of this model, or change the spec"
        )


def _retrofitted(theirs: ModelSpec, ours: ModelSpec, *, path: Path) -> ImplicitLMSpec | None:
    """Return the retrofit of an explicit model whose layers are divided as ours are; None: ours is none."""
    core = core_of(ours) if isinstance(ours, ImplicitLMSpec) else None
    if core is None or not isinstance(theirs, ExplicitLMSpec) or theirs.prelude or theirs.coda:
        return None
    try:
        return retrofit_spec(theirs, *core, gate_init=_gate_init(ours))
    except ValueError as error:
        raise CheckpointError(f"training.init_from: {path}: {error}") from None


def _gate_init(spec: ModelSpec) -> float | None:
    gate_init: float | None = getattr(getattr(spec, "injection", None), "gate_init", None)
    return gate_init


def read_start(origin: Origin, ours: ModelSpec, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a model on the CPU, with the names and shapes of ``like``, its state dict.

    Raises:
        ValueError: the tensors cannot be read, or do not fit; lists all differences.

    """
    from implicit_blocks.checkpoints.folder import check_tensors, read_file
    from implicit_blocks.checkpoints.weights import empty_state
    from trainer.checkpoint.load import read_model_tensors

    theirs = origin.model
    if origin.form == "transformers":
        if not isinstance(ours, ImplicitLMSpec | ExplicitLMSpec):
            raise ValueError(
                f"training.init_from: a model of kind {ours.kind!r} can't load a pretrained folder of "
                "transformers; use model.kind=transformers with model.folder"
            )
        from implicit_blocks.hf.folders import read_pretrained  # imports transformers

        found = read_pretrained(origin.path)
        theirs, tensors = found.spec, found.state
        require_fitting(theirs, ours, path=origin.path)
    elif origin.form == "checkpoint":
        tensors = read_model_tensors(origin.path)
    else:
        tensors = read_file(origin.path)
    if isinstance(theirs, ExplicitLMSpec) and isinstance(ours, ImplicitLMSpec):
        check_tensors(tensors, empty_state(theirs), what=str(origin.path))
        core = core_of(ours)
        if core is None or theirs.prelude or theirs.coda:
            from implicit_blocks.hf.pretrained import as_start  # imports transformers

            _, tensors = as_start(theirs, tensors, weight_norm=ours.weight_norm)
        else:
            _, tensors = retrofit(theirs, tensors, *core, gate_init=_gate_init(ours))
    try:
        check_tensors(tensors, like, what=str(origin.path))
    except ValueError as error:
        listed = str(error).partition("\n")[2]
        raise CheckpointError(
            f"training.init_from: {origin.path} is of another model; its tensors compared with this "
            f"model's:\n{listed}"
        ) from None
    return tensors
