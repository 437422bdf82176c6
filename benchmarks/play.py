"""Serve the models of the newest demo, and open the page in a browser where there is one.

    python benchmarks/play.py [--runs DIR] [--port N] [--no-browser]

``make play`` runs it. The page shows the implicit model beside its explicit twin on products in S3.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from demo import SPECS

PORT = 8000


def newest(runs: Path) -> Path | None:
    """Return the folder of the demo that ended last, with the finished runs of both models; None: no such."""
    found = []
    for summary in (*runs.glob("demo-*/*/summary.json"), *runs.glob("demo-*/seed-*/*/summary.json")):
        folder = summary.parent.parent
        if all((folder / name / "summary.json").is_file() for name in SPECS):
            found.append((summary.stat().st_mtime, folder))
    return max(found)[1] if found else None


def free_port(wanted: int) -> int:
    """Return the port if nothing listens at it, else any free one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("error: no port of this machine is free")


def has_browser() -> bool:
    """Whether a browser with windows can be opened, as opposed to one in this terminal."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def open_when_ready(address: str, *, seconds: float = 120.0) -> None:
    """Open the page in a browser as soon as the server answers."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    else:
        return
    webbrowser.open(address)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of the demos")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help="preferred port")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    options = parser.parse_args(arguments)
    folder = newest(options.runs)
    if folder is None:
        print(
            f"error: {options.runs} has no finished demo; run `make demo` first (five minutes on two idle "
            "cores), then `make play`",
            file=sys.stderr,
        )
        return 2
    port = free_port(options.port)
    address = f"http://127.0.0.1:{port}"
    print(f"the models of {folder}; open {address} in a browser", flush=True)
    if not options.no_browser and has_browser():
        threading.Thread(target=open_when_ready, args=(address,), daemon=True).start()
    from implicit_blocks.__main__ import main as command

    implicit, explicit = (str(folder / name) for name in SPECS)
    return command(["serve", implicit, "--compare", explicit, "--port", str(port), "--device", "cpu"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
