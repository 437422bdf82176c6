"""Fixtures of all tests: deterministic torch settings, no pictures, development data, a small tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("no_deadline", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("no_deadline")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="module")
def _no_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip the picture at the end of a run, which takes longer than the run.

    Modules that test pictures set ``WITH_PICTURES = True``.
    """
    run = sys.modules.get("trainer.run.build")
    if run is None or getattr(request.module, "WITH_PICTURES", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "draw", lambda runs, path: None)
        yield


class PythonServer:
    """Runs Python programs in processes of their own that need not import torch; see ``python_server.py``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("python_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str] = os.environ,
        warnings: str = "default",
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS``, killed after ``timeout`` seconds; return its exit code and output."""
        options: dict[str, Any] = {"cwd": cwd, "environment": environment, "warnings": warnings}
        code = self.wait(self.start(arguments, outputs=self._folder, **options), timeout=timeout)
        outputs = {name: (self._folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")}
        return subprocess.CompletedProcess(arguments, code, **outputs)

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        outputs: Path,
        environment: Mapping[str, str] = os.environ,
        warnings: str = "default",
    ) -> int:
        """Start ``python ARGUMENTS``, with ``stdout`` and ``stderr`` in a folder; return its process id."""
        return self._ask(
            {
                "arguments": list(arguments),
                "cwd": str(cwd),
                "env": dict(environment),
                "warnings": warnings,
                **{name: str(outputs / name) for name in ("stdout", "stderr")},
            }
        )

    def wait(self, pid: int, *, timeout: float) -> int:
        """Return the exit code of a program once it has ended, killed after ``timeout`` seconds."""
        return self._ask({"wait": pid, "timeout": timeout})

    def _ask(self, order: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the server."""
        with self._process:
            self._process.kill()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonServer]:
    """Return a server that starts Python programs cheaply."""
    server = PythonServer(tmp_path_factory.mktemp("python"))
    yield server
    server.close()


BUILD = """
import os, sys
from setuptools import build_meta

for source in sys.argv[2:]:  # each in its own process, because setuptools keeps state
    if (child := os.fork()) == 0:
        os.chdir(source)
        build_meta.build_wheel(sys.argv[1])
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{source} cannot be built")
"""


@pytest.fixture(scope="session")
def install_wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Path], Path], None]:
    """Return a function that builds the wheels of source folders and installs them in a directory.

    Building writes into the source folders.
    """

    def run(*command: object) -> None:
        words = [sys.executable, *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"

    def install(sources: Sequence[Path], site: Path) -> None:
        wheels = tmp_path_factory.mktemp("wheels")
        run("-c", BUILD, wheels, *sources)
        built = sorted(wheels.glob("*.whl"))
        assert len(built) == len(sources)
        options = ("--disable-pip-version-check", "--no-deps", "--no-index", "--quiet")
        run("-m", "pip", "install", *options, "--target", site, *built)

    return install


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of development data beside the repository, or skip the test."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"no development data at {path}")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a tokenizer.json with 300 entries: bytes, and merges learned from `SENTENCES`."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


SENTENCES = (
    "Question: Which of these is the source of the light that the other ones only reflect?",
    "She put the lid on the pot because the water in it was about to boil over again.",
    "To clean the brush, rinse it with water; then hang it up with its head down and let it dry.",
    "Answer: the sun, the water, the wind, the other side of the moon, and the one that there was.",
)
