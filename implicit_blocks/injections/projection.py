"""The injection of the paper: a term that the prelude's output adds to every mixer's input projection.

M. Schöne et al., "Implicit Language Models are RNNs", ICML 2025.

Shape legend: B batch, L tokens, D model width, U width of the mixers' input projections, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from implicit_blocks._utils.module_hooks import has_hooks
from implicit_blocks.injections import ProjectionSpec
from implicit_blocks.injections.base import Injection
from implicit_blocks.layers import Linear, RMSNorm

TOKENS_PER_ROW = 8  # with fewer tokens per word of the vocabulary, a table of injections saves little


class Projection(Injection):
    """``u = W rms(x) + b``, added to the input projection of every mixer.

    Args:
        spec: has no fields.
        d_model: D.
        core_width: not used.
        projected: U.
        norm_eps: added to the mean square in the norm.

    """

    direct: ClassVar[bool] = True

    def __init__(
        self, spec: ProjectionSpec, *, d_model: int, core_width: int, projected: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, eps=norm_eps)
        self.proj = Linear(d_model, projected)

    def source(self, x_BLD: Tensor) -> None:
        """Return None: the injection reaches the mixers directly."""

    def projected(self, x_BLD: Tensor) -> Tensor:
        """Return the injection, (…, U)."""
        return self(x_BLD)  # type: ignore[no-any-return]  # nn.Module calls are untyped

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the injection, (…, U)."""
        u: Tensor = self.proj(self.norm(x_BLD))
        return u

    def enter(self, z_BLC: Tensor, e: Tensor | None) -> Tensor:
        """Return ``z``."""
        return z_BLC


def pays_by_token(embedding: nn.Module, tokens: int) -> bool:
    """Whether a table with one injection per word of the vocabulary costs less than one per token.

    The gradient of a table is a product of (tokens × V), which must not cost more than the table saves.
    Embeddings with hooks or of other classes are excluded: their output may differ from a row of the weight.
    """
    if type(embedding) is not nn.Embedding or has_hooks(embedding):
        return False
    words, width = embedding.weight.shape
    plain = type(embedding.weight) is nn.Parameter  # not a shard of one
    return plain and words <= 2 * width and TOKENS_PER_ROW * words <= tokens
