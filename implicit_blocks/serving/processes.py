"""A server in two processes: this one has the models, and another one speaks HTTP.

Decoding and HTTP each keep a Python interpreter busy, so they do not share one. The processes exchange a few
messages per text, and batches of tokens at intervals, over a pair of sockets for each model.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from implicit_blocks.serving.hosting import Host
from implicit_blocks.serving.links import Connected, SocketSender, packed, receive

_WORKERS_END = 30.0
"""Seconds that the workers have for their current step when the server ends."""


class HttpProcess:
    """The process that serves models over HTTP, as a context manager.

    Args:
        hosts: the models, whose workers run until ``close``.
        listening: the listening socket, which the process takes over.

    Raises:
        ChildProcessError: the process has ended before it could read the setups of the models.

    """

    def __init__(self, hosts: Sequence[Host], listening: socket.socket) -> None:
        self._hosts = hosts
        pairs = [socket.socketpair() for _ in hosts]
        self._channels = [ours for ours, _ in pairs]
        self._ready = threading.Event()
        passed = [listening, *(theirs for _, theirs in pairs)]
        numbers = [each.fileno() for each in passed]
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "implicit_blocks.serving.http_process", *map(str, numbers)],
            pass_fds=numbers,
            env={**os.environ, "PYTHONPATH": path},  # the modules of this process, and no others
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which decides
        )
        for each in passed:
            each.close()
        for host, channel in zip(hosts, self._channels, strict=True):
            try:
                channel.sendall(packed(host.setup))
            except OSError:
                raise ChildProcessError(_ENDED.format(self.wait())) from None
            host.worker.start(SocketSender(channel))
            threading.Thread(target=self._read, args=(host, channel), name="orders", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def _read(self, host: Host, channel: socket.socket) -> None:
        while (message := receive(channel)) is not None:
            if isinstance(message, Connected):
                self._ready.set()
            else:
                host.worker.inbox.put(message)

    def wait_until_ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
            ChildProcessError: the process has ended.

        """
        while not self._ready.wait(0.02):
            if self._process.poll() is not None:
                raise ChildProcessError(_ENDED.format(self._process.returncode))

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code, negative for a signal."""
        return self._process.wait()

    def stop(self, *, at_once: bool = False) -> None:
        """Let the process finish what runs, within the seconds of the options; or end it at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if at_once else signal.SIGTERM)

    def close(self) -> None:
        """End the process as ``stop`` does, and the workers."""
        self.stop()
        self.wait()
        for host, channel in zip(self._hosts, self._channels, strict=True):
            host.worker.stop(_WORKERS_END)
            channel.close()

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ENDED = "the HTTP process ended with exit code {}; its messages above have the cause"


def run(hosts: Sequence[Host], listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends without waiting for running requests.

    Args:
        hosts: the models.
        listening: the listening socket.
        ready: called once requests are accepted.

    Raises:
        ChildProcessError: the HTTP process has ended by itself.

    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        process.stop(at_once=stopped)
        stopped = True

    with HttpProcess(hosts, listening) as process:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            process.wait_until_ready()
            ready()
            code = process.wait()
        except ChildProcessError:
            if not stopped:
                raise
        else:
            if not stopped:
                raise ChildProcessError(_ENDED.format(code))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
