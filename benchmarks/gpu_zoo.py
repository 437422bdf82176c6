"""The trainer's own steps on one GPU: specs of the zoo in both phases, tokens per second and memory.

    python benchmarks/gpu_zoo.py [--specs llama_130m …] [--steps 8] [--json FILE]

Each spec is trained as by ``python -m trainer --spec NAME training.compile_layers=true
training.cuda_graphs=true``, at its own batch for one GPU, length 2048, tolerance and iterations, for a few
steps of its bounded phase and as many of its free phase, on random tokens; at 1.3B the free phase uses
activation checkpointing. The weights are drawn on the GPU, because a CPU would take longer than the steps,
and nothing is saved or evaluated. Tokens per second are medians of the steps after the first ones of a phase
(``--warm-up``), by the trainer's own clock, which waits for the loss; memory is the maximum reserved in a
step of the phase, and the part allocated for tensors. On random tokens searches end early, so these speeds
and the published ones are not at equal iterations; for those see `gpu_training.py`.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_workloads import WORKS
from on_device import device, keep, parser, smaller
from report import machine, write

from implicit_blocks import registry
from implicit_blocks.specs import load_spec
from trainer.reporting.display import Display
from trainer.run.build import build
from trainer.specs.run import RunSpec

PHASES = ("bounded", "free")
SPECS = ("llama_1.3b", "mamba2_1.3b", "llama_130m", "mamba2_130m")


class EnoughError(BaseException):
    """Ends a run without saving a 16 GB checkpoint; a BaseException, so that no handler catches it."""


class Watch(Display):
    """Collects the rows of a run's metrics, reports each, and ends the run after ``steps`` rows."""

    def __init__(self, steps: int, report: Callable[[list[Mapping[str, Any]]], Any]) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self._steps = steps
        self._report = report

    def step(self, row: Mapping[str, Any]) -> None:
        """Record a step's row."""
        self.rows.append(row)
        self._report(self.rows)
        if len(self.rows) == self._steps:
            raise EnoughError


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--specs", nargs="+", default=list(SPECS), choices=SPECS, metavar="NAME")
    options.add_argument("--steps", type=int, default=8, help="steps per phase")
    options.add_argument("--warm-up", type=int, default=4, help="uncounted first steps of a phase")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.specs:
        torch.compiler.reset()
        rows = measure(name, rows, arguments)
        for row in rows[-len(PHASES) :]:
            print(row, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if arguments.json is None:
        given = {key: value for key, value in vars(arguments).items() if key != "json"}
        write("gpu_zoo", {"machine": machine(), "arguments": given, "rows": rows})


def measure(name: str, before: list[dict[str, Any]], arguments: Any) -> list[dict[str, Any]]:
    """Return the previous rows and those of a spec's phases, writing them after each step."""
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(name, Path(folder), arguments)

        def found(steps: list[Mapping[str, Any]], why: str) -> list[dict[str, Any]]:
            own = [phase_row(name, phase, spec, steps, arguments.warm_up, why) for phase in PHASES]
            keep([*before, *own], arguments)
            return [*before, *own]

        watch = Watch(2 * arguments.steps, lambda steps: found(steps, "ended before"))
        failed = ""
        try:
            train(spec, watch, Path(folder))
        except (RuntimeError, torch.OutOfMemoryError):
            failed = traceback.format_exc(limit=3)
        return found(watch.rows, failed)


def spec_of(name: str, folder: Path, arguments: Any) -> RunSpec:
    """Return the zoo's spec for few steps on random tokens, compiled and captured on a GPU."""
    loaded = load_spec(name)
    assert isinstance(loaded, RunSpec)
    rows, length = loaded.training.micro_batch_size, loaded.data.seq_len
    if arguments.tiny:
        rows, length = 2, 32
    fast = str(torch.cuda.is_available()).lower()
    settings = [
        "training.max_tokens=null",
        f"training.max_steps={2 * arguments.steps + 1}",  # the last one ends the run
        f"phases.0.until={arguments.steps}",
        f"training.batch_size={rows}",
        f"training.micro_batch_size={rows}",
        f"training.compile_layers={fast}",
        f"training.cuda_graphs={fast}",
        "training.evaluate_every=null",
        "training.checkpoint_every=null",
        f"data.seq_len={length}",
        f"data.path={folder / 'tokens.bin'}",
        "data.dtype=uint16",
        "evaluation.length_multiples=[]",
        f"evaluation.lengths=[{length}]",
        "evaluation.sequences=1",
        "evaluation.batch_size=1",
    ]
    if "1.3b" in name:
        settings += ["phases.1.training.checkpoint_activations=steps"]
    spec = load_spec(name, settings)
    assert isinstance(spec, RunSpec)
    model: Any = smaller(spec.model) if arguments.tiny else spec.model
    if arguments.layers is not None:
        model = model.model_copy(update={"n_layers": min(arguments.layers, model.n_layers)})
    tokens = (2 * arguments.steps + 4) * rows * (length + 1)
    drawn = np.random.default_rng(0).integers(0, model.vocab_size, tokens, dtype=np.uint16)
    drawn.tofile(folder / "tokens.bin")
    return RunSpec.model_validate(spec.model_dump() | {"model": model.model_dump()})


def train(spec: RunSpec, watch: Watch, folder: Path) -> None:
    """Train until the watch ends the run."""
    with drawn_on_the_device(spec):
        run = build(spec, name="gpu_zoo", output=folder / "run", display=watch)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(EnoughError):
        run.train()


@contextlib.contextmanager
def drawn_on_the_device(spec: RunSpec) -> Iterator[None]:
    """Draw the model's weights on the device; the values differ from those drawn on a CPU."""
    plain = registry.build

    def built(part: Any, *arguments: Any, **keywords: Any) -> Any:
        if part is not spec.model:
            return plain(part, *arguments, **keywords)
        with device():
            return plain(part, *arguments, **keywords)

    with mock.patch.object(registry, "build", built):
        yield


def phase_row(
    name: str, phase: str, spec: RunSpec, steps: list[Mapping[str, Any]], warm_up: int, why: str
) -> dict[str, Any]:
    """Return the figures of a phase, or why there are too few steps."""
    rows = [row for row in steps if row["phase"] == phase][warm_up:]
    if not rows:
        return {"spec": name, "phase": phase, "failed": why or "too few steps"}

    def median(key: str, digits: int) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return round(statistics.median(values), digits) if values else None

    def most(key: str) -> float | None:
        return max((row[key] for row in rows if row.get(key) is not None), default=None)

    published = WORKS.get(f"{name}_{phase}")  # the same work by gpu_training.py
    found = next(each for each in spec.phase_specs() if each.name == phase)
    model: Any = found.model
    gradient, stopping = model.gradient, model.stopping
    return {
        "spec": name,
        "phase": phase,
        "searches": f"{stopping.max_iterations}+{gradient.steps}",
        "rows": found.training.batch_size,
        "length": found.data.seq_len,
        "checkpoint_activations": found.training.checkpoint_activations,
        "tokens_per_second": round(median("tokens_per_second", 0) or 0),
        "published_tokens_per_second": published and published.tokens_per_second,
        "iterations": median("iterations", 1),
        "published_iterations": published and published.iterations,
        "tflops": median("tflops", 1),
        "reserved_gb": most("memory_gb"),
        "allocated_gb": most("memory_allocated_gb"),
        "published_gb": published and published.peak_gb,
        "loss": median("loss", 3),
    }


if __name__ == "__main__":
    main()
