"""The MLP of transformers with a choice of activation, plain or gated.

Plain: A. Vaswani et al., "Attention is all you need", 2017; squared ReLU: D. So et al., "Primer", 2021.
Gated: N. Shazeer, "GLU variants improve transformer", 2020.

Shape legend: B batch, L tokens of a window, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.layers import Linear
from implicit_blocks.mlps import Activation, FeedForwardSpec

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "half_relu2": lambda x: 0.5 * F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """``W_out act(W_in z)``, or gated ``W_out (act(W_gate z) · W_up z)``.

    A gated MLP has the parameters of `SwiGLU`, which has a fused kernel for decoding: prefer it for `silu`.

    Args:
        spec: the hidden width F, the activation, whether it is gated, and whether the layers have biases.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: FeedForwardSpec, *, d_model: int) -> None:
        super().__init__()
        self.activation, self.gated = spec.activation, spec.gated
        if spec.gated:
            self.gate_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
            self.up_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        else:
            self.in_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.out_proj = Linear(spec.d_ff, d_model, bias=spec.bias)

    def forward(self, z_BLD: Tensor) -> Tensor:
        """Map each token, (B, L, D) to (B, L, D)."""
        act = ACTIVATIONS[self.activation]
        hidden = act(self.gate_proj(z_BLD)) * self.up_proj(z_BLD) if self.gated else act(self.in_proj(z_BLD))
        out: Tensor = self.out_proj(hidden)
        return out

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the layer that writes into the residual stream."""
        return (self.out_proj,)
