"""The commands ``convert`` (pretrained folders between formats) and ``export`` (a model to a folder)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from implicit_blocks.checkpoints.find import SPEC
from implicit_blocks.checkpoints.folder import whole_folder
from implicit_blocks.checkpoints.run_folder import run_of, tokenizer_of
from implicit_blocks.checkpoints.weights import empty_state, read_newest_weights
from implicit_blocks.hf import require_transformers
from implicit_blocks.hf.folders import (
    PretrainedFolder,
    copy_tokenizer,
    fold_weight_norm,
    length_fields,
    read_pretrained,
    special_tokens,
    write_original,
    write_published,
    write_transformers,
)
from implicit_blocks.hf.model_card import RunRecord, read_run, write_card
from implicit_blocks.hf.tokenizer import add_token_fields, check_tokenizer_fits, load_tokenizer, token_fields
from implicit_blocks.models.retrofit import parse_core, retrofit
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, load_spec

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def convert(
    source: Path,
    destination: Path,
    *,
    to: Literal["transformers", "published", "original"] = "transformers",
    implicit: bool = False,
    core: str | None = None,
    fold: bool = False,
    max_shard_size: str = "5GB",
) -> None:
    """Convert a pretrained folder; the destination is written completely or not at all.

    In a folder for transformers, the tokenizer has a padding token and pads on the left, as ``generate``
    requires.

    Args:
        source: a folder of a published implementation (of this library's models, of Attractor, Parcae, Huginn
            or Ouro), of this library, or of a Llama, Qwen2, Qwen3, Mistral or Mamba2 model of transformers.
        destination: a new or empty folder.
        to: the format: this library's classes for transformers, the published implementation that the model
            is of, or the class of transformers that computes an explicit model's function.
        implicit: initialize an implicit model from an explicit one.
        core: ``FIRST:STOP``: iterate these layers of an explicit model (``implicit_blocks.models.retrofit``).
        fold: fold weight norm into the weights.
        max_shard_size: maximum size of a weights file, such as ``500MB``.

    Raises:
        ValueError: the source is invalid, or the destination is not empty.

    """
    size = _bytes(max_shard_size)
    if implicit and core is not None:
        raise ValueError("--implicit iterates all layers and --core some of them; give one of the two")
    pretrained = read_pretrained(source, as_start=implicit)
    for remark in pretrained.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if fold:
        pretrained = fold_weight_norm(pretrained)
    if core is not None:
        first, stop = parse_core(core)
        spec, state = retrofit(pretrained.spec, pretrained.state, first, stop)
        pretrained = PretrainedFolder(spec, state, pretrained.fields)
    if to == "published":
        with whole_folder(destination) as folder:
            write_published(pretrained, folder, max_shard_bytes=size)
            copy_tokenizer(source, folder)
        return
    loaded = _tokenizer_in(source, pretrained)
    if loaded is not None:
        known = {name: value for name, value in pretrained.fields.items() if value is not None}
        pretrained = replace(pretrained, fields=token_fields(loaded) | known)
    write = write_original if to == "original" else write_transformers
    with whole_folder(destination) as folder:
        write(pretrained, folder, max_shard_size=max_shard_size)
        copy_tokenizer(source, folder)
        if loaded is not None:
            loaded.save_pretrained(folder)


def _tokenizer_in(source: Path, pretrained: PretrainedFolder) -> Any | None:
    """Load the folder's tokenizer if it has a ``tokenizer.json``; None: copy its files unchanged.

    Files beside a ``tokenizer.json`` may require a class or a package that is not installed; such a
    tokenizer is copied with a warning. Without these files, only the configuration tells which token ends
    a text, which lm-eval needs to know.
    """
    if not (source / "tokenizer.json").is_file():
        return None
    end: Any = pretrained.fields.get("eos_token_id")
    try:
        return load_tokenizer(source, end=next(iter(end), None) if isinstance(end, list) else end)
    except ValueError as error:
        if not (source / "tokenizer_config.json").is_file():
            raise
        print(f"warning: the tokenizer is copied unchecked: {error}", file=sys.stderr)
        return None


def export(
    spec_name: str,
    destination: Path,
    *,
    checkpoint: Path | None = None,
    tokenizer: Path | None = None,
    seed: int | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Export a spec's model, in the state of its last phase, to a transformers folder with a model card.

    Args:
        spec_name: a name in the zoo, a YAML file, or a run folder; a run folder also provides the weights
            and the tokenizer of its data.
        destination: a new or empty folder.
        checkpoint: other weights: a file, a checkpoint of the trainer, or a run folder (its newest complete
            checkpoint). None, without a run: new random weights.
        tokenizer: tokenizer to add to the folder, as lm-eval and pipelines expect: a ``tokenizer.json``, a
            folder with one, or ``bytes``.
        seed: seed of new random weights; None: 0.
        max_shard_size: maximum size of a weights file.

    Raises:
        ValueError: the spec has no exportable model, the weights or the tokenizer do not fit, a seed is
            given together with weights, or the destination is not empty.
        ImportError: transformers is not installed.

    """
    require_transformers("export")
    _bytes(max_shard_size)
    source = Path(spec_name)
    run_folder = run_of(source) if source.is_dir() else None
    weights_seed = (seed or 0) if checkpoint is None and run_folder is None else None
    if run_folder is not None and checkpoint is None:
        checkpoint, tokenizer = source, tokenizer or tokenizer_of(source)
    if checkpoint is not None and seed is not None:
        raise ValueError(f"seed {seed} needs new weights, but {checkpoint} has weights; omit the seed")
    seed = seed or 0
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    run = load_spec(spec_name if run_folder is None else run_folder / SPEC)
    spec = getattr(run, "final_model", None)
    if not isinstance(spec, ImplicitLMSpec | ExplicitLMSpec):
        converted, weights = _build_other(spec, checkpoint=checkpoint, seed=seed)
        if loaded is not None:
            check_tokenizer_fits(loaded, converted.config.vocab_size, name=tokenizer)
            add_token_fields(converted, loaded)
        with whole_folder(destination) as folder:
            converted.save_pretrained(folder, max_shard_size=max_shard_size)
            if loaded is not None:
                loaded.save_pretrained(folder)
            write_card(folder, spec, run=_record_of(weights), seed=weights_seed)
        return
    if loaded is not None:
        check_tokenizer_fits(loaded, spec.padded_vocab_size, name=tokenizer)
    weights = None
    if checkpoint is None:
        torch.manual_seed(seed)
        state = build(spec).state_dict()
    else:
        weights, state = _weights_at(checkpoint, empty_state(spec))
    fields = special_tokens(spec) | length_fields(getattr(getattr(run, "data", None), "seq_len", None))
    if loaded is not None:
        fields |= token_fields(loaded)
    with whole_folder(destination) as folder:
        write_transformers(PretrainedFolder(spec, dict(state), fields), folder, max_shard_size=max_shard_size)
        if loaded is not None:
            loaded.save_pretrained(folder)
        write_card(folder, spec, run=_record_of(weights), seed=weights_seed)


