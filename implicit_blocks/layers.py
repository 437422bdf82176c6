"""The layers around a mixer: normalization, linear maps, the SwiGLU MLP.

Shape legend: B batch, L tokens of a window, D model width, F hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses
from torch.nn.utils import parametrize

from implicit_blocks.specs import SwiGLUSpec
from implicit_blocks.weights import weight_norm
from implicit_blocks.weights.weight_norm import WeightNorm, assign_weight, plain_weight

PADDING = 64  # the fast matrix kernels need bfloat16 rows aligned to multiples of this width


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged in float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in float32 or better.

    With ``groups`` the width is divided into that many equal parts, each with its own mean.

    The output has the dtype of ``x``, so that a float32 residual stream stays float32 in a bfloat16 model.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(width))

    def forward(
        self,
        x: Tensor,
        added: Tensor | None = None,
        *,
        out: Tensor | None = None,
        damped: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Normalize (…, width): ``x``, or ``x + added``, a sum that a compiler fuses.

        ``damped`` is a point and a damping λ: the value is then ``(1 − λ) point + λ norm(x)``, which a
        compiler fuses as well. With ``out`` the value is written there.
        """
        normed = self._normed(x if added is None else x + added)
        if damped is not None:
            normed = torch.lerp(damped[0], normed, damped[1])
        return normed if out is None else out.copy_(normed)

    def _normed(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        if self.groups > 1:
            parts = wide.unflatten(-1, (self.groups, -1))
            normed = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
            return (normed * self.weight.to(wide.dtype)).to(x.dtype)
        return F.rms_norm(wide, wide.shape[-1:], self.weight.to(wide.dtype), self.eps).to(x.dtype)

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)


class Linear(nn.Linear):
    """A linear map that accepts inputs of any floating dtype and computes in the dtype of its weight.

    While weights are cached on a GPU, ``pad_out`` and ``pad_in`` pad the rows or columns with zeros to a
    multiple of 64, because the fast matrix kernels need aligned widths. With ``pad_out`` the output is wider
    by the padding, which is 0. The owner of the layers sets both flags.
    """

    pad_in = False
    pad_out = False
    cached: tuple[Tensor, Tensor | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        weight, bias = (self.weight, self.bias) if self.cached is None else self.cached
        return F.linear(input.to(weight.dtype), weight, bias)

    def current(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias that a call uses: the cached ones, if any."""
        return (plain_weight(self), self.bias) if self.cached is None else self.cached

    def layout(self) -> tuple[torch.dtype, int, int]:
        """Return the layout of the cached weight: dtype, number of padding rows and columns."""
        parts = weight_norm.normed_parts(self)
        parameter = next(iter(self.parameters())) if parts is None else parts[1]
        device, dtype = parameter.device.type, parameter.dtype
        if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        rows = -self.out_features % PADDING if self.pad_out and device == "cuda" else 0
        columns = -self.in_features % PADDING if self.pad_in and device == "cuda" else 0
        return dtype, rows, columns

    def prepared(
        self, layout: tuple[torch.dtype, int, int] | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in this layout, with ``weight`` in place of the weight if given."""
        (dtype, rows, columns), bias = self.layout() if layout is None else layout, self.bias
        if weight is None:
            parts = weight_norm.normed_parts(self)
            weight = (plain_weight(self) if parts is None else WeightNorm.compute(*parts)).to(dtype)
            if rows or columns:
                weight = F.pad(weight, (0, columns, 0, rows))
        if bias is None:
            return weight, None
        return weight, F.pad(bias.to(dtype), (0, rows)) if rows else bias.to(dtype)


class SwiGLU(nn.Module):
    """``W_out (silu(W_gate z) · W_up z)``: N. Shazeer, "GLU variants improve transformer", 2020.

    Args:
        spec: the hidden width F, and whether the layers have biases.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: SwiGLUSpec, *, d_model: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.out_proj = Linear(spec.d_ff, d_model, bias=spec.bias)

    def choose_padding(self) -> None:
        """Pad the hidden width while weights are cached, unless a layer is wrapped or replaced."""
        plain = all(isinstance(layer, Linear) for layer in self.children())
        for layer in self.modules():
            if isinstance(layer, Linear):
                layer.pad_out = plain and layer is not self.out_proj
                layer.pad_in = plain and layer is self.out_proj

    def forward(self, z_BLD: Tensor) -> Tensor:
        """Map each token, (B, L, D) to (B, L, D)."""
        hidden: Tensor = F.silu(self.gate_proj(z_BLD)) * self.up_proj(z_BLD)
        out: Tensor = self.out_proj(hidden)
        return out

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the layer that writes into the residual stream."""
        return (self.out_proj,)


def reset_linear_(module: nn.Module) -> None:
    """Initialize a linear or convolution layer as torch does: uniform in ±1/√fan_in."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    fresh = torch.empty_like(weight, requires_grad=False)
    nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
    assign_weight(module, fresh)
    bias = getattr(module, "bias", None)
    if bias is not None:
        bound = 1 / math.sqrt(fresh[0].numel())
        nn.init.uniform_(bias, -bound, bound)


def reset_parameters_(root: nn.Module) -> None:
    """Initialize every descendant of ``root`` that has parameters, in the order of ``modules()``."""
    for module in root.modules():
        if module is root:
            continue
        if parametrize.is_parametrized(module, "weight") or isinstance(module, nn.Linear):
            reset_linear_(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
