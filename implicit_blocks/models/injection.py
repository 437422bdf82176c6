"""The injection: what the embedded tokens add to every layer's input projection.

Shape legend: B batch, L tokens, D model width, U injection width, V vocabulary (padded).
"""

from __future__ import annotations

from torch import Tensor, nn

from implicit_blocks._utils.module_hooks import has_hooks
from implicit_blocks.layers import Linear, RMSNorm
from implicit_blocks.specs import ImplicitLMSpec
from implicit_blocks.weights.weight_norm import add_weight_norm

TOKENS_A_ROW = 8  # with fewer tokens for each word of the vocabulary, a table of injections saves little


class Injection(nn.Module):
    """``u = W rms(x) + b``: what the embedded tokens add to every layer's input projection."""

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
    """Whether the injections of a vocabulary are worth a table: few words, embedded by looking them up alone.

    The gradient of a table is a product of (tokens × V), which must not cost more than what it spares. Hooks
    and other classes may make something else of a token than its row of the weight.
    """
    if type(embedding) is not nn.Embedding or has_hooks(embedding):
        return False
    words, width = embedding.weight.shape
    plain = type(embedding.weight) is nn.Parameter  # not a part of one, with others elsewhere
    return plain and words <= 2 * width and TOKENS_A_ROW * words <= tokens
