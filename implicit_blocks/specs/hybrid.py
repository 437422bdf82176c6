"""Mixers side by side: hybrids."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from implicit_blocks.specs.counting import total
from implicit_blocks.specs.layers import MixerSpec


class HybridSpec(MixerSpec):
    """Several mixers side by side in each layer, their outputs added: hybrids of attention and SSD."""

    kind: Literal["hybrid"] = "hybrid"
    mixers: Annotated[tuple[MixerSpec, ...], Field(min_length=2)]
    """The mixers, two or more; each has its share of the injection and a state of its own."""

    def check(self, d_model: int) -> None:
        """Refuse what one of the mixers refuses."""
        for number, mixer in enumerate(self.mixers):
            try:
                mixer.check(d_model)
            except ValueError as error:
                raise ValueError(f"mixers.{number}: {error}") from None

    def injection_width(self, d_model: int) -> int | None:
        """Add up the mixers' widths."""
        return total(mixer.injection_width(d_model) for mixer in self.mixers)

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]] | None:
        """List the mixers', by their numbers."""
        found: dict[str, tuple[int, ...]] = {}
        for number, mixer in enumerate(self.mixers):
            shapes = mixer.parameter_shapes(d_model)
            if shapes is None:
                return None
            found |= {f"mixers.{number}.{name}": shape for name, shape in shapes.items()}
        return found

    def headline(self, d_model: int) -> str:
        """Say each mixer's kind and sizes."""
        each = ((mixer.kind, mixer.headline(d_model)) for mixer in self.mixers)
        return " + ".join(f"{kind} ({sizes})" if sizes else kind for kind, sizes in each)

    def flops_per_token(self, d_model: int, length: int) -> float | None:
        """Add up the mixers'."""
        return total(mixer.flops_per_token(d_model, length) for mixer in self.mixers)

    def portable(self) -> Self:
        """Return the spec with every mixer's choices of backends at their defaults."""
        return self.model_copy(update={"mixers": tuple(mixer.portable() for mixer in self.mixers)})
