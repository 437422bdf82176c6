"""What the library knows of a run's spec: it has a model. Its other sections are the trainer's."""

from __future__ import annotations

from typing import ClassVar

from implicit_blocks.specs.base import ComponentSpec
from implicit_blocks.specs.model import ModelSpec


class BaseRunSpec(ComponentSpec):
    """Base of what a YAML file describes as a whole."""

    family: ClassVar[str] = "run"
    read_before: ClassVar[tuple[str, ...]] = ("extends",)

    model: ModelSpec
    """The model that is trained."""

    @property
    def final_model(self) -> ModelSpec:
        """The model as the end of the run leaves it; its phases may change how the search goes."""
        return self.model
