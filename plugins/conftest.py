"""Fixtures and checks shared by the plugins' tests.

The test files of a plugin that is not installed are skipped, with the reason, before they are imported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.ops.accelerated import load
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import relative_error

HERE = Path(__file__).resolve().parent

Train = Callable[..., list[dict[str, Any]]]


class _Absent(pytest.Module):
    """A test file of a plugin that is not installed."""

    def collect(self) -> NoReturn:
        folder = HERE / self.path.relative_to(HERE).parts[0]
        pytest.skip(
            f"{folder.name} is not installed: pip install ./plugins/{folder.name}", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the test files of a plugin whose package cannot be found."""
    folder = HERE / module_path.resolve().relative_to(HERE).parts[0]
    packages = [path.name for path in (folder / "src").iterdir() if (path / "__init__.py").is_file()]
    if all(importlib.util.find_spec(name) is not None for name in packages):
        return None
    return _Absent.from_parent(parent, path=module_path)


@pytest.fixture
def train() -> Train:
    """Return a function that runs ``python -m trainer`` in this process and returns its metrics records."""
    from trainer.cli.train import main

    def train(output: Path, *arguments: str) -> list[dict[str, Any]]:
        assert main(["--output", str(output), *arguments]) == 0
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    return train


@pytest.fixture
def check_learns_s3(train: Train, tmp_path: Path) -> Callable[[str], None]:
    """Return a check that training a spec of the S3 word problem reaches an accuracy of 0.99 at length 32."""

    def check(spec: str) -> None:
        train(tmp_path / "run", "--spec", spec)
        sets = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
        accuracies = {part["set"]: part["accuracy_last"] for part in sets}
        assert accuracies["p0.5_L32"] >= 0.99

    return check


SMALL = ["phases=[]", "data.seq_len=16", "training.batch_size=16", "training.schedule.decay=0.2"]
SMALL += ["model.stopping.max_iterations=8", "model.at_evaluation.stopping.max_iterations=16"]
SMALL += ["evaluation.sequences=16", "evaluation.batch_size=16", "evaluation.lengths=[16]"]


@pytest.fixture
def check_loss_falls(train: Train, tmp_path: Path) -> Callable[..., None]:
    """Return a check that the last 4 losses of a run sum to less than ``factor`` times the first 4."""

    def check(spec: str, *, steps: int, factor: float) -> None:
        records = train(tmp_path / "run", "--spec", spec, f"training.max_steps={steps}", *SMALL)
        losses = [record["loss"] for record in records if "loss" in record]
        assert len(losses) == steps
        assert sum(losses[-4:]) < factor * sum(losses[:4])

    return check


@pytest.fixture
def check_refused() -> Callable[..., None]:
    """Return a check that a spec class reports one error, at ``place``, with ``message`` in its text."""

    def check(spec_class: type[Any], fields: dict[str, Any], place: str, message: str) -> None:
        with pytest.raises(SpecError) as caught:
            spec_class.model_validate(fields)
        (error,) = caught.value.errors()
        assert error["loc"] == (place,)
        assert message in error["msg"]

    return check


@pytest.fixture
def check_same_function() -> Callable[..., None]:
    """Return a check that two functions agree in all outputs and in the gradients of all inputs."""

    def check(
        found: Sequence[Tensor], expected: Sequence[Tensor], inputs: dict[str, Tensor], *, bound: float
    ) -> None:
        weights = [torch.randn_like(part) for part in expected]
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert relative_error(a.detach(), b.detach()) < bound, f"output {number}"
        gradients = [
            torch.autograd.grad(parts, list(inputs.values()), weights) for parts in (found, expected)
        ]
        for name, a, b in zip(inputs, *gradients, strict=True):
            assert relative_error(a, b) < bound, f"gradient of {name}"

    return check


@pytest.fixture
def mixer_inputs() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that draws z and u of a mixer, in float64, with gradients."""

    def draw(mixer: ib.Mixer, d_model: int, *, batch: int = 3, length: int = 20) -> tuple[Tensor, Tensor]:
        z, u = (
            torch.randn(batch, length, width, dtype=torch.float64, requires_grad=True)
            for width in (d_model, mixer.injection_width)
        )
        return z, u

    return draw


def _padded_tokens(length: int) -> tuple[Tensor, Tensor]:
    """Return tokens (3, L) below 11, and a mask: padding to the left in row 1, to the right in row 2."""
    tokens = torch.randint(0, 11, (3, length))
    attention_mask = torch.ones_like(tokens)
    attention_mask[1, :5] = 0
    attention_mask[2, 9:] = 0
    return tokens, attention_mask


@pytest.fixture
def check_trains_in_a_model() -> Callable[..., None]:
    """Return a check that a mixer trains in a language model: every gradient exists and is finite."""

    def check(mixer: ib.MixerSpec, *, d_model: int, precision: str) -> None:
        mlp = ib.SwiGLUSpec(d_ff=24)
        model = ib.build(ib.ImplicitLMSpec(vocab_size=11, d_model=d_model, n_layers=2, mixer=mixer, mlp=mlp))
        tokens, attention_mask = _padded_tokens(12)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            out = model(tokens, labels=tokens, attention_mask=attention_mask)
        out.loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())

    return check


@pytest.fixture
def check_modes_agree() -> Callable[..., None]:
    """Return a check that simultaneous and sequential modes of a language model agree to 1e-9.

    ``adapt`` changes the model's only mixer first, for instance to make the map a contraction.
    """

    def check(
        mixer: ib.MixerSpec,
        *,
        d_model: int,
        length: int,
        max_iterations: int,
        adapt: Callable[[Any], None] = lambda mixer: None,
    ) -> None:
        stopping = ib.Stopping(tolerance=1e-12, max_iterations=max_iterations)
        spec = ib.ImplicitLMSpec(vocab_size=11, d_model=d_model, n_layers=1, mixer=mixer, stopping=stopping)
        model = ib.build(spec).double().eval()
        with torch.no_grad():
            adapt(model.backbone.blocks()[0].mixer)
            tokens, attention_mask = _padded_tokens(length)
            whole = model(tokens, attention_mask=attention_mask)
            assert bool(whole.solution.converged.all())
            real = attention_mask.bool()
            for window_length in (1, 5):
                parts = model(tokens, attention_mask=attention_mask, window_length=window_length)
                torch.testing.assert_close(parts.logits[real], whole.logits[real], rtol=0, atol=1e-9)

    return check


@pytest.fixture
def require_kernels() -> Callable[[str], None]:
    """Return a function that skips a test where there is no CUDA device or ``module`` is missing."""

    def require(module: str) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if isinstance(reason := load(module), str):
            pytest.skip(reason)

    return require
