"""The commands ``serve`` and ``inspect``. Torch and the packages of the extra are imported when they run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import fields
from pathlib import Path

from implicit_blocks._utils.arguments import add_model_arguments, optional_packages
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.serving.options import KEY_VARIABLE, ServerOptions

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    defaults = ServerOptions()
    add_model_arguments(command)
    command.add_argument(
        "--compare", type=Path, metavar="SOURCE", help="second model, which the page shows beside the first"
    )
    command.add_argument("--name", help="name of the model in requests (default: that of the source)")
    command.add_argument(
        "--host",
        default=defaults.host,
        help=f"address to listen at; others than 127.0.0.1 require {KEY_VARIABLE} (default: %(default)s)",
    )
    command.add_argument(
        "--port", type=int, default=defaults.port, help="port; 0 for any free one (default: %(default)s)"
    )
    command.add_argument("--no-auth", action="store_true", help="serve every address without an API key")
    for name, kind, text in (
        ("max_batch_size", int, "texts decoded simultaneously"),
        ("max_seq_len", int, "maximum number of tokens of a text, prompt included"),
        ("max_queue", int, "texts that wait; more are refused with status 429"),
        ("max_choices", int, "maximum number of texts of one request"),
        ("max_body_bytes", int, "maximum size of a request's body"),
        ("max_iterations", int, "largest max_iterations of a request"),
        ("timeout", float, "seconds after which a request is ended"),
        ("stall_seconds", float, "seconds without progress after which the decoder counts as stuck"),
        ("shutdown_seconds", float, "seconds that running requests have when the server stops"),
    ):
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(defaults, name),
            metavar="N" if kind is int else "S",
            help=f"{text} (default: %(default)s)",
        )
    command.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        help="maximum number of tokens of a text that are searched at the same time; 1 decodes them one "
        "after the other (default: chosen by the number of active texts)",
    )
    command.set_defaults(command=serve)


def add_inspect_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add_model_arguments(command)
    command.add_argument("text", help="text; without a tokenizer, token ids: '0 3 2'")
    command.add_argument("--output", type=Path, required=True, help="HTML file to write")
    command.add_argument(
        "--max-new-tokens", type=int, default=0, metavar="N", help="continue the text (default: 0)"
    )
    command.add_argument("--tolerance", type=float, metavar="X", help="tolerance (default: the spec's)")
    command.add_argument("--max-iterations", type=int, metavar="N", help="iterations (default: the spec's)")
    command.add_argument("--compare", type=Path, metavar="SOURCE", help="second model beside the first")
    command.add_argument(
        "--compare-tolerance", type=float, metavar="X", help="tolerance of a comparison with the same model"
    )
    command.set_defaults(command=write_inspection)


def write_inspection(arguments: argparse.Namespace) -> None:
    """Write the report of a text as an HTML file.

    Raises:
        ValueError: as for ``inspect``; a negative number of tokens.

    """
    from implicit_blocks.serving.inspection import inspect

    if arguments.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens is {arguments.max_new_tokens}; choose 0 or more")
    names = ["max_new_tokens", "tolerance", "max_iterations", "compare", "compare_tolerance"]
    names += ["tokenizer", "spec", "device"]
    with optional_packages():
        report = inspect(arguments.source, arguments.text, **{n: getattr(arguments, n) for n in names})
    report.save(arguments.output)
    print(f"wrote {arguments.output}")


def serve(arguments: argparse.Namespace) -> None:
    """Serve a model until a signal; the API key is read from the environment.

    Raises:
        ValueError: missing packages, options or sources that cannot be used, a port in use.
        ChildProcessError: the HTTP process has ended by itself.

    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(
            f"serve needs {', '.join(missing)}, which are not installed; {install_extra('serve')}"
        )
    names = {field.name for field in fields(ServerOptions)} - {"api_key"}
    values = {name: getattr(arguments, name) for name in names}
    options = ServerOptions(**values, api_key=os.environ.get(KEY_VARIABLE))

    from implicit_blocks.serving.listening import address_of, listen
    from implicit_blocks.serving.processes import run
    from implicit_blocks.serving.server import load

    with listen(options) as listening:  # before the model is loaded, which may take minutes
        with optional_packages():
            hosts = load(
                arguments.source,
                options,
                compare=arguments.compare,
                name=arguments.name,
                spec=arguments.spec,
                tokenizer=arguments.tokenizer,
                device=arguments.device,
            )
        message = f"serving {arguments.source} at {address_of(listening)} (Ctrl-C stops)"
        run(hosts, listening, ready=lambda: print(message, file=sys.stderr, flush=True))
