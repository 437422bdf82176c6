"""The commands ``convert`` and ``export``: checkpoints of one kind into another, specs into folders."""

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
    read_pretrained,
    special_tokens,
    write_published,
    write_transformers,
)
from implicit_blocks.hf.tokenizer import check_tokenizer_fits, load_tokenizer, token_fields
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, load_spec

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def convert(
    source: Path,
    destination: Path,
    *,
    to: Literal["transformers", "published"] = "transformers",
    implicit: bool = False,
    fold: bool = False,
    max_shard_size: str = "5GB",
) -> None:
    """Convert a checkpoint; the destination is written whole, or not at all.

    In a folder for transformers the tokenizer has a padding token and pads on the left, as ``generate``
    needs.

    Args:
        source: a folder of the published implementation, of ours, or of a Llama or Mamba2 of transformers.
        destination: a new or empty folder.
        to: a folder for transformers, or for the published implementation.
        implicit: make an explicit model the start of an implicit one.
        fold: fold weight norm into the weights.
        max_shard_size: size that a file of weights may have, such as ``500MB``.

    Raises:
        ValueError: whatever is wrong with the source, in words; or the destination is not empty.

    """
    size = _bytes(max_shard_size)
    pretrained = read_pretrained(source, as_start=implicit)
    if fold:
        pretrained = fold_weight_norm(pretrained)
    if to == "published":
        with whole_folder(destination) as folder:
            write_published(pretrained, folder, max_shard_bytes=size)
            copy_tokenizer(source, folder)
        return
    loaded = _tokenizer_in(source, pretrained)
    if loaded is not None:
        known = {name: value for name, value in pretrained.fields.items() if value is not None}
        pretrained = replace(pretrained, fields=token_fields(loaded) | known)
    with whole_folder(destination) as folder:
        write_transformers(pretrained, folder, max_shard_size=max_shard_size)
        copy_tokenizer(source, folder)
        if loaded is not None:
            loaded.save_pretrained(folder)


def _tokenizer_in(source: Path, pretrained: PretrainedFolder) -> Any | None:
    """Load the folder's tokenizer, if it has a ``tokenizer.json``; None leaves its files as they are.

    What files beside a ``tokenizer.json`` say may need a class or a package that is not here: such a
    tokenizer is copied, with a warning. Without them nothing but the configuration says which token ends a
    text, as lm-eval must know.
    """
    if not (source / "tokenizer.json").is_file():
        return None
    end: Any = pretrained.fields.get("eos_token_id")
    try:
        return load_tokenizer(source, end=next(iter(end), None) if isinstance(end, list) else end)
    except ValueError as error:
        if not (source / "tokenizer_config.json").is_file():
            raise
        print(f"warning: the tokenizer is copied without a check: {error}", file=sys.stderr)
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
    """Write a spec's model, as the last phase leaves it, as a folder of transformers.

    Args:
        spec_name: a name of the zoo, a YAML file, or a run's folder, whose weights are taken then, and the
            tokenizer beside its data.
        destination: a new or empty folder.
        checkpoint: other weights: a file, a checkpoint of the trainer, or a run's folder, of which the newest
            checkpoint is taken that is whole; None, without a run: fresh ones.
        tokenizer: to be in the folder too, as lm-eval and pipelines expect: a ``tokenizer.json``, a folder
            with one, or ``bytes``.
        seed: of fresh weights; None: 0.
        max_shard_size: size that a file of weights may have.

    Raises:
        ValueError: for a spec without a model that can be exported, weights or a tokenizer that do not fit, a
            seed where there is nothing to draw, or a destination that is not empty.
        ImportError: transformers is not installed.

    """
    require_transformers("export")
    _bytes(max_shard_size)
    source = Path(spec_name)
    run_folder = run_of(source) if source.is_dir() else None
    if run_folder is not None and checkpoint is None:
        checkpoint, tokenizer = source, tokenizer or tokenizer_of(source)
    if checkpoint is not None and seed is not None:
        raise ValueError(f"the seed {seed} is of fresh weights, and {checkpoint} has weights; leave it out")
    seed = seed or 0
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    run = load_spec(spec_name if run_folder is None else run_folder / SPEC)
    spec = getattr(run, "final_model", None)
    if not isinstance(spec, ImplicitLMSpec | ExplicitLMSpec):
        made = _build_other(spec, checkpoint=checkpoint, seed=seed)
        if loaded is not None:
            check_tokenizer_fits(loaded, made.config.vocab_size, name=tokenizer)
        with whole_folder(destination) as folder:
            made.save_pretrained(folder, max_shard_size=max_shard_size)
            if loaded is not None:
                loaded.save_pretrained(folder)
        return
    if loaded is not None:
        check_tokenizer_fits(loaded, spec.padded_vocab_size, name=tokenizer)
    if checkpoint is None:
        torch.manual_seed(seed)
        state = build(spec).state_dict()
    else:
        state = _weights_at(checkpoint, empty_state(spec))
    length = getattr(getattr(run, "data", None), "seq_len", None)
    fields = special_tokens(spec) | ({} if length is None else {"max_position_embeddings": length})
    if loaded is not None:
        fields |= token_fields(loaded)
    with whole_folder(destination) as folder:
        write_transformers(PretrainedFolder(spec, dict(state), fields), folder, max_shard_size=max_shard_size)
        if loaded is not None:
            loaded.save_pretrained(folder)


def _build_other(spec: Any, *, checkpoint: Path | None, seed: int) -> Any:
    """Make a model of another kind, which can say what it is to transformers by ``to_transformers()``."""
    torch.manual_seed(seed)
    model: Any = None if spec is None else build(spec)
    if not hasattr(model, "to_transformers"):
        raise ValueError(
            f"a model of kind {getattr(spec, 'kind', None)!r} can't be exported; implicit_lm, explicit_lm "
            "and transformers can, and kinds whose models have a method to_transformers()"
        )
    if checkpoint is not None:
        model.load_state_dict(_weights_at(checkpoint, model.state_dict()))
    return model.to_transformers()


def _weights_at(checkpoint: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read weights, of a run those of its newest whole checkpoint, and say what is wrong with newer ones."""
    path, state, complaints = read_newest_weights(checkpoint, expected=expected)
    for complaint in complaints:
        print(f"warning: {complaint}; {path.name} is exported instead", file=sys.stderr)
    return state


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", size)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"max_shard_size is {size!r}; give a number and KB, MB or GB, such as 500MB")
    return int(match[1]) * _UNITS[match[2]]
