"""Initial states of the loop. Their specs and their registration are in this file.

Importing this package imports no torch; the modules are imported on first use. A kind is built as
``build(spec, width=…)`` with the width of the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from implicit_blocks._utils.lazy import names_of_components
from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks.specs.families import StartSpec

if TYPE_CHECKING:
    from implicit_blocks.starts.start import EmbeddingStart as EmbeddingStart
    from implicit_blocks.starts.start import LearnedStart as LearnedStart
    from implicit_blocks.starts.start import NormalStart as NormalStart
    from implicit_blocks.starts.start import PreludeStart as PreludeStart
    from implicit_blocks.starts.start import Start as Start
    from implicit_blocks.starts.start import ZeroStart as ZeroStart


@hookimpl
def register_components(add: Add) -> None:
    """Register the built-in initial states."""
    add("start", ZeroStartSpec, "implicit_blocks.starts.start:ZeroStart")
    add("start", EmbeddingStartSpec, "implicit_blocks.starts.start:EmbeddingStart")
    add("start", PreludeStartSpec, "implicit_blocks.starts.start:PreludeStart")
    add("start", NormalStartSpec, "implicit_blocks.starts.start:NormalStart")
    add("start", LearnedStartSpec, "implicit_blocks.starts.start:LearnedStart")


class ZeroStartSpec(StartSpec):
    """Zeros."""

    kind: Literal["zeros"] = "zeros"


class EmbeddingStartSpec(StartSpec):
    """The embedded tokens."""

    depends_on_tokens: ClassVar[bool] = True

    kind: Literal["embedding"] = "embedding"

    def check(self, d_model: int, core_width: int) -> None:
        """Check that the widths are equal."""
        _require_equal_widths(self.kind, d_model, core_width)


class PreludeStartSpec(StartSpec):
    """The prelude's output, as the injection reads it."""

    depends_on_tokens: ClassVar[bool] = True

    kind: Literal["prelude"] = "prelude"

    def check(self, d_model: int, core_width: int) -> None:
        """Check that the widths are equal."""
        _require_equal_widths(self.kind, d_model, core_width)


class NormalStartSpec(StartSpec):
    """Normal noise: new in each step of training, a function of seed, position and channel in evaluation."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 1.0
    """Standard deviation before truncation."""
    truncation: PositiveFloat | None = None
    """Largest absolute value, in standard deviations; null: unbounded."""


class LearnedStartSpec(StartSpec):
    """A learned vector, the same for every token."""

    kind: Literal["learned"] = "learned"
    init_std: NonNegativeFloat = 0.0
    """Standard deviation of the vector's normal initial values; 0: zeros."""

    def parameter_count(self, core_width: int) -> int:
        """Return the width of the vector."""
        return core_width


def _require_equal_widths(kind: str, d_model: int, core_width: int) -> None:
    if d_model != core_width:
        raise ValueError(
            f"the initial state {kind!r} has width d_model, {d_model}, but the core has width {core_width}; "
            "choose another initial state, such as zeros or normal, or equal widths"
        )


if not TYPE_CHECKING:
    __getattr__ = names_of_components(__name__, register_components, Start="implicit_blocks.starts.start")
