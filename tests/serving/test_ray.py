"""Replicas behind Ray Serve: arguments, health, streams, and a replica that is killed under load."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import implicit_blocks as ib
from implicit_blocks.serving.language import Bytes
from implicit_blocks.serving.options import KEY_VARIABLE

PROMPTS = {"Hello": 12, "one": 20, "two words": 9, "z": 16}


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return importlib.import_module("implicit_blocks.serving.ray")


def test_arguments_set_the_replicas_and_their_resources(on_ray, tmp_path):
    arguments = {"source": str(tmp_path), "min_replicas": "2", "max_replicas": "8", "gpus": "1", "cpus": "2"}
    ingress = on_ray.app({**arguments, "max_batch_size": "32"})._bound_deployment
    deployment = ingress.init_args[0]._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 8, 32)
    assert deployment.ray_actor_options["num_gpus"] == 1
    assert deployment.ray_actor_options["num_cpus"] == 2
    assert ingress.ray_actor_options["num_cpus"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "nowhere"}, "nowhere does not exist"),
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"replicas": 3}, "replicas"),
    ],
    ids=["source", "no replicas", "fewer at most", "option", "unknown"],
)
def test_an_invalid_argument_is_named(on_ray, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        on_ray.app({"source": str(tmp_path), **changes})


def test_a_replica_with_a_stuck_decoder_is_not_healthy(on_ray):
    replica = on_ray._Replica()
    engine = SimpleNamespace(trouble=None)
    replica.app = SimpleNamespace(state=SimpleNamespace(served=SimpleNamespace(engine=engine)))
    replica.check_health()
    engine.trouble = "the decoder has made no progress for 60 seconds"
    with pytest.raises(RuntimeError, match="no progress"):
        replica.check_health()


def test_without_the_extra_the_error_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "implicit_blocks.serving.ray", raising=False)
    with pytest.raises(ImportError, match=r"pip install.*\[ray\]"):
        importlib.import_module("implicit_blocks.serving.ray")


# ------------------------------------------------------------------------------------ two replicas


def descendants(root: int) -> dict[int, str]:
    """Return the processes below a process, with their command lines."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, left = {}, [root]
    while left:
        for pid in children.get(left.pop(), ()):
            left.append(pid)
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


@dataclass
class Outcome:
    """The response to a request: its status (0: the connection broke), text, and the code of its error."""

    prompt: str
    stream: bool
    status: int
    text: str = ""
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.status == 200 and self.error is None


def complete(port: int, prompt: str, *, stream: bool) -> Outcome:
    """Send a request and return its outcome."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": PROMPTS[prompt], "temperature": 0}
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "stream": stream}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        received = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return Outcome(prompt, stream, 0, error=repr(error))
    finally:
        connection.close()
    if answer.status != 200:
        return Outcome(prompt, stream, answer.status, error=received)
    if not stream:
        return Outcome(prompt, stream, 200, json.loads(received)["choices"][0]["text"])
    *lines, end = [line.removeprefix("data: ") for line in received.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines]
    errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "error" not in chunk)
    return (
        Outcome(prompt, stream, 200, text, *errors)
        if end == "[DONE]"
        else Outcome(prompt, stream, 0, text, end)
    )


def replica_processes(root: int) -> list[int]:
    """Return the processes of replicas, without the ingress."""
    return [
        pid for pid, line in descendants(root).items() if line.startswith("ray::ServeReplica:model:replica")
    ]


def get(port: int, path: str) -> str:
    """Return the body of a path."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def replicas(model: Any, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Return the port of two replicas on the CPU, and the process of ``serve run``."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from implicit_blocks.hf import from_library

    from_library(model).save_pretrained(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = {"source": str(tmp_path / "tiny"), "tokenizer": "bytes", "min_replicas": 2, "cpus": 0.1}
    arguments |= {"max_batch_size": 4, "max_seq_len": 64, "device": "cpu"}
    application = {"name": "model", "route_prefix": "/", "import_path": "implicit_blocks.serving.ray:app"}
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [{**application, "args": arguments}],
            }
        )
    )
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)  # a cluster of its own
    with log.open("w") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(config)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        ends = time.monotonic() + 240
        while not complete(port, "z", stream=False).finished:
            assert started.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < ends, log.read_text()[-4000:]
            time.sleep(1)
        yield port, started.pid
    finally:
        below = descendants(started.pid)
        started.send_signal(signal.SIGINT)
        try:
            started.wait(timeout=60)
        finally:
            started.kill()
            for pid in below:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@pytest.fixture
def expected(model: Any) -> dict[str, str]:
    """Return the texts of ``generate`` alone."""
    found = {}
    for prompt, count in PROMPTS.items():
        made = ib.generate(model, [list(prompt.encode())], max_new_tokens=count, stop_token_ids=[256])
        found[prompt] = Bytes().decode(made.tokens[0].tolist())
    return found


@pytest.mark.slow
def test_only_streams_of_a_killed_replica_are_lost_and_say_so(replicas, expected, record_property):
    port, process = replicas
    workers = replica_processes(process)
    assert len(workers) == 2
    count, clients = 400, 16
    work = [(prompt, stream) for prompt in PROMPTS for stream in (True, False)] * (count // 8)
    outcomes: list[Outcome] = []

    def client(_: int) -> None:
        while True:
            try:
                prompt, stream = work.pop()
            except IndexError:
                return
            outcomes.append(complete(port, prompt, stream=stream))

    def kill() -> None:
        while len(outcomes) < count // 4:
            time.sleep(0.001)
        os.kill(workers[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    killer.join()
    broken = [outcome for outcome in outcomes if not outcome.finished]
    print(f"{len(outcomes)} requests, not finished: {broken}")
    record_property("not_finished", len(broken))
    assert len(outcomes) == count
    assert [o for o in outcomes if o.finished and o.text != expected[o.prompt]] == []
    assert [o for o in broken if not (o.stream and o.text and o.error == "replica_ended")] == []
    assert [o for o in broken if not expected[o.prompt].startswith(o.text)] == []
    assert len(broken) <= clients
    ends = time.monotonic() + 120
    while len(replica_processes(process)) < 2:
        assert time.monotonic() < ends, "the replica was not replaced"
        time.sleep(1)
    assert complete(port, "z", stream=True).text == expected["z"]
    while len(names := set(re.findall(r'slots{replica="(.+?)"} 4.0', get(port, "/metrics")))) < 2:
        assert time.monotonic() < ends, names
        time.sleep(1)
