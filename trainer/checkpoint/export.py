"""Exporting the model while it trains: folders that other programs read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from implicit_blocks.checkpoints.find import MODEL, SAFETENSORS
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec
from implicit_blocks.specs.tree import dump_yaml
from trainer.checkpoint.folder import TEMPORARY, remove_tree
from trainer.checkpoint.rng import random_state, restore_random_state
from trainer.checkpoint.writer import named_tensors
from trainer.distributed import Ranks
from trainer.storage.files import fsync_path


def export_model(model: nn.Module, spec: ModelSpec, folder: Path, *, length: int, ranks: Ranks) -> None:
    """Write ``model`` into the new folder ``folder``: whole, or not at all.

    With transformers installed it is a folder for ``from_pretrained``; without, or for a model that
    transformers can't be told of, ``model.safetensors`` and ``model.yaml``, its spec. Every rank must call
    this: sharded tensors are put together on the main one, which writes.

    Args:
        model: the inner module; its tensors may be sharded.
        spec: of the model.
        folder: where to; what is there is replaced.
        length: tokens it was trained on at once.
        ranks: the processes.

    Raises:
        OSError: it can't be written, such as to a full disk; on other ranks a RuntimeError.

    """
    tensors, aliases = named_tensors(model)
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.is_main:
            whole[name] = full.detach().cpu()
    ranks.run_on_rank0(lambda: _write(model, spec, {**whole, **_under(aliases, whole)}, folder, length))


def _under(aliases: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[target] for name, target in aliases.items()}


def _write(model: nn.Module, spec: ModelSpec, state: dict[str, Tensor], folder: Path, length: int) -> None:
    temporary = folder.with_name(f"{folder.name}{TEMPORARY}save")
    remove_tree(temporary)
    before = random_state()  # what is built for writing draws initial weights
    try:
        temporary.mkdir(parents=True)
        if not _write_for_transformers(model, spec, state, temporary, length):
            _write_plainly(spec, state, temporary)
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
    model: nn.Module, spec: ModelSpec, state: dict[str, Tensor], folder: Path, length: int
) -> bool:
    """Write a folder of transformers, where it is installed and knows such a model; else say so."""
    if find_spec("transformers") is None:
        return False
    from implicit_blocks.hf.folders import PretrainedFolder, special_tokens, write_transformers

    if isinstance(spec, ImplicitLMSpec | ExplicitLMSpec):
        fields: dict[str, Any] = {**special_tokens(spec), "max_position_embeddings": length}
        with _no_bars():
            write_transformers(PretrainedFolder(spec, state, fields), folder)
        return True
    make = getattr(model, "to_transformers", None)
    if make is None or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return False
    with _no_bars():
        make().save_pretrained(folder)
    return True


@contextmanager
def _no_bars() -> Iterator[None]:
    """Have transformers show no bars of its own: one of the training's is on the screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_plainly(spec: ModelSpec, state: dict[str, Tensor], folder: Path) -> None:
    # safetensors refuses tensors that share storage, such as tied weights under two names.
    own = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(own, folder / SAFETENSORS, metadata={"format": "pt"})
    text = dump_yaml(spec.model_dump(mode="json"))
    (folder / MODEL).write_text(text, encoding="utf-8")
