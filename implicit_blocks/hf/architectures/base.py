"""``Architecture``: one published format of looped models, read as a spec and tensors, and written back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from implicit_blocks.hf.architectures.tensor_map import TensorMap
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec


@dataclass(frozen=True)
class Reading:
    """A published configuration as fields of a spec.

    Args:
        fields: the model spec as a mapping.
        tensors: how the published tensors correspond to ours.
        remarks: what the spec cannot express, one sentence each.
        extra: fields of transformers configurations that a spec does not have.

    """

    fields: dict[str, Any]
    tensors: TensorMap
    remarks: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> ImplicitLMSpec:
        """The model spec.

        Raises:
            SpecError: values of the configuration are out of range; it names the spec's fields.

        """
        return ImplicitLMSpec.model_validate(self.fields)


class Architecture(ABC):
    """One published format. The functions are pure; all state is in the configuration."""

    name: ClassVar[str]
    """The name in messages and in golden cases."""

    @abstractmethod
    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration is of this architecture."""

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> Reading:
        """Return a published configuration as fields of a spec.

        Raises:
            ValueError: lists all unknown fields and all values that no spec can express.

        """

    @abstractmethod
    def describes(self, spec: ImplicitLMSpec) -> bool:
        """Return whether a spec looks like this architecture, so that ``write`` may succeed."""

    @abstractmethod
    def write(self, spec: ImplicitLMSpec) -> dict[str, Any]:
        """Return a published configuration for a spec; the caller verifies it by reading it.

        Raises:
            ValueError: a value that the format does not have.

        """


FREE_FIELDS = frozenset(
    {
        *("kind", "solver", "gradient", "stopping", "window_length", "at_evaluation", "depth", "objective"),
        *("z_init", "state_policy", "embedding_std", "scale_residual_init", "dropout"),
    }
)
"""Fields of the search, of training or of decoding, on which no tensor and no map depends."""


def export_config(
    architecture: Architecture,
    spec: ImplicitLMSpec | ExplicitLMSpec,
    original: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the published configuration of a spec.

    Args:
        architecture: the format.
        spec: the model.
        original: the configuration that the model was read from; it is returned unchanged if it still
            describes the model.

    Raises:
        ValueError: the format cannot express the spec; names the fields.

    """
    if not isinstance(spec, ImplicitLMSpec):
        raise ValueError(
            f"the format of {architecture.name} has looped models only; the spec is {spec.kind!r}"
        )
    if original is not None and not _lost(spec, architecture.read(original).spec):
        return dict(original)
    try:
        config = architecture.write(spec)
        lost = _lost(spec, architecture.read(config).spec)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the format of {architecture.name} cannot express this spec: {error}") from None
    if lost:
        raise ValueError(
            f"the format of {architecture.name} cannot express these fields of the spec: "
            f"{', '.join(f'{name} ({value!r})' for name, value in lost.items())}"
        )
    return config


def _lost(spec: ImplicitLMSpec, again: ImplicitLMSpec) -> dict[str, Any]:
    """Return the fields of ``spec`` that differ in their effect on the tensors or the map."""
    differing = {
        name: value
        for name, value in spec.model_dump().items()
        if name not in FREE_FIELDS | _STACKS and again.model_dump()[name] != value
    }
    if differing.keys() <= {"pad_vocab_to"} and spec.padded_vocab_size == again.padded_vocab_size:
        differing = {}
    for name in sorted(spec.stacks.keys() | again.stacks.keys()):
        if spec.stacks.get(name) != again.stacks.get(name):
            differing[name] = "its layers"
    return differing


_STACKS = frozenset(
    {
        "n_layers",
        "layers",
        "mixer",
        "mlp",
        "prelude",
        "coda",
        "norm_placement",
        "residual_scaling",
        "core_d_model",
    }
)
