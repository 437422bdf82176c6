"""Spec of a causal language model of transformers, used as a baseline. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from implicit_blocks import registry
from implicit_blocks.specs import ModelSpec, field_error


class TransformersSpec(ModelSpec):
    """A causal language model of transformers: an architecture or a pretrained folder."""

    kind: Literal["transformers"] = "transformers"
    architecture: str | None = None
    """transformers' model type, such as llama, mamba, mamba2 or rwkv. Give either `architecture` or
    `folder`."""
    folder: str | None = None
    """Folder with a config.json and weights, as written by save_pretrained."""
    weights: bool = True
    """Whether to load the folder's weights; false: use its configuration with random weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the architecture's default configuration, or of the folder's."""
    vocab_size: PositiveInt | None = None
    """Number of token IDs; null: that of the folder."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = None
    """Attention implementation; null: transformers' default."""

    @model_validator(mode="before")
    @classmethod
    def _vocabulary_of_the_folder(cls, value: Any) -> Any:
        """Read the vocabulary size from the folder if possible; errors are reported at building."""
        if not isinstance(value, Mapping) or value.get("vocab_size") is not None:
            return value
        try:
            config = json.loads((Path(str(value["folder"])) / "config.json").read_text(encoding="utf-8"))
            return {**value, "vocab_size": config["vocab_size"]}
        except (KeyError, TypeError, ValueError, OSError, RecursionError):
            return value

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.architecture is None) == (self.folder is None):
            raise ValueError("a transformers model needs exactly one of architecture and folder")
        if self.folder is None and not self.weights:
            message = "an architecture has no pretrained weights; omit weights, or give a folder"
            raise field_error(message, "weights", value=False, of_key=True)
        if self.folder is None and self.vocab_size is None:
            message = "the data do not determine the vocabulary size; set vocab_size"
            raise field_error(message, "vocab_size", value=None)
        if "vocab_size" in self.config:
            message = "set the vocabulary size as model.vocab_size instead"
            raise field_error(message, "config", "vocab_size", value=self.config["vocab_size"], of_key=True)
        return self

    def parameter_total(self) -> int:
        """Count the parameters of the model, built on the meta device; needs transformers.

        Raises:
            ValueError: the configuration cannot be used.

        """
        # By the registry, which imports the model and torch here and not with the specs.
        model_class: Any = registry.entry("model", self.kind).resolve_builder()
        total: int = model_class.count_parameters(self)
        return total
