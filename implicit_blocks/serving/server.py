"""A server of a trained model: loading, listening, and running until it is stopped."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
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
from implicit_blocks.serving.engine import Engine
from implicit_blocks.serving.language import Language, language_of
from implicit_blocks.serving.metrics import Metrics
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.served import ServedModel
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
) -> FastAPI:
    """Return the application that serves a trained model.

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

    def served(source: Path, name: str, metrics: Metrics, spec: str | Path | None) -> ServedModel:
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
        engine = Engine(model, limits, metrics)
        return ServedModel(name, model, language, engine, limits, problem=word_problem_of(source))

    metrics = Metrics(options.max_batch_size)
    first = served(source, name or source.resolve().name, metrics, spec)
    if compare is None:
        return create_app(first, first.options, metrics)
    second = served(compare, compare.resolve().name, Metrics(options.max_batch_size), None)
    return create_app(first, first.options, metrics, others=[second])


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


def application(model: Any, language: Language, options: ServerOptions, *, name: str) -> FastAPI:
    """Return the application that serves a model in memory, of this library or of transformers.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """
    metrics = Metrics(options.max_batch_size)
    engine = Engine(model, options, metrics)
    return create_app(ServedModel(name, model, language, engine, options), options, metrics)


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


def listen(options: ServerOptions) -> socket.socket:
    """Return a socket that listens at the address of the options.

    Raises:
        ValueError: the port is in use or not allowed, or the host is not an address of this machine.

    """
    host = options.host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {options.host} port {options.port}: {error.strerror or error}; choose another "
            "with --host and --port (--port 0 takes any free port), or stop the program that uses it"
        ) from None
    return listening


def make_server(app: FastAPI, options: ServerOptions) -> uvicorn.Server:
    """Return the HTTP server of an application, to be run with the socket of ``listen``."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.shutdown_seconds) or 1,
        ws="none",
    )
    return uvicorn.Server(config)


def address_of(listening: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
