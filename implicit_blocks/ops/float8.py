"""Products of matrices in 8-bit floats (e4m3), with one scale per row of each factor.

The largest entry of a row is mapped to 448, the largest e4m3 number. An entry's rounding error is at most
1/16 of it, so that the relative error of a product of normally distributed factors is about 4 %; bfloat16 has
0.3 %. An H100 computes such products about 1.6 times as fast as those in bfloat16.

Shape legend: K columns of a weight (inputs), N rows (outputs), … tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.ops import quantization
from implicit_blocks.ops.backends import without_autocast
from implicit_blocks.ops.quantization import SMALLEST

E4M3 = torch.float8_e4m3fn
LARGEST = quantization.LARGEST[E4M3]
UNIT = 16  # matrix units need multiples of this; rows of a weight are padded
NARROWEST = 512
"""Smallest number of inputs and outputs: narrower products are limited by memory traffic."""
CAPABILITY = (8, 9)  # of the first GPUs with matrix units for 8-bit floats


class Float8Weight(NamedTuple):
    """``codes`` (N, K) e4m3 times ``scales`` (N,) float32; products with it are in ``dtype``.

    Matrix units need multiples of 16 rows: others are followed by rows of zeros, which are not counted.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    rows: int
    """N, without the rows of zeros."""

    @classmethod
    def like(cls, weight: Tensor) -> Float8Weight:
        """Return room for the codes of a weight, (N, K)."""
        rows, columns = weight.shape
        padded = rows + -rows % UNIT
        codes = torch.zeros(padded, columns, device=weight.device).to(E4M3)
        scales = torch.ones(padded, dtype=torch.float32, device=weight.device)
        return cls(codes, scales, weight.dtype, rows)

    def wide(self) -> Tensor:
        """Return the dequantized weight in float32, (N, K)."""
        return (self.codes.float() * self.scales[:, None])[: self.rows]


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (…, K) e4m3 and scales (…, 1) float32 of the rows of ``x``."""
    codes, scales = quantization.eight_bits(x, E4M3)
    return codes, scales[..., None]


def float8_linear(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return ``x Wᵀ + b``, (…, N), with quantized rows of ``x`` (…, K).

    On a GPU by matrix units for 8-bit floats, which accumulate in float32; elsewhere dequantized factors are
    multiplied in float32, as a reference that is not faster.
    """
    codes, scales = quantized_rows(x)
    return float8_product(codes, scales, weight, bias)


def float8_product(codes: Tensor, scales: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return the product with a weight, (…, N), given codes (…, K) and scales (…, 1) of the other factor.

    Where the weight has rows of zeros, the product is a view of the first N of its columns.
    """
    with without_autocast(codes.device.type):
        if not codes.is_cuda:
            wide = None if bias is None else bias.float()
            return F.linear(codes.float() * scales, weight.wide(), wide).to(weight.dtype)
        if bias is not None and len(bias) < len(weight.codes):
            bias = F.pad(bias, (0, len(weight.codes) - len(bias)))
        product: Tensor = torch._scaled_mm(
            codes.flatten(0, -2),
            weight.codes.t(),
            scale_a=scales.flatten(0, -2),
            scale_b=weight.scales[None],
            bias=bias,
            out_dtype=weight.dtype,
            use_fast_accum=True,
        )
    product = product.view(*codes.shape[:-1], len(weight.codes))
    return product if len(weight.codes) == weight.rows else product[..., : weight.rows]


def float8_swiglu(gate: Tensor, up: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return ``W (silu(gate) · up) + b``, (…, N), given (…, K) each, with quantized rows of the product.

    On a GPU by one pass over both, where a compiler's kernel would read them twice: for the largest entry of
    a row, and for its codes.
    """
    if not gate.is_cuda:
        return float8_linear(F.silu(gate) * up, weight, bias)
    codes, scales = _swiglu(gate.contiguous(), up.contiguous())
    return float8_product(codes, scales, weight, bias)


@torch.library.custom_op("implicit_blocks::float8_swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    from implicit_blocks.ops.kernels.float8 import swiglu

    codes = torch.empty_like(gate, dtype=E4M3)
    scales = torch.empty(*gate.shape[:-1], 1, dtype=torch.float32, device=gate.device)
    swiglu(gate, up, codes, scales, largest=LARGEST, smallest=SMALLEST)
    return codes, scales


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate, dtype=E4M3), gate.new_empty(*gate.shape[:-1], 1, dtype=torch.float32)


@torch.no_grad()
def quantize_(weights: list[Float8Weight], sources: list[Tensor]) -> None:
    """Write the quantized rows of each source, (N, K), into ``weights``; on a GPU in one launch."""
    if weights and sources[0].is_cuda:
        from implicit_blocks.ops.kernels.float8 import quantize_all

        quantize_all(
            [source.contiguous() for source in sources],
            [weight.codes for weight in weights],
            [weight.scales for weight in weights],
            largest=LARGEST,
            smallest=SMALLEST,
        )
        return
    for weight, source in zip(weights, sources, strict=True):
        codes, scales = quantized_rows(source)
        weight.codes[: weight.rows].copy_(codes)
        weight.scales[: weight.rows].copy_(scales[:, 0])


def device_obstacle(device: torch.device) -> str | None:
    """Return the reason why a device has no such products, or None; CPUs have the reference."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"products of 8-bit floats are computed on NVIDIA GPUs only, not on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {found[0]}.{found[1]}; products of 8-bit floats need 8.9"
    return None


def weight_obstacle(weight: Tensor) -> str | None:
    """Return the reason why a weight (N, K) is not quantized, or None."""
    if weight.ndim != 2:
        return f"a weight of {weight.ndim} dimensions is not quantized"
    if weight.shape[1] % UNIT:
        return f"the width of shape {tuple(weight.shape)} is not divisible by {UNIT}"
    if weight.is_cuda and weight.dtype not in (torch.bfloat16, torch.float16):
        return f"the product would be in {weight.dtype}; 16-bit precision is required"
    if weight.is_cuda and min(weight.shape) < NARROWEST:
        return f"shape {tuple(weight.shape)} has a width below {NARROWEST}, where bfloat16 is as fast"
    return None
