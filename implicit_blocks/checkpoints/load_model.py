"""Trained models from where they lie: runs of the trainer, checkpoints, folders with a configuration, files.

Of a run's folder only what any reader needs is known here: ``spec.yaml``, and under ``checkpoints`` the
folders ``step-…`` with tensors and the record of their files.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks.checkpoints.find import (
    BYTES,
    CHECKPOINTS,
    CONFIG,
    MANIFEST,
    MODEL,
    MODEL_PREFIX,
    RECORD,
    SAFETENSORS,
    SPEC,
    TOKENIZER,
    read_newest,
    require_whole,
)
from implicit_blocks.checkpoints.folder import check_tensors, read_file
from implicit_blocks.checkpoints.sharded import read_whole_tensors
from implicit_blocks.checkpoints.tensor_index import has_index
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec, load_spec
from implicit_blocks.specs.loading import read_model_spec


def load_model(source: str | Path, *, spec: str | Path | ModelSpec | None = None) -> Any:
    """Return a trained model, on the CPU, in evaluation mode.

    ```python
    model = load_model("runs/first")                          # the newest checkpoint that is whole
    made = generate(model, [[0, 3, 2]], max_new_tokens=8)
    ```

    Args:
        source: a run's folder, one of its checkpoints, a folder that ``from_pretrained`` reads, one of the
            published implementation, or a file of weights (``.safetensors``, or pickled tensors).
        spec: of the model: a name in the zoo, a YAML file, or the spec itself. None: what the source says; a
            run's model is the one of its last phase.

    Returns:
        A module of the spec's kind: an ``ImplicitLM`` or an ``ExplicitLM``, unless a plugin brought the kind.

    Raises:
        ValueError: there is nothing, it does not say what model it is, it is damaged, or its tensors are not
            those of the spec, all of which are listed. A damaged checkpoint of a run is passed over with a
            warning, where an older one is whole.

    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"there is nothing at {source}; give a run, a checkpoint, or a folder with {CONFIG}")
    if source.suffix in (".yaml", ".yml"):
        raise ValueError(
            f"{source} is a spec, which has no weights; give the run's folder, or build(load_spec(…).model) "
            "for fresh ones"
        )
    if (source / CONFIG).is_file():
        if spec is not None:
            raise ValueError(f"{source} says itself what model it is; leave the spec out")
        from implicit_blocks.hf.folders import read_pretrained  # brings transformers, where it is installed

        found = read_pretrained(source)
        return _with_weights(found.spec, found.state)
    known = _spec_of(source) if spec is None else _model_spec(spec)
    model: nn.Module | None = None
    if isinstance(known, ImplicitLMSpec | ExplicitLMSpec):
        expected = empty_state(known)
    else:
        model = build(known)
        expected = model.state_dict()
    path, state, complaints = read_newest_weights(source, expected=expected)
    for complaint in complaints:
        warnings.warn(f"{complaint}; {path.name} is read instead", stacklevel=2)
    if isinstance(known, ImplicitLMSpec | ExplicitLMSpec):
        return _with_weights(known, state)
    assert model is not None
    model.load_state_dict(state)
    return model.eval()


