"""The model to evaluate: a spec with weights from a run, a checkpoint, or a pretrained folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from implicit_blocks.checkpoints.find import CONFIG, SAFETENSORS
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.checkpoints.run_folder import tokenizer_of
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.registry import build
from implicit_blocks.specs import load_spec, spec_name
from trainer.checkpoint.folder import STATE_FILE, newest_sound_checkpoint
from trainer.run.trainable_model import ConvertsToTransformers, LimitsLength
from trainer.specs.run import RunSpec
from trainer.storage.run_folder import RunFolder

DEFAULT_LENGTH = 2048
"""Default maximum number of tokens per request, as in lm-eval."""


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A model to evaluate, and its origin.

    ``load`` reads the weights on the CPU; everything else has been validated before. ``rows`` is the size of
    the vocabulary, ``length`` the training length in tokens, ``tokenizer`` a directory that contains one.
    """

    name: str
    weights: Path
    spec: Any
    length: int
    load: Callable[[], nn.Module] = field(repr=False)
    tokenizer: Path | None = None
    notes: tuple[str, ...] = ()
    documents: Literal["ignore", "reset"] = "ignore"
    """Whether the model was trained with separate documents: ``data.documents`` of its run."""
    token_identity: str | None = None
    """SHA-256 that identifies the tokenizer of the training tokens, if known."""

    @property
    def implicit(self) -> bool:
        """Whether the model searches for fixed points."""
        return hasattr(self.spec, "at_evaluation")

    @property
    def exit(self) -> str | None:
        """The kind of the exit criterion, if it is implicit."""
        return self.spec.at_evaluation.exit.kind if self.implicit else None

    @property
    def limit(self) -> str:
        """The search option that limits its iterations."""
        return "loops" if self.exit == "fixed" else "max_iterations"

    @property
    def rows(self) -> int | None:
        """Size of the vocabulary including padding, or None if the spec does not determine it."""
        rows = getattr(self.spec, "padded_vocab_size", None) or getattr(self.spec, "vocab_size", None)
        return None if rows is None else int(rows)


def find_eval_model(checkpoint: Path, *, spec: str | None = None, overrides: Sequence[str] = ()) -> EvalModel:
    """Find the model to evaluate, without reading its weights.

    Args:
        checkpoint: a run directory (its newest valid checkpoint), a checkpoint of the trainer, a safetensors
            file, or a pretrained folder of transformers.
        spec: a zoo name or a YAML file; None: the run's own, or that of the folder.
        overrides: changes of the spec, such as ``"model.at_evaluation.exit.loops=8"``.

    Raises:
        ValueError: the path is none of these, has no spec, or (a pretrained folder) has weights that do not
            fit; or the last phase of a run sets what the overrides change.

    """
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint} does not exist; give a run, a checkpoint, or a pretrained folder")
    if (checkpoint / CONFIG).is_file():
        if spec is not None or overrides:
            raise ValueError(f"{checkpoint} contains its own config; omit --spec and path=value")
        return _of_transformers(checkpoint)
    weights, run, notes = _weights(checkpoint)
    if spec is not None:
        name, source = spec_name(spec), spec
    elif run is not None:
        name, source = run.run_name(), str(run.spec_path)
    else:
        raise ValueError(f"{checkpoint} has no spec; set --spec")
    loaded = load_spec(source, overrides)
    before = load_spec(source) if overrides else loaded
    undone = loaded.final_model == before.final_model
    if undone and isinstance(loaded, RunSpec) and loaded.model != getattr(before, "model", None):
        raise ValueError(
            f"{', '.join(overrides)} changes nothing, because the last phase of the run sets that, too; "
            f"change the phase: phases.{loaded.phases[-1].name}.model.…"
        )
    length = getattr(getattr(loaded, "data", None), "seq_len", DEFAULT_LENGTH)
    return EvalModel(
        name=name,
        weights=weights,
        spec=loaded.final_model,
        length=length,
        load=lambda: load_model(weights, spec=loaded.final_model),
        tokenizer=tokenizer_of(checkpoint),
        notes=tuple(notes),
        documents=getattr(getattr(loaded, "data", None), "documents", "ignore"),
        token_identity=None if run is None else _tokenizer_in(run.noted_data()),
    )


def _weights(checkpoint: Path) -> tuple[Path, RunFolder | None, list[str]]:
    """Return the path of the weights, the run they belong to, and problems with newer checkpoints."""
    if not checkpoint.is_dir():
        return checkpoint, None, []
    run = RunFolder(checkpoint)
    if run.spec_path.is_file():
        path, complaints = newest_sound_checkpoint(run.checkpoints)
        return path, run, complaints
    if (checkpoint / STATE_FILE).is_file():
        of_run = RunFolder(checkpoint.resolve().parents[1])
        return checkpoint, of_run if of_run.spec_path.is_file() else None, []
    if (checkpoint / SAFETENSORS).is_file():
        return checkpoint / SAFETENSORS, None, []
    raise ValueError(
        f"{checkpoint} is not a run, checkpoint or pretrained folder: it has no spec.yaml, {STATE_FILE}, "
        f"{CONFIG} or {SAFETENSORS}"
    )


def _tokenizer_in(identity: Mapping[str, Any]) -> str | None:
    """Return the tokenizer in the identity of data; that of a mixture contains those of its sources."""
    parts = (_tokenizer_in(part) for part in identity.values() if isinstance(part, Mapping))
    own = identity.get("tokenizer")
    return own if isinstance(own, str) else next(filter(None, parts), None)


def _of_transformers(folder: Path) -> EvalModel:
    from implicit_blocks.hf.folders import read_pretrained  # needs transformers; runs don't

    found = read_pretrained(folder)

    def load() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = build(found.spec)
        model.load_state_dict(found.state, assign=True)
        return model

    return EvalModel(
        name=folder.resolve().name,
        weights=folder,
        spec=found.spec,
        length=int(found.fields.get("max_position_embeddings", DEFAULT_LENGTH)),
        load=load,
        tokenizer=folder if (folder / "tokenizer.json").is_file() else None,
    )


ANY_LENGTH = 2**31 - 1
"""Request length for models without a limit: rotary positions and recurrent states extrapolate."""


def longest_request(model: nn.Module) -> int | None:
    """Return the maximum number of tokens for which a model has positions; None: unlimited."""
    if isinstance(model, LanguageModel):
        return None
    if isinstance(model, LimitsLength):
        return model.longest
    most = getattr(as_transformers(model).config, "max_position_embeddings", None)
    return None if most is None else int(most)


def as_transformers(model: nn.Module) -> Any:
    """Return a model as a transformers model that shares its storage, as lm-eval requires.

    Models of the library accept requests of any length, whatever their training length.

    Raises:
        ValueError: it is not a language model of the library and has no method ``to_transformers``.

    """
    if isinstance(model, LanguageModel):
        from implicit_blocks.hf.folders import from_library

        return from_library(model, max_position_embeddings=ANY_LENGTH)
    if not isinstance(model, ConvertsToTransformers):
        raise ValueError(
            f"lm-eval cannot evaluate a {type(model).__name__}: it has no method to_transformers()"
        )
    return model.to_transformers()
