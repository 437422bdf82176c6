"""The injection: the term that embedded tokens add to every layer's input projection.

Shape legend: B batch, L tokens, D model width, U injection width, V vocabulary (padded).
"""

from __future__ import annotations

from torch import Tensor, nn

from implicit_blocks._utils.module_hooks import has_hooks
from implicit_blocks.layers import Linear, RMSNorm
from implicit_blocks.specs import ImplicitLMSpec
from implicit_blocks.weights.weight_norm import add_weight_norm

TOKENS_PER_ROW = 8  # with fewer tokens per word of the vocabulary, a table of injections saves little


class Injection(nn.Module):
    """``u = W rms(x) + b``: the term that embedded tokens add to every layer's input projection."""

    def __init__(self, spec: ImplicitLMSpec, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.proj = Linear(spec.d_model, width)
        if spec.weight_norm:
            add_weight_norm(self)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the injection, (B, L, U)."""
        u: Tensor = self.proj(self.norm(x_BLD))
        return u


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
