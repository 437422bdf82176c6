"""Options of a server, and their checks. Imports no torch."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from functools import lru_cache

from implicit_blocks.specs.base import require_count

KEY_VARIABLE = "IMPLICIT_BLOCKS_API_KEY"
"""The environment variable with the API key, which unlike an argument does not appear in process lists."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, access and limits of a server.

    Args:
        host: the address to listen at; every address but the loopback ones requires ``api_key``.
        port: the port; 0 is any free one.
        api_key: the key that requests must send as ``Authorization: Bearer KEY``; None: no key.
        no_auth: accept requests without a key at any address.
        max_batch_size: the number of texts that are decoded simultaneously.
        max_seq_len: maximum number of tokens of a text, its prompt included.
        max_queue: maximum number of texts that wait for a slot; more are refused with status 429.
        max_choices: maximum number of texts of one request: its prompts times ``n``.
        max_body_bytes: maximum size of a request's body.
        max_iterations: the largest ``max_iterations`` that a request may ask for.
        timeout: seconds after which a request is ended with status 504.
        stall_seconds: seconds without progress after which the decoder counts as stuck (status 503).
        shutdown_seconds: seconds that running requests have to finish when the server is stopped.
        max_in_flight: maximum number of tokens of a text that are searched at the same time, as in
            ``ContinuousDecoder``; 1 decodes them one after the other.

    Raises:
        ValueError: for values out of range, an empty key, or an address that requires a key.

    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    no_auth: bool = False
    max_batch_size: int = 16
    max_seq_len: int = 2048
    max_queue: int = 256
    max_choices: int = 256
    max_body_bytes: int = 4 << 20
    max_iterations: int = 1000
    timeout: float = 300.0
    stall_seconds: float = 60.0
    shutdown_seconds: float = 30.0
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; choose 1 to 65535, or 0 for any free port")
        for name in ("max_batch_size", "max_seq_len", "max_choices", "max_body_bytes", "max_iterations"):
            require_count(name, getattr(self, name))
        if self.max_in_flight is not None:
            require_count("max_in_flight", self.max_in_flight)
        if self.max_queue < 0:
            raise ValueError(f"max_queue is {self.max_queue}; choose 0 or more")
        for name in ("timeout", "stall_seconds", "shutdown_seconds"):
            seconds = getattr(self, name)
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"{name} is {seconds}; choose a positive number of seconds")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; choose a long random one, or omit it")
        if self.api_key is None and not self.no_auth and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and no API key is set; set "
                f"{KEY_VARIABLE} to a long random key, listen at 127.0.0.1, or give --no-auth to serve "
                "everyone"
            )


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether an address, or a name of one, is reached from this machine only."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
