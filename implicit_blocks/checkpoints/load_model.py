"""Loading a trained model from a run folder, a checkpoint, a pretrained folder, or a file of weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks.checkpoints.find import CONFIG, MODEL, SPEC
from implicit_blocks.checkpoints.run_folder import run_of
from implicit_blocks.checkpoints.weights import empty_state, read_newest_weights
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec, load_spec
from implicit_blocks.specs.loading import read_model_spec

_LOG = logging.getLogger(__name__)


def load_model(source: str | Path, *, spec: str | Path | ModelSpec | None = None) -> Any:
    """Return a trained model, on the CPU, in evaluation mode.

    ```python
    model = load_model("runs/first")                          # the newest complete checkpoint
    made = generate(model, [[0, 3, 2]], max_new_tokens=8)
    ```

    Args:
        source: a run folder, one of its checkpoints, a folder that ``from_pretrained`` reads, a folder of the
            published implementation, or a file of weights (``.safetensors``, or pickled tensors).
        spec: the model spec: a name in the zoo, a YAML file, or the spec itself. None: the spec stored with
            the source; for a run, that of its last phase.

    Returns:
        A module of the spec's kind: an ``ImplicitLM`` or an ``ExplicitLM``, or a plugin's class.

    Raises:
        ValueError: the source does not exist, has no spec, is damaged, or its tensors do not fit the spec
            (all differences are listed). A damaged checkpoint of a run is skipped with a warning if an older
            one is complete.

    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a run, a checkpoint, or a folder with {CONFIG}")
    if source.suffix in (".yaml", ".yml"):
        raise ValueError(
            f"{source} is a spec without weights; give the run folder, or use build(load_spec(…).model) "
            "for a new model"
        )
    if (source / CONFIG).is_file():
        if spec is not None:
            raise ValueError(f"{source} contains its own spec; omit spec (on the command line --spec)")
        from implicit_blocks.hf.folders import read_pretrained  # imports transformers if it is installed

        found = read_pretrained(source)
        for remark in found.remarks:
            _LOG.warning("%s: %s", source, remark)
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
        warnings.warn(f"{complaint}; reading {path.name} instead", stacklevel=2)
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


def _spec_of(source: Path) -> ModelSpec:
    """Return the model spec of a run, or the one stored beside the weights."""
    if source.is_dir() and (run := run_of(source)) is not None:
        return load_spec(run / SPEC).final_model
    folder = source if source.is_dir() else source.parent
    if (folder / MODEL).is_file():
        return read_model_spec(folder / MODEL)
    raise ValueError(
        f"{source} has no model spec; pass spec (on the command line --spec), a zoo name or a YAML file"
    )
