"""The models of a server: loading, and the application that serves them from their own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from implicit_blocks import registry
from implicit_blocks._utils.devices import choose_device
from implicit_blocks.checkpoints.find import CHECKPOINTS, CONFIG, SPEC, list_checkpoints
from implicit_blocks.checkpoints.folder import read_config
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.checkpoints.run_folder import run_of, tokenizer_of
from implicit_blocks.decoding.prompts import check_model
from implicit_blocks.hf.folders import is_known
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.serving.app import create_app
from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.language import Language, language_of
from implicit_blocks.serving.links import ThreadLink
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.word_problem import word_problem_of
from implicit_blocks.specs import load_spec

_SUMMARY = "summary.json"
"""The file with the results of a run, written at its end."""


def load(
    source: Path,
    options: ServerOptions,
    *,
    compare: Path | None = None,
    name: str | None = None,
    spec: str | Path | None = None,
    tokenizer: Path | None = None,
    device: str = "auto",
) -> list[Host]:
    """Return a trained model with its worker, and the model that it is compared with.

    Args:
        source: a run, a checkpoint, an exported or published folder, a file of weights (``load_model``), or a
            folder of another causal language model of transformers.
        options: access and limits.
        compare: the source of a second model, which the page shows beside the first one.
        name: the name of the model in requests; None: that of the source.
        spec: the spec of the model, where the source has none.
        tokenizer: a ``tokenizer.json``, a folder with one, or ``bytes``; None: that of the source, if known.
        device: the device, such as ``cpu`` or ``cuda:1``; ``auto`` is CUDA if available.

    Raises:
        ValueError: as for ``load_model``; a run that has not finished; an invalid tokenizer; a second model
            of the same name.
        ImportError: for a tokenizer other than ``bytes`` if transformers is not installed.

    """

    def host(source: Path, name: str, spec: str | Path | None) -> Host:
        require_finished(source)
        limits = options
        model = _read(source, spec).to(choose_device(device))
        found = tokenizer if tokenizer is not None else tokenizer_of(source)
        language = language_of(found, vocab_size=model.spec.vocab_size)
        if not isinstance(model, LanguageModel):  # of the trainer's baselines
            if model.longest is not None:
                limits = replace(options, max_seq_len=min(model.longest, options.max_seq_len))
            model = model.to_transformers()
            language.stop_token_ids = _end_tokens(model, language)
        return Host(name, model, language, limits, problem=word_problem_of(source))

    first = host(source, name or source.resolve().name, spec)
    if compare is None:
        return [first]
    if compare.resolve().name == first.setup.name:
        raise ValueError(f"two models have the name {first.setup.name}; choose another with --name")
    return [first, host(compare, compare.resolve().name, None)]


def _read(source: Path, spec: str | Path | None) -> Any:
    """Return a model of this library, or a baseline: a model of transformers in the trainer's wrapper."""
    if spec is None and (source / CONFIG).is_file() and not is_known(read_config(source)):
        baseline = registry.entry("model", "transformers").spec.model_validate({"folder": str(source)})
        return registry.build(baseline).eval()
    model = load_model(source, spec=spec)
    if not hasattr(model, "to_transformers"):
        check_model(model)
    return model


def _end_tokens(model: Any, language: Language) -> tuple[int, ...]:
    """Return the tokens that end a text, those of the model's own generation settings included."""
    ends = model.generation_config.eos_token_id
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return tuple(dict.fromkeys([*language.stop_token_ids, *found]))


def application(hosts: Sequence[Host]) -> FastAPI:
    """Return the application that serves models of this process; their workers run while it does."""
    return create_app([host.setup for host in hosts], [ThreadLink(host.worker) for host in hosts])


def require_finished(source: Path) -> None:
    """Check that a run folder belongs to a run that has reached its end.

    A checkpoint of a run is accepted whether or not the run has finished.

    Raises:
        ValueError: the run has not finished; the message names its newest checkpoint.

    """
    run = run_of(source)
    if run is None or run.resolve() != source.resolve() or (run / _SUMMARY).is_file():
        return
    checkpoints = list_checkpoints(run / CHECKPOINTS)
    if not checkpoints:
        raise ValueError(f"{source} has no checkpoint yet; wait for the first one, or finish the run")
    newest = checkpoints[-1]
    total = getattr(load_spec(run / SPEC), "total_steps", None)
    if total is not None and int(newest.name.removeprefix("step-")) >= total:
        return
    end = "" if total is None else f" of {total}"
    raise ValueError(
        f"the run in {source} has not finished (step {int(newest.name.removeprefix('step-'))}{end}); resume "
        f"it with python -m trainer, or serve its newest checkpoint as it is: {newest}"
    )
