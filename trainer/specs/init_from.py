"""Where a run's first weights come from, if they are not fresh."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from implicit_blocks.specs import Spec


class StartSpec(Spec):
    """Another run's weights, and what else is taken over from it."""

    path: Annotated[str, Field(min_length=1)]
    """A run's folder (its newest checkpoint that is whole), a checkpoint, a folder that transformers reads,
    or a file of safetensors. The model must be the same but for what a phase may change; an explicit one may
    start an implicit one, whose injection grows from nothing."""
    optimizer: bool = False
    """Whether the optimizer's moments are taken over too; else it begins afresh. From a checkpoint only."""
    position: bool = False
    """Whether the data go on at the sample where that run stood, as they would within it, which means
    something for the same data and seed; else they begin at the first. From a checkpoint only."""


def _from_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Start = Annotated[StartSpec, BeforeValidator(_from_path, json_schema_input_type=str | StartSpec)]
"""The whole mapping, or the path alone."""
