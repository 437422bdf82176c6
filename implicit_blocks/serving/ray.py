"""Replicas of a server behind Ray Serve, on one machine or several.

    serve run implicit_blocks.serving.ray:app source=runs/first min_replicas=2 max_replicas=8

Every replica is the server of ``python -m implicit_blocks serve`` on its own GPU. Ray distributes requests
among the replicas, changes their number with the load, and replaces those that fail.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from prometheus_client.core import Metric
from pydantic import BaseModel, ConfigDict, TypeAdapter, model_validator

from implicit_blocks._utils.devices import choose_device
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.serving.options import KEY_VARIABLE, ServerOptions

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, for Ray's own fields
        from ray import serve

    from implicit_blocks.serving.relay import Part, Relay, respond
except ImportError as error:
    raise ImportError(
        f"implicit_blocks.serving.ray needs Ray Serve ({error}); {install_extra('ray')}", name="ray"
    ) from error


class Arguments(BaseModel):
    """Arguments of ``app`` beside the options of the server.

    ``source``, ``name``, ``spec``, ``tokenizer`` and ``device`` are those of the command ``serve``; all
    machines need the paths. The number of replicas stays between ``min_replicas`` and ``max_replicas``, which
    is ``min_replicas`` unless set. ``gpus`` and ``cpus`` are those of a replica; ``gpus`` is 1 if this
    process has CUDA.
    """

    model_config = ConfigDict(extra="forbid")

    source: Path
    name: str | None = None
    spec: Path | None = None
    tokenizer: Path | None = None
    device: str = "auto"
    min_replicas: int = 1
    max_replicas: int | None = None
    gpus: float | None = None
    cpus: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.source.exists():
            raise ValueError(f"source {self.source} does not exist; give a run, a checkpoint, or a folder")
        most = self.min_replicas if self.max_replicas is None else self.max_replicas
        if not 1 <= self.min_replicas <= most:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {most}; choose 1 or more, and at most "
                "max_replicas"
            )
        return self


_RELAYED = 256
"""The number of requests per process of the ingress above which Ray adds another."""

_OPTIONS = {field.name for field in fields(ServerOptions)} - {"host", "port", "api_key"}


def app(arguments: dict[str, Any]) -> Any:
    """Return the application for ``serve run`` and ``serve.run``.

    The API key is read from the environment of this process. Without one, replicas answer clients of their
    own machine only, unless ``no_auth`` is set.

    Args:
        arguments: those of ``Arguments``, and options of the server; texts are converted.

    Raises:
        ValueError: an unknown argument, a source that does not exist, or options out of range.

    """
    settings = Arguments.model_validate({name: arguments[name] for name in arguments.keys() - _OPTIONS})
    chosen = {name: arguments[name] for name in arguments.keys() & _OPTIONS}
    chosen["api_key"] = os.environ.get(KEY_VARIABLE)
    options = TypeAdapter(ServerOptions).validate_python(chosen)
    gpus = settings.gpus
    if gpus is None:
        gpus = 1.0 if choose_device(settings.device).type == "cuda" else 0.0
    replicas = {
        "min_replicas": settings.min_replicas,
        "max_replicas": settings.max_replicas or settings.min_replicas,
    }
    room = options.max_batch_size + options.max_queue

    paths = {name: _absolute(getattr(settings, name)) for name in ("source", "spec", "tokenizer")}

    def build() -> Any:
        from implicit_blocks.serving.server import application, load

        return application(load(**paths, options=options, name=settings.name, device=settings.device))

    deployment: Any = serve.deployment(
        serve.ingress(build)(_Replica),
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": gpus},
        autoscaling_config={**replicas, "target_ongoing_requests": options.max_batch_size},
        max_ongoing_requests=2 * room,  # more than fit, so that a full replica answers 429 itself
        graceful_shutdown_timeout_s=options.shutdown_seconds,
    )
    relay: Any = serve.deployment(
        Relay,
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": replicas["max_replicas"],
            "target_ongoing_requests": _RELAYED,
        },
        max_ongoing_requests=2 * room * replicas["max_replicas"],
        graceful_shutdown_timeout_s=options.shutdown_seconds,
    )
    return relay.bind(deployment.bind(), options.max_body_bytes)


def _absolute(path: Path | None) -> Any:
    """Return a path for processes with another working directory; names that are no paths stay."""
    return path.resolve() if path is not None and path.exists() else path


class _Replica:
    """A server in one of Ray's processes."""

    app: Any  # of Ray's wrapper

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Part]:
        """Yield the response of the server to a request, by parts."""
        async with aclosing(respond(self.app, scope, body)) as parts:
            async for part in parts:
                yield part

    def metrics(self) -> tuple[str, list[Metric]]:
        """Return the name of the replica, and its metrics."""
        return serve.get_replica_context().replica_id.unique_id, list(
            self.app.state.metrics.registry.collect()
        )

    def check_health(self) -> None:
        """Report to Ray whether requests can be served; Ray replaces a replica that is not healthy.

        Raises:
            RuntimeError: the decoder is stuck or cannot continue.

        """
        trouble = self.app.state.served.engine.trouble
        if trouble is not None:
            raise RuntimeError(trouble)
