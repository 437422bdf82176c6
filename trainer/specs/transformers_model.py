"""Any causal language model of transformers, fresh or from a folder, as a baseline. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from implicit_blocks import registry
from implicit_blocks.specs import ModelSpec, field_error


class TransformersSpec(ModelSpec):
    """A causal language model of transformers: an architecture with fresh weights, or a folder."""

    kind: Literal["transformers"] = "transformers"
    architecture: str | None = None
    """Model type by transformers' name, such as llama, mamba, mamba2, rwkv; or give a folder."""
    folder: str | None = None
    """Folder with a config.json and weights, as save_pretrained leaves it."""
    weights: bool = True
    """Whether the folder's weights are the start; false: its configuration alone, with fresh weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of the architecture's configuration that differ from its defaults, or from the folder's."""
    vocab_size: PositiveInt | None = None
    """Number of token ids; null: the folder's."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = None
    """How transformers computes attention; null: its choice."""

    @model_validator(mode="before")
    @classmethod
    def _vocabulary_of_the_folder(cls, value: Any) -> Any:
        """Take the vocabulary from the folder, where it can be read; what is wrong is said at building."""
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
            raise ValueError("a model of transformers is made from one of two; give architecture or folder")
        if self.folder is None and not self.weights:
            message = "an architecture has no weights of its own; leave it out, or give a folder"
            raise field_error(message, "weights", value=False, of_key=True)
        if self.folder is None and self.vocab_size is None:
            message = "the data do not tell how many tokens there are; give it"
            raise field_error(message, "vocab_size", value=None)
        if "vocab_size" in self.config:
            message = "the vocabulary is a field of the model itself; give model.vocab_size"
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