def _record_of(weights: Path | None) -> RunRecord | None:
    """Return the records of the run of these weights up to their step; None: they are not from a run."""
    run = None if weights is None else run_of(weights)
    if weights is None or run is None:
        return None
    step = weights.name.removeprefix("step-")
    return read_run(run, step=int(step) if step.isdigit() else None)


def _build_other(spec: Any, *, checkpoint: Path | None, seed: int) -> tuple[Any, Path | None]:
    """Build a model of another kind, which has ``to_transformers()``, and return also its weights' path."""
    torch.manual_seed(seed)
    model: Any = None if spec is None else build(spec)
    if not hasattr(model, "to_transformers"):
        raise ValueError(
            f"models of kind {getattr(spec, 'kind', None)!r} cannot be exported; supported are implicit_lm, "
            "explicit_lm, transformers, and kinds whose models have a method to_transformers()"
        )
    path = None
    if checkpoint is not None:
        path, state = _weights_at(checkpoint, model.state_dict())
        model.load_state_dict(state)
    return model.to_transformers(), path


def _weights_at(checkpoint: Path, expected: Mapping[str, Tensor]) -> tuple[Path, dict[str, Tensor]]:
    """Read weights, for a run from its newest complete checkpoint; warn about damaged newer ones."""
    path, state, complaints = read_newest_weights(checkpoint, expected=expected)
    for complaint in complaints:
        print(f"warning: {complaint}; {path.name} is exported instead", file=sys.stderr)
    return path, state


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", size)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size is {size!r}; expected a number with KB, MB or GB, such as 500MB")
    return int(match[1]) * _UNITS[match[2]]
