"""What an exported folder needs to be shared: a model card, uploads, and a server that is not ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.hf.model_card import read_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM  # noqa: E402  # after the skip

RUN: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "vocab_size": 257,
        "d_model": 16,
        "n_layers": 1,
        "mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 4},
        "at_evaluation": {"stopping": {"tolerance": 0.02, "max_iterations": 17}},
    },
    "data": {"kind": "tokens", "path": "/somewhere/of/mine/books", "seq_len": 64},
    "training": {
        "max_steps": 30,
        "batch_size": 4,
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "schedule": {"kind": "warmup_linear"},
    },
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write the files of a run of 30 steps, whose step 20 is the newest checkpoint, as the trainer would."""
    from safetensors.torch import save_file

    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-00000020"
    checkpoint.mkdir(parents=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(RUN))
    manifest = {"name": "books", "device": "cpu", "data": {"content": "ab|cd"}, "versions": {"torch": "2.13"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    steps = [{"step": step, "loss": step / 10, "tokens": 256 * step} for step in (10, 20, 30)]
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in steps) + '{"step": 31, "l'
    )
    sets = [
        {"step": step, "set": "L64", "length": 64, "perplexity": 40.25 + step, "non_converged": 0.125}
        | {"iterations": 9.5, "iterations_max": 17, "residual_max": 0.031}
        for step in (10, 20, 30)
    ]
    (folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sets))
    torch.manual_seed(0)
    model = ib.build(ib.load_spec(folder / "spec.yaml").model)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return folder


def test_the_card_has_the_run_s_task_figures_and_convergence_at_the_exported_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from implicit_blocks.hf import convert

    tensors = ib.load_model(tmp_path / "weights.safetensors", spec=str(run / "spec.yaml")).state_dict()
    newest = run / "checkpoints" / "step-00000020"
    monkeypatch.setattr(convert, "read_newest_weights", lambda path, expected: (newest, dict(tensors), []))
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["license"] == "unknown"
    assert yaml.safe_load(head)["pipeline_tag"] == "text-generation"
    for fact in (
        "# books",
        "| task | `tokens` |",
        r"content `ab\|cd`",
        "| steps | 20 of 30 |",
        "| tokens | 5,120 |",
        "| training loss | 2 |",
        "tolerance 0.02, at most 17 iterations",
        "After step 20,",
        "| L64 | 64 | 60.25 | 9.5 | 17 | 0.031 | 12.5% |",
        "trust_remote_code=True",
        "trained on sequences of 64 tokens",
    ):
        assert fact in text, fact
    assert "`books`" in text
    assert "/somewhere" not in card  # local paths are not published
    assert "step 30" not in card


def test_the_card_of_untrained_or_unknown_weights_says_so(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run / "spec.yaml"), str(tmp_path / "new"), "--seed", "3"]) == 0
    assert "random (seed 3)" in (tmp_path / "new" / "README.md").read_text()
    weights = ["--checkpoint", str(tmp_path / "weights.safetensors")]
    assert main(["export", str(run / "spec.yaml"), str(tmp_path / "loaded"), *weights]) == 0
    assert "Unknown: the weights were not read from a run" in (tmp_path / "loaded" / "README.md").read_text()


def test_missing_and_damaged_files_of_a_run_leave_parts_of_the_card_empty(run: Path) -> None:
    for name in ("manifest.json", "metrics.jsonl", "evaluations.jsonl"):
        (run / name).write_text("[truncated")
    record = read_run(run)
    assert (record.name, record.step, dict(record.metrics), list(record.evaluations)) == ("run", None, {}, [])
    (run / "evaluations.jsonl").unlink()
    assert read_run(run).evaluations == []


class _Hub:
    """The part of the hub's client that uploads use; commits are written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.folder.mkdir(exist_ok=True)
        return type("Repository", (), {"repo_id": repo_id})

    def create_branch(self, **options: Any) -> None:
        raise AssertionError("no branch was asked for")

    def create_commit(self, *, repo_id: str, operations: Any, **options: Any) -> str:
        for operation in operations:
            shutil.copyfile(operation.path_or_fileobj, self.folder / operation.path_in_repo)
        return repo_id


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that stands for a repository of the hub."""
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils import hub as module

    def no_card(*args: Any, **kwargs: Any) -> None:
        raise EntryNotFoundError("no card yet")

    folder = tmp_path / "repository"
    for place in (module, transformers.modeling_utils):
        if hasattr(place, "hf_api"):
            monkeypatch.setattr(place, "hf_api", lambda: _Hub(folder))
    monkeypatch.setattr(module.ModelCard, "load", no_card)
    return folder


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_an_upload_contains_all_that_loading_needs(way, tiny_model, ids, hub, tmp_path):
    model = tiny_model("mamba2")
    if way == "push_to_hub":
        model.push_to_hub("someone/implicit")
    else:
        model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/implicit")
    assert {"config.json", "model.safetensors", "implicit_blocks_shim.py"} <= {p.name for p in hub.iterdir()}
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(hub)(ids).logits, model(ids).logits)


# ------------------------------------------------------------------------------------ transformers serve


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")


def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    answer: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=120).read())
    return answer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Return a function that serves a folder by ``transformers serve`` and returns the URL."""
    pytest.importorskip("fastapi", reason="fastapi is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> str:
        port, log = _free_port(), tmp_path / "server.log"
        program = "from transformers.cli.transformers import main; main()"
        command = [sys.executable, "-c", program, "serve", str(folder), "--trust-remote-code"]
        command += ["--device", "cpu", "--port", str(port)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=tmp_path)
        started.append(process)
        _until_healthy(f"http://localhost:{port}", process, log)
        return f"http://localhost:{port}"

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.slow
def test_transformers_serve_answers_with_the_model_s_own_text(family, tiny_model, served, tmp_path):
    """In a process that has not imported the package: its classes come with ``--trust-remote-code``."""
    from implicit_blocks.hf.tokenizer import load_tokenizer, token_fields

    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = tiny_model(family, vocab_size=257)
    for name, token in token_fields(tokenizer).items():
        setattr(model.config, name, token)
        setattr(model.generation_config, name, token)
    folder = tmp_path / "exported"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    url = served(folder)
    greedy = {"model": str(folder), "max_tokens": 6, "temperature": 0}
    ids = torch.tensor([list(b"hello")])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 5:]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    found = _ask(f"{url}/v1/completions", {**greedy, "prompt": "hello"})
    assert found["choices"][0]["text"] == text
    chat = _ask(
        f"{url}/v1/chat/completions",
        {**greedy, "messages": [{"role": "user", "content": "hello"}], "stream": False},
    )
    assert chat["choices"][0]["message"]["content"] == text
    assert found["usage"]["completion_tokens"] == 6
