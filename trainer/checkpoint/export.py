"""Exports of the model during training, as folders that other programs can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from implicit_blocks.checkpoints.find import MODEL, SAFETENSORS, SPEC
from implicit_blocks.checkpoints.run_folder import tokenizer_of_data
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec, load_spec
from implicit_blocks.specs.tree import dump_yaml
from trainer.checkpoint.folder import TEMPORARY, remove_tree
from trainer.checkpoint.rng import random_state, restore_random_state
from trainer.checkpoint.writer import named_tensors
from trainer.distributed import Ranks
from trainer.distributed.tensor_parts import parts_of
from trainer.run.trainable_model import ConvertsToTransformers
from trainer.storage.files import fsync_path


def export_model(model: nn.Module, spec: ModelSpec, folder: Path, *, length: int, ranks: Ranks) -> None:
    """Export ``model`` to ``folder``, atomically.

    The result is a pretrained folder for ``from_pretrained`` if transformers is installed and supports the
    model, with the tokenizer of the run's data and a model card; otherwise ``model.safetensors`` and the
    spec, ``model.yaml``. Every rank must call this: rank 0 gathers sharded tensors and writes.

    Args:
        model: the inner module; its tensors may be sharded.
        spec: of the model.
        folder: to write; an existing one is replaced.
        length: sequence length in training, in tokens.
        ranks: the processes.

    Raises:
        OSError: the folder cannot be written, for example to a full disk; a PeerError on other ranks.

    """
    tensors, aliases = named_tensors(model)
    whole: dict[str, Tensor] = {}
    parts = parts_of(model)
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if parts is not None:
            full = parts.whole(name, full)
        if ranks.is_main:
            whole[name] = full.detach().cpu()

    def write() -> None:
        tied = {name: whole[target] for name, target in aliases.items()}
        _write(model, spec, {**whole, **tied}, folder, length)

    ranks.run_on_rank0(write)


def _write(model: nn.Module, spec: ModelSpec, state: dict[str, Tensor], folder: Path, length: int) -> None:
    temporary = folder.with_name(f"{folder.name}{TEMPORARY}save")
    remove_tree(temporary)
    before = random_state()  # building the model to write draws random weights
    try:
        temporary.mkdir(parents=True)
        if not _write_for_transformers(model, spec, state, temporary, length, _run_of(folder)):
            _write_safetensors(spec, state, temporary)
        for file in temporary.iterdir():
            fsync_path(file)
        fsync_path(temporary)
        if folder.exists() or folder.is_symlink():
            remove_tree(folder)
        temporary.rename(folder)
        fsync_path(folder.parent)
    finally:
        restore_random_state(before)
        remove_tree(temporary)


def _write_for_transformers(
    model: nn.Module, spec: ModelSpec, state: dict[str, Tensor], folder: Path, length: int, run: Path | None
) -> bool:
    """Write a pretrained folder and return True; return False if transformers does not support the model.

    The folder of a run's model also has the tokenizer of its data, if it can be loaded, and a model card.
    """
    if find_spec("transformers") is None:
        return False
    from implicit_blocks.hf import folders, model_card
    from implicit_blocks.hf.tokenizer import add_token_fields, token_fields

    ours = isinstance(spec, ImplicitLMSpec | ExplicitLMSpec)
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if not ours and (sharded or not isinstance(model, ConvertsToTransformers)):
        return False
    tokenizer = (
        None
        if run is None
        else _tokenizer_of(run, getattr(spec, "padded_vocab_size", getattr(spec, "vocab_size", None)))
    )
    with _no_bars():
        if isinstance(spec, ImplicitLMSpec | ExplicitLMSpec):
            fields = folders.special_tokens(spec) | folders.length_fields(length)
            fields |= {} if tokenizer is None else token_fields(tokenizer)
            folders.write_transformers(folders.PretrainedFolder(spec, state, fields), folder)
        else:
            assert isinstance(model, ConvertsToTransformers)
            converted = model.to_transformers()
            if tokenizer is not None:
                add_token_fields(converted, tokenizer)
            converted.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if run is not None:
        model_card.write_card(folder, spec, run=model_card.read_run(run))
    return True


def _run_of(export: Path) -> Path | None:
    """Return the folder of the run that writes an export, ``RUN/exports/NAME``; None: it is no run."""
    run = export.absolute().parents[1]
    return run if (run / SPEC).is_file() else None


def _tokenizer_of(run: Path, rows: int | None) -> Any | None:
    """Return the tokenizer of a run's data; None if it has none, or one that does not fit the model."""
    from implicit_blocks.hf.tokenizer import check_tokenizer_fits, load_tokenizer

    if (path := tokenizer_of_data(getattr(load_spec(run / SPEC), "data", None))) is None:
        return None
    try:
        loaded = load_tokenizer(path)
        if rows is not None:
            check_tokenizer_fits(loaded, rows, name=path)
    except ValueError:  # a model of numbers, or a file that has changed: the export needs no tokenizer
        return None
    return loaded


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, which would disturb that of the training."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_safetensors(spec: ModelSpec, state: dict[str, Tensor], folder: Path) -> None:
    # Clones, because safetensors refuses tensors that share storage, such as tied weights.
    own = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(own, folder / SAFETENSORS, metadata={"format": "pt"})
    text = dump_yaml(spec.model_dump(mode="json"))
    (folder / MODEL).write_text(text, encoding="utf-8")
