"""Links between the HTTP side of a server and the worker of a model, in one process or in two."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from implicit_blocks.serving.jobs import Batch, Message

if TYPE_CHECKING:
    from implicit_blocks.serving.worker import Worker

_LOG = logging.getLogger(__name__)

_SIZE = struct.Struct("!Q")
"""The number of bytes of the pickled object that follows."""


Send = Callable[[Batch, bool], None]
"""Sends a batch from the thread of a worker; the flag says whether to wait until all of it is sent."""


class Connected:
    """The first message of another process: it accepts requests."""


class Link(Protocol):
    """The way to a worker."""

    async def start(self, receive: Callable[[Batch], None], lost: Callable[[], None]) -> None:
        """Begin to receive in the running event loop; ``lost`` is called if the worker's process ends."""

    def send(self, message: Message) -> None:
        """Send a message, without waiting."""

    async def stop(self, seconds: float) -> None:
        """End the worker after its current step."""


class ThreadLink:
    """The way to a worker in a thread of this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def start(self, receive: Callable[[Batch], None], lost: Callable[[], None]) -> None:
        """Start the worker."""
        loop = asyncio.get_running_loop()

        def send(batch: Batch, wait: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed without waiting for the thread
                loop.call_soon_threadsafe(receive, batch)

        self.worker.start(send)

    def send(self, message: Message) -> None:
        """Put a message into the worker's queue."""
        self.worker.inbox.put(message)

    async def stop(self, seconds: float) -> None:
        """End the worker, and wait for it."""
        await asyncio.to_thread(self.worker.stop, seconds)


class SocketLink:
    """The way to a worker in another process: one end of a pair of sockets."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._messages: list[bytes] = []
        """Those of this turn of the event loop, which are written together."""

    async def start(self, receive: Callable[[Batch], None], lost: Callable[[], None]) -> None:
        """Begin to read."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel, limit=1 << 20)

        async def read() -> None:
            try:
                while True:
                    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                    receive(pickle.loads(await reader.readexactly(size)))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            except Exception:
                _LOG.exception("events of the model could not be read")
            lost()

        self._reading = asyncio.create_task(read())
        self.send(Connected())

    def send(self, message: Message | Connected) -> None:
        """Write a message at the end of this turn of the event loop."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._write)
        self._messages.append(packed(message))

    def _write(self) -> None:
        assert self._writer is not None
        self._writer.write(b"".join(self._messages))
        self._messages = []

    async def stop(self, seconds: float) -> None:
        """Send the worker the message to end; its process waits for it."""
        assert self._reading is not None
        assert self._writer is not None
        self._reading.cancel()
        self._messages.append(packed(None))
        self._write()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), seconds)


class SocketSender:
    """Sends batches through a socket; a decoder does not wait for a receiver that is busy."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unsent = b""
        self._is_open = True

    def __call__(self, batch: Batch, wait: bool) -> None:
        """Send a batch, or what fits into the socket of it; the rest is sent with the next one."""
        content = self._unsent + packed(batch)
        try:
            while content and self._is_open:
                content = content[self._channel.send(content, 0 if wait else socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:  # the receiver has ended, which its parent reports
            self._is_open = False
        self._unsent = content if self._is_open else b""


def packed(value: Any) -> bytes:
    """Return an object as bytes for a stream."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(content)) + content


def receive(channel: socket.socket) -> Any:
    """Wait for an object and return it, None at the end of the stream."""
    try:
        head = channel.recv(_SIZE.size, socket.MSG_WAITALL)
        if len(head) < _SIZE.size:
            return None
        return pickle.loads(channel.recv(_SIZE.unpack(head)[0], socket.MSG_WAITALL))
    except OSError:
        return None
