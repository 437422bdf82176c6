"""What is evaluated: a spec with weights from a run, a checkpoint, or a folder of transformers."""

from __future__ import annotations

from collections.abc import Callable
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
from trainer.checkpoint.load import STATE_FILE, newest_sound_checkpoint
from trainer.storage.run_folder import RunFolder

DEFAULT_LENGTH = 2048
"""Tokens of a request at most where nothing says otherwise, as in lm-eval."""


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A model to be evaluated, and where it comes from.

    ``load`` reads the weights, on the CPU; what can be refused without them has been. ``rows`` is the size of
    its vocabulary, ``length`` the tokens it was trained on at once, ``tokenizer`` a folder that has one.
    """

    name: str
    weights: Path
    spec: Any
    length: int
    load: Callable[[], nn.Module] = field(repr=False)
    tokenizer: Path | None = None
    notes: tuple[str, ...] = ()
    documents: Literal["ignore", "reset"] = "ignore"
    """Whether it was trained with the documents of a row kept apart: ``data.documents`` of its run."""
    token_identity: str | None = None
    """The SHA-256 that identifies the tokenizer of the tokens it was trained on, where that is known."""

    @property
    def implicit(self) -> bool:
        """Whether it searches for fixed points."""
        return hasattr(self.spec, "at_evaluation")

    @property
    def rows(self) -> int | None:
        """The size of the vocabulary, with its padding; None where the spec doesn't tell."""
        rows = getattr(self.spec, "padded_vocab_size", None) or getattr(self.spec, "vocab_size", None)
        return None if rows is None else int(rows)


def find_eval_model(checkpoint: Path, *, spec: str | None = None) -> EvalModel:
    """Find out what is to be evaluated; the weights are not read yet.

    Args:
        checkpoint: a run's folder (its newest checkpoint that is whole), a checkpoint of the trainer, a file
            of safetensors, or a folder that transformers reads.
        spec: a name of the zoo or a YAML file; None: the run's own, or what the folder says.

    Raises:
        ValueError: there is nothing of the kind, no spec, or (a folder of transformers) weights that do not
            fit.

    """
    if not checkpoint.exists():
        raise ValueError(f"there is nothing at {checkpoint}; give a run, a checkpoint, or an exported folder")
    if (checkpoint / CONFIG).is_file():
        if spec is not None:
            raise ValueError(f"{checkpoint} says itself what model it is; leave --spec out")
        return _of_transformers(checkpoint)
    weights, run, notes = _weights(checkpoint)
    if spec is not None:
        name, loaded = spec_name(spec), load_spec(spec)
    elif run is not None:
        name, loaded = run.run_name(), load_spec(run.spec_path)
    else:
        raise ValueError(f"{checkpoint} doesn't say what model it is; name its spec by --spec")
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
        token_identity=None if run is None else _text(run.noted_data().get("tokenizer")),
    )


def _weights(checkpoint: Path) -> tuple[Path, RunFolder | None, list[str]]:
    """Find the weights, the run they belong to, and what is wrong with newer ones."""
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
        f"{checkpoint} is no run, no checkpoint and no exported folder: it has no spec.yaml, {STATE_FILE}, "
        f"{CONFIG} or {SAFETENSORS}"
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


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
"""Tokens of a request where nothing limits them: rotary positions and recurrent states go on."""


def longest_request(model: nn.Module) -> int | None:
    """Return how many tokens a model can read at once, for which it has positions; None: any number."""
    if isinstance(model, LanguageModel):
        return None
    if hasattr(model, "longest"):
        known: Any = model.longest
        return None if known is None else int(known)
    most = getattr(as_transformers(model).config, "max_position_embeddings", None)
    return None if most is None else int(most)


def as_transformers(model: nn.Module) -> Any:
    """Return a model as transformers has it, which is what lm-eval asks; its storage is shared.

    One of the library reads requests of any length, whatever it was trained on.

    Raises:
        ValueError: it is none of the library's language models, and can't say what it is to transformers.

    """
    if isinstance(model, LanguageModel):
        from implicit_blocks.hf.folders import from_library

        return from_library(model, max_position_embeddings=ANY_LENGTH)
    convert: Any = getattr(model, "to_transformers", None)
    if convert is None:
        raise ValueError(
            f"a {type(model).__name__} can't be asked by lm-eval: it has no method to_transformers()"
        )
    return convert()
