"""Trained models from where they lie: runs of the trainer, checkpoints, folders with a configuration, files.

Of a run's folder only what any reader needs is known here: ``spec.yaml``, and under ``checkpoints`` the
folders ``step-…`` with tensors and the record of their files.
"""

from __future__ import annotations

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
