"""The process that speaks HTTP, beside the one with the models: ``serving.processes`` starts it.

    python -m implicit_blocks.serving.http_process LISTENING CHANNEL...

The arguments are numbers of inherited file descriptors: the listening socket, and for each model a socket to
its process. This process imports no torch, and so starts within a second. It ends when its channels close.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Sequence

from implicit_blocks.serving.app import create_app
from implicit_blocks.serving.links import SocketLink, receive
from implicit_blocks.serving.listening import make_server
from implicit_blocks.serving.served import Setup


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal, or until the process of the models has ended; return the exit code."""
    listening, *channels = (socket.socket(fileno=int(number)) for number in arguments)
    setups: list[Setup] = []
    for channel in channels:
        if (setup := receive(channel)) is None:  # the other process has ended
            return 0
        setups.append(setup)
    app = create_app(setups, [SocketLink(channel) for channel in channels])
    server = make_server(app, setups[0].options)

    def end() -> None:
        server.should_exit = True

    for model in app.state.models.values():
        model.engine.on_lost = end
    gc.freeze()  # what is imported need not be searched for garbage
    server.run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
