"""A golden case: its folder, the models built from it, and the comparisons made.

Shape legend: B batch, L tokens, P head width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

import implicit_blocks as ib
from implicit_blocks.hf.architectures import Reading, find, inner_config
from implicit_blocks.hf.architectures.tensor_map import TensorMap
from implicit_blocks.ops.rotary import rotate
from implicit_blocks.specs import RopeScaling

VALUES, GRADIENTS, PRECISE = 1e-5, 1e-4, 1e-10
FLOAT64_EPS = 2.0**-52
_GRADIENT = re.compile(r"(^|[./])grad(_\w+)?/")


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    error: float
    bar: float
    reason: str = ""

    @property
    def gradient(self) -> bool:
        """Whether a gradient was compared."""
        return _GRADIENT.search(self.name) is not None

    @property
    def precise(self) -> bool:
        """Whether a value of a float64 model was compared."""
        return self.name.startswith("f64/")

    @property
    def passed(self) -> bool:
        """Whether the error is within the bar; NaN is not."""
        return self.error <= self.bar


@dataclass
class Case:
    """A case, and what was compared so far.

    Args:
        folder: its folder.
        architecture: the name of the published format; ``implicit`` for this library's own models.
        config: the contents of ``config.json``.
        weights: the published tensors.
        expected: the tensors that the published implementation computed, by name.

    """

    folder: Path
    architecture: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    expected: dict[str, Tensor]
    rows: list[Row] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)

    @classmethod
    def load(cls, folder: Path) -> Case:
        """Read a folder.

        Raises:
            ValueError: a file is missing, or the architecture is unknown.

        """
        missing = [
            name
            for name in ("config.json", "weights.safetensors", "expected.safetensors")
            if not (folder / name).is_file()
        ]
        if missing:
            raise ValueError(f"not a golden case: {', '.join(missing)} is missing")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = find(config)
        name = "implicit" if architecture is None else architecture.name
        if architecture is None and not str(config.get("model_type", "")).startswith("implicit_"):
            raise ValueError(f"the architecture {config.get('architecture')!r} is unknown")
        weights = load_file(folder / "weights.safetensors")
        return cls(folder, name, config, weights, load_file(folder / "expected.safetensors"))

    # ---------------------------------------------------------------------------------- inputs

    def input(self, name: str) -> Tensor:
        """Return a tensor that the published implementation was given, which needs no comparison."""
        self.inputs.add(name)
        return self.expected[name]

    @property
    def tokens(self) -> Tensor:
        """The tokens (B, L)."""
        return self.input("input_ids")

    @property
    def labels(self) -> Tensor:
        """The labels (B, L), aligned with the tokens."""
        return self.input("labels")

    @property
    def published(self) -> dict[str, Any]:
        """The published configuration."""
        return inner_config(self.config)

    @property
    def details(self) -> dict[str, Any]:
        """How the case was made."""
        source: dict[str, Any] = self.config.get("case", {})
        return source

    def names(self, pattern: str) -> Iterator[re.Match[str]]:
        """Return the matches of a pattern among the expected names, in order of the names."""
        return filter(None, (re.fullmatch(pattern, name) for name in sorted(self.expected)))

    # ---------------------------------------------------------------------------------- models

    def reading(self, **changes: Any) -> Reading:
        """Return what the configuration says, with some published fields changed."""
        architecture = find(self.config)
        assert architecture is not None
        return architecture.read(self.published | changes)

    @property
    def tensor_map(self) -> TensorMap:
        """How the published tensors correspond to ours."""
        return self.reading().tensors

    def model(
        self, *, dtype: torch.dtype = torch.float32, published: Mapping[str, Any] | None = None, **fields: Any
    ) -> ib.ImplicitLM:
        """Return the model in evaluation mode.

        Args:
            dtype: of weights and computation.
            published: published fields that differ from the case's.
            fields: fields of the spec that differ from the converter's.

        """
        reading = self.reading(**(published or {}))
        spec = ib.ImplicitLMSpec.model_validate({**reading.fields, **fields})
        if dtype == torch.float64:  # the published norm of q and k adds the machine epsilon of its type
            spec = ib.ImplicitLMSpec.model_validate(_with_eps(spec.model_dump(), FLOAT64_EPS))
        model: ib.ImplicitLM = ib.build(spec)
        state = reading.tensors.read(self.weights, model.state_dict(), what=str(self.folder))
        model.load_state_dict(state)
        return model.to(dtype).eval()

    # ---------------------------------------------------------------------------------- comparisons

    def value(
        self, name: str, found: Tensor | Callable[[], Tensor], *, bar: float | None = None, reason: str = ""
    ) -> None:
        """Compare a tensor, if the case has one of this name; whole numbers must be equal.

        A function is called only then.
        """
        if name not in self.expected:
            return
        expected, found = self.expected[name], found if isinstance(found, Tensor) else found()
        if found.shape != expected.shape and found.numel() == expected.numel():
            found = found.reshape(expected.shape)
        if not expected.is_floating_point():
            equal = found.shape == expected.shape and torch.equal(found.to(expected.dtype), expected)
            self.rows.append(Row(name, 0.0 if equal else torch.inf, 0.0, reason))
            return
        usual = PRECISE if name.startswith("f64/") else GRADIENTS if _GRADIENT.search(name) else VALUES
        self.rows.append(Row(name, relative_error(found, expected), usual if bar is None else bar, reason))

    def gradients(self, prefix: str, model: nn.Module) -> None:
        """Compare the gradients of all parameters with those named ``prefix`` + the published name."""
        ours = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
        }
        found = self.tensor_map.write_gradients(ours)
        first = self.tensor_map.copies
        for match in self.names(re.escape(prefix) + "(.+)"):
            name = first.get(match[1], match[1])
            if name in found:
                self.value(match[0], found[name])

    @property
    def not_compared(self) -> list[str]:
        """The expected tensors that were neither compared nor used as inputs."""
        compared = {row.name for row in self.rows}
        return sorted(self.expected.keys() - compared - self.inputs)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ``‖found − expected‖ / ‖expected‖``, or ``‖found‖`` where all of ``expected`` is 0."""
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.detach().double() - expected.double()).norm()
    size = expected.double().norm()
    return float(difference / size) if size > 0 else float(difference)


