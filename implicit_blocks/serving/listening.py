"""The address of a server, and its HTTP server. Imports no torch."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from implicit_blocks.serving.options import ServerOptions


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
