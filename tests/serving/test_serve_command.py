"""``python -m implicit_blocks serve``: sources, addresses, and sources that cannot be served."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.serving.listening import listen
from implicit_blocks.serving.options import KEY_VARIABLE, ServerOptions
from implicit_blocks.serving.server import load, require_finished

MIXER = {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}
RUN: dict[str, Any] = {
    "model": {"kind": "implicit_lm", "d_model": 16, "n_layers": 1, "mixer": MIXER},
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 1,
        "batch_size": 4,
        "threads": 1,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
    },
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 2, "batch_size": 2},
}
SMALL = ServerOptions(max_batch_size=2, max_seq_len=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer.run.build import build
    from trainer.specs.run import RunSpec

    folder: Path = tmp_path_factory.mktemp("serve") / "mine"
    build(RunSpec.model_validate(RUN), output=folder, device="cpu").train()
    return folder


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_runs_checkpoints_exported_and_published_folders_are_loaded_alike(run, tmp_path):
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    sources = {"mine": run, checkpoint.name: checkpoint}
    if pytest.importorskip("transformers"):
        from implicit_blocks.hf.convert import convert, export

        export(str(run), tmp_path / "exported")
        convert(tmp_path / "exported", tmp_path / "published", to="published")
        sources |= {name: tmp_path / name for name in ("exported", "published")}
    expected = ib.generate(ib.load_model(run), [[0, 3, 2]], max_new_tokens=4).tokens.tolist()
    for name, source in sources.items():
        (found,) = load(source, SMALL)
        assert found.setup.name == name
        assert ib.generate(found.model, [[0, 3, 2]], max_new_tokens=4).tokens.tolist() == expected
        assert found.setup.language.encode("0 3") == [0, 3]


def test_a_run_that_has_not_finished_is_refused_and_its_checkpoint_served(run, tmp_path):
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "summary.json").unlink()
    require_finished(unfinished)  # its last checkpoint is that of the last step
    spec = yaml.safe_load((unfinished / "spec.yaml").read_text())
    spec["training"]["max_steps"] = 50
    (unfinished / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(ValueError, match=r"step 1 of 50.*resume.*step-") as caught:
        load(unfinished, SMALL)
    checkpoint = Path(str(caught.value).rpartition(": ")[2])
    assert load(checkpoint, SMALL)[0].setup.name == checkpoint.name


def test_a_run_without_a_checkpoint_is_refused(run, tmp_path):
    empty = tmp_path / "empty"
    shutil.copytree(run, empty)
    (empty / "summary.json").unlink()
    shutil.rmtree(empty / "checkpoints")
    (empty / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="no checkpoint yet"):
        load(empty, SMALL)


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "does not exist"),
        (["RUN", "--host", "0.0.0.0"], KEY_VARIABLE),
        (["RUN", "--host", "no.such.host.invalid", "--no-auth"], "cannot listen"),
        (["RUN", "--port", "99999"], "port is 99999"),
        (["RUN", "--max-seq-len", "0"], "max_seq_len"),
        (["RUN", "--max-in-flight", "0"], "max_in_flight"),
        (["RUN", "--tokenizer", "nowhere.json"], "no tokenizer at"),
        (["RUN", "--device", "warp"], "device"),
    ],
    ids=["no source", "no key", "no host", "no port", "no length", "no token", "no tokenizer", "no device"],
)
def test_invalid_requests_are_reported_before_the_server_starts(run, capsys, arguments, message):
    given = [str(run) if argument == "RUN" else argument for argument in arguments]
    port = [] if "--port" in given else ["--port", "0"]
    assert main(["serve", *given, *port]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_key")
def test_a_port_in_use_is_named_with_the_remedy(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert str(port) in message
    assert "--port 0" in message


def test_a_free_port_is_taken_for_port_0():
    with listen(ServerOptions(port=0)) as first, listen(ServerOptions(port=0)) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_a_missing_package_is_named_with_the_command_that_installs_it(run, capsys, monkeypatch):
    monkeypatch.setattr("implicit_blocks.serving.command._PACKAGES", ("no_such_package",))
    assert main(["serve", str(run)]) == 2
    assert "serve]" in capsys.readouterr().err


def address_in(log: Path) -> str:
    """Return the address that a server writes once it listens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.is_file() and (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_serves_until_a_signal(run, sent, python, tmp_path):
    environment = {**os.environ, KEY_VARIABLE: "secret", "OMP_NUM_THREADS": "1"}
    command = ["-m", "implicit_blocks", "serve", str(run), "--port", "0", "--device", "cpu"]
    started = python.start(command, cwd=tmp_path, outputs=tmp_path, environment=environment)
    try:
        address = address_in(tmp_path / "stderr")
        request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b'"mine"' in answer.read()
        os.kill(started, sent)
    finally:
        code = python.wait(started, timeout=30)  # killed, where it does not end
    assert code in (0, -sent, 128 + sent)
    assert "Traceback" not in (tmp_path / "stderr").read_text()