def _with_eps(fields: Any, eps: float) -> Any:
    """Return fields of a spec with another epsilon in the norms of q and k that have no weights."""
    if isinstance(fields, dict):
        changed = {name: _with_eps(value, eps) for name, value in fields.items()}
        return changed | ({"qk_norm_eps": eps} if fields.get("qk_norm") == "unweighted" else {})
    return [_with_eps(value, eps) for value in fields] if isinstance(fields, list | tuple) else fields


@contextmanager
def published_rotations(*, angles: torch.dtype = torch.float32, then_norm: bool = False) -> Iterator[None]:
    """Rotate q and k of float64 models as the published codes do, whose tables are partly in float32.

    Ours are computed in float64, so that large positions are exact; with them the float64 tensors agree to
    about 1e-8, and with the published ones to rounding.

    Args:
        angles: the type of angles, cosines and sines; frequencies are computed in float32.
        then_norm: norm q and k after the rotation, which hides the rounding of the table from their lengths.

    """

    def tables(
        positions_BL: Tensor,
        *,
        head_dim: int,
        theta: float,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> tuple[Tensor, Tensor]:
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        condense = 1.0 if scaling is None else scaling.factor
        turned = (positions_BL.to(angles) / condense)[:, None, :, None] * frequencies.to(angles)
        return turned.cos().to(dtype), turned.sin().to(dtype)

    def rotated(x_BHLP: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = rotate(x_BHLP, cos, sin)
        return F.rms_norm(turned, turned.shape[-1:], eps=FLOAT64_EPS) if then_norm else turned

    mixer = "implicit_blocks.mixers.attention.mixer"
    with mock.patch(f"{mixer}.rotation_tables", tables), mock.patch(f"{mixer}.rotate", rotated):
        yield


def relative_residual(fz: Tensor, z: Tensor) -> Tensor:
    """Return the published residual ``‖f(z) − z‖ / ‖z‖`` of each sequence, (B,) float64."""
    step, size = (fz - z).flatten(1).norm(dim=1), z.flatten(1).norm(dim=1).clamp_min(1e-9)
    residual: Tensor = (step / size).double()
    return residual
