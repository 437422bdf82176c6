"""The `training.init_from` section: initial weights from another run or file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from implicit_blocks.specs import Spec


class InitFromSpec(Spec):
    """Initial weights, and what else to load from another run."""

    path: Annotated[str, Field(min_length=1)]
    """A run directory (its newest valid checkpoint), a checkpoint, a pretrained folder of transformers, or a
    safetensors file. The models must be equal except for fields that a phase may change. An explicit model
    can initialize an implicit one, whose injection then starts from zero."""
    optimizer: bool = False
    """Load the optimizer's moments too; false: start with a fresh optimizer. Checkpoints only."""
    position: bool = False
    """Continue the data at the sample where the other run stopped, which is meaningful for the same data and
    seed; false: start with the first sample. Checkpoints only."""


def _from_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


InitFrom = Annotated[InitFromSpec, BeforeValidator(_from_path, json_schema_input_type=str | InitFromSpec)]
"""The full mapping, or its `path` alone."""
