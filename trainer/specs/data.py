"""What the model is trained on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from implicit_blocks.specs import ComponentSpec
from trainer.data import groups

Probability = Annotated[float, Field(ge=0, le=1)]


class DataSpec(ComponentSpec):
    """Base of all data sources' specs."""

    family: ClassVar[str] = "data"

    length: PositiveInt
    """Tokens in a training sequence."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids, where the spec alone tells it."""
        return None


class WordProblemSpec(DataSpec):
    """Prefix products in a finite group, optionally times a monoid: generated as they are needed."""

    kind: Literal["word_problem"] = "word_problem"
    group: str
    """S_n, A_n, Z_n or a product: S3, A5, Z7, A5xZ2."""
    monoid: str | tuple[tuple[int, ...], ...] | None = None
    """A monoid to multiply the group with: EABX (the published one), or a table of rows."""
    identity_probability: Probability = 0.5
    """Share of tokens forced to the group's identity; the others are uniform over the group."""
    draw_order: Literal["fast", "published"] = "fast"
    """`published` draws bit by bit what the published generator draws, at about a third of the speed."""

    @property
    def vocab_size(self) -> int:
        """|G|·|M|."""
        return groups.group_order(self.group) * (
            1 if self.monoid is None else groups.monoid(self.monoid).order
        )

    @field_validator("group")
    @classmethod
    def _known_group(cls, name: str) -> str:
        groups.group_order(name)
        return name

    @field_validator("monoid", mode="before")
    @classmethod
    def _known_monoid(cls, monoid: object) -> object:
        if monoid is not None:
            if not isinstance(monoid, str | list | tuple):
                raise ValueError("a monoid is a name such as EABX, or a table of rows")
            groups.monoid(monoid)
        return monoid


class TokensSpec(DataSpec):
    """Text as memory-mapped token ids."""

    kind: Literal["tokens"] = "tokens"
    path: str | None = None
    """File or folder of token ids; null in specs that leave it to the command line: `data.path=DIR`."""
    validation_path: str | None = None
    """The same for held-out text."""
    length: PositiveInt = 2048
    """Tokens in a training sequence."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids in the files; null: as the files say."""