def _with_weights(spec: ImplicitLMSpec | ExplicitLMSpec, state: Mapping[str, Tensor]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(spec)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _model_spec(spec: str | Path | ModelSpec) -> ModelSpec:
    return spec if isinstance(spec, ModelSpec) else load_spec(spec).final_model


def run_of(source: Path) -> Path | None:
    """Return the folder of the run that ``source`` is, or is a checkpoint of, if of any."""
    for run in (source, source.resolve().parent.parent):
        if (run / SPEC).is_file() and (run / CHECKPOINTS).is_dir():
            return run
    return None


def tokenizer_of(source: Path) -> Path | None:
    """Find the tokenizer in an exported folder, or of the data of a run or a checkpoint of one.

    Returns:
        A ``tokenizer.json``, a folder with one, or ``bytes`` for the tokenizer that needs no file; None: no
        tokenizer is known.

    """
    if (source / TOKENIZER).is_file():
        return source
    if (run := run_of(source)) is None:
        return None
    found = (_tokenizer_of_data(data) for data in _texts(getattr(load_spec(run / SPEC), "data", None)))
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def _texts(data: Any) -> Iterator[Any]:
    """Yield a data source's spec, or those that a mixture is made of."""
    yield data
    for source in getattr(data, "sources", ()):
        yield from _texts(getattr(source, "data", None))


def _tokenizer_of_data(data: Any) -> Path | None:
    path, named = getattr(data, "path", None), getattr(data, "tokenizer", None)
    if path is not None and (Path(path) / TOKENIZER).is_file():
        return Path(path)
    if named is not None:
        return Path(named) if named == BYTES or Path(named).exists() else None
    folders = [] if path is None else [Path(path), *sorted(Path(path).glob("*/"))]
    return Path(BYTES) if any(_made_of_bytes(folder / MANIFEST) for folder in folders) else None


def _made_of_bytes(manifest: Path) -> bool:
    """Whether a manifest of token files says that their ids are bytes."""
    if not manifest.is_file():
        return False
    try:
        return bool(json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["kind"] == BYTES)
    except (ValueError, KeyError, TypeError):  # of something else, or damaged, which who reads the data says
        return False


def _spec_of(source: Path) -> ModelSpec:
    """Find out what model it is: by the run's spec, or by one beside the weights."""
    if source.is_dir() and (run := run_of(source)) is not None:
        return load_spec(run / SPEC).final_model
    folder = source if source.is_dir() else source.parent
    if (folder / MODEL).is_file():
        return read_model_spec(folder / MODEL)
    raise ValueError(
        f"{source} doesn't say what model it is; give its spec: a name in the zoo, or a YAML file"
    )


# ------------------------------------------------------------------------------------ weights


def empty_state(spec: ImplicitLMSpec | ExplicitLMSpec) -> dict[str, Tensor]:
    """Return a model's state dict on the meta device: names and shapes."""
    with torch.device("meta"):
        model: nn.Module = build(spec)
    return model.state_dict()


def read_newest_weights(
    source: Path, *, expected: Mapping[str, Tensor]
) -> tuple[Path, dict[str, Tensor], list[str]]:
    """Read weights as :func:`read_weights` does; of a run's folder those of the newest whole checkpoint.

    The run may be training meanwhile, and remove a checkpoint while it is read: the next one is read then.

    Returns:
        Where they were, the weights, and what is wrong with each newer checkpoint.

    Raises:
        ValueError: as :func:`read_weights`; or the run has no checkpoint, or none is whole.

    """
    if not (source / CHECKPOINTS).is_dir():
        return source, read_weights(source, expected=expected), []
    path, state, complaints = read_newest(
        source / CHECKPOINTS, require_whole, lambda path: read_weights(path, expected=expected)
    )
    if path is not None and state is not None:
        return path, state, complaints
    if not complaints:
        raise ValueError(f"the run in {source} has no checkpoint yet; train it, or give a file of weights")
    raise ValueError(f"the run in {source} has no checkpoint that is whole: {'; '.join(complaints)}")


def read_weights(path: Path, *, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a file of weights, or a checkpoint of the trainer, whose checksums are looked at.

    Args:
        path: the file, a folder with ``model.safetensors``, or the checkpoint.
        expected: the model's own state dict. Of weights that are tied the trainer stores one; the others are
            found by it, unless it is on the meta device.

    Raises:
        ValueError: they can't be read, or don't fit; all that differs is listed.

    """
    state = _read(path)
    stored = {expected[name].data_ptr(): tensor for name, tensor in state.items() if name in expected}
    tied = {
        name: stored[own.data_ptr()]
        for name, own in expected.items()
        if name not in state and not own.is_meta and own.data_ptr() in stored
    }
    state |= tied
    check_tensors(state, expected, what=str(path))
    return state


def _read(path: Path) -> dict[str, Tensor]:
    if (path / RECORD).is_file():  # else a folder of weights, or of tensors without a record of them
        try:
            require_whole(path)
        except ValueError as error:
            raise ValueError(f"{error}; take another checkpoint") from None
    if has_index(path):
        tensors = read_whole_tensors(path, prefix=MODEL_PREFIX)
        if not tensors:
            raise ValueError(f"{path} has no tensors of a model; give a checkpoint of the trainer")
        return tensors
    file = path / SAFETENSORS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there are no weights at {file}; give a file, a folder with {SAFETENSORS}, "
            "or a checkpoint of the trainer"
        )
    return read_file(file)
