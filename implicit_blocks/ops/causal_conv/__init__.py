"""Short depthwise causal convolution, on the windowed contract.

Shapes: B batch, L length, C channels, W taps.
"""

from typing import Literal

import torch
from torch import Tensor

from implicit_blocks.ops.backends import AUTO, Backend, Operation
from implicit_blocks.ops.causal_conv import cuda, fla
from implicit_blocks.ops.causal_conv.plain import convolve
from implicit_blocks.ops.causal_conv.tiled import TiledConvolution, convolve_tiled
from implicit_blocks.ops.transforms import is_transformed

__all__ = ["CAUSAL_CONV", "causal_conv", "conv_tail"]


def causal_conv(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    tail_BWC: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    documents_BL: Tensor | None = None,
    tail_documents_BW: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Convolve each channel with its own W taps: ``y_t = b + Σ_k w_k x_{t-W+1+k}``.

    Sums are taken in float32 or better.

    Args:
        x_BLC: the window's inputs.
        weight_CW: taps, oldest first, as in ``nn.Conv1d``'s ``weight[:, 0]``.
        bias_C: added to every output.
        tail_BWC: the W-1 inputs before the window, (B, W-1, C); None is zeros.
        activation: "silu", applied to the result, or None.
        documents_BL: a number for each token's document; taps on another document's tokens count as zero.
        tail_documents_BW: the documents of the tail's tokens, (B, W-1); None: the first token's.
        backend: ``auto`` takes causal-conv1d's kernels or fla's where they are installed and suit the inputs,
            else ``torch``; a name of ``CAUSAL_CONV.names`` takes that one or raises.

    Returns:
        y_BLC, in the type of x.

    Raises:
        ValueError: if the tail or the weight does not fit, the activation or the backend is unknown, or the
            backend asked for can't run these inputs.
        ImportError: for a backend asked for by name whose package is missing.

    """
    channels, taps = weight_CW.shape
    if channels != x_BLC.shape[2]:
        raise ValueError(
            f"the weight has {channels} channels and the input {x_BLC.shape[2]}; they must agree"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"unknown activation {activation!r}; choose 'silu' or None")
    silu = activation == "silu"
    taken = CAUSAL_CONV.choose(backend, x_BLC, weight_CW, documents_BL)
    if taken is not _TORCH:
        known = None if tail_BWC is None else _checked_tail(x_BLC, tail_BWC, taps)
        y_BLC: Tensor = taken.run(x_BLC, known, weight_CW, bias_C, silu)
        return y_BLC
    if tail_BWC is None and documents_BL is None and torch.compiler.is_compiling():
        full = torch.nn.functional.pad(x_BLC, (0, 0, taps - 1, 0))
        return convolve(full, weight_CW, bias_C, silu, None).to(x_BLC.dtype)
    tail = _checked_tail(x_BLC, tail_BWC, taps)
    same_BLW = None
    if documents_BL is not None:
        if tail_documents_BW is None:
            tail_documents_BW = documents_BL[:, :1].expand(-1, taps - 1)
        history = torch.cat([tail_documents_BW, documents_BL], dim=1)
        same_BLW = history.unfold(1, taps, 1) == documents_BL[..., None]
    plain: Tensor = taken.run(x_BLC, tail, weight_CW, bias_C, silu, same_BLW)
    return plain


def _convolve_plainly(
    x_BLC: Tensor,
    tail_BWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    silu: bool,
    same_BLW: Tensor | None,
) -> Tensor:
    if is_transformed():
        full = torch.cat([tail_BWC.to(x_BLC.dtype), x_BLC], dim=1)
        return convolve(full, weight_CW, bias_C, silu, same_BLW).to(x_BLC.dtype)
    differentiable = (x_BLC, tail_BWC, weight_CW, bias_C)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        y: Tensor = TiledConvolution.apply(*differentiable, silu, same_BLW)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return y
    return convolve_tiled(*differentiable, silu, same_BLW)


_TORCH = Backend("torch", _convolve_plainly)
CAUSAL_CONV = Operation("causal_conv", cuda.BACKEND, fla.BACKEND, _TORCH)


def conv_tail(
    x_BLC: Tensor, tail_BWC: Tensor | None, *, taps: int, last_taps_BW: Tensor | None = None
) -> Tensor:
    """Return the last W-1 inputs of tail and window together, a copy: the tail of the next window.

    Args:
        x_BLC: the window's inputs, any length.
        tail_BWC: the W-1 inputs before the window, (B, W-1, C); None is zeros.
        taps: W.
        last_taps_BW: where each row's last W-1 real inputs stand in tail and window together, (B, W-1) int64;
            None: at the end.

    """
    if last_taps_BW is not None:
        inputs = torch.cat((_checked_tail(x_BLC, tail_BWC, taps).to(x_BLC.dtype), x_BLC), dim=1)
        return inputs.gather(1, last_taps_BW[:, :, None].expand(-1, -1, inputs.shape[2]))
    missing = max(taps - 1 - x_BLC.shape[1], 0)
    if not missing:
        return x_BLC[:, x_BLC.shape[1] - (taps - 1) :].clone()
    tail = _checked_tail(x_BLC, tail_BWC, taps)
    return torch.cat([tail[:, taps - 1 - missing :].to(x_BLC.dtype), x_BLC], dim=1)


def _checked_tail(x_BLC: Tensor, tail_BWC: Tensor | None, taps: int) -> Tensor:
    expected = (x_BLC.shape[0], taps - 1, x_BLC.shape[2])
    if tail_BWC is None:
        return x_BLC.new_zeros(expected)
    if tail_BWC.shape != expected:
        raise ValueError(
            f"the tail must have shape (B, W-1, C) = {expected}, but has {tuple(tail_BWC.shape)}"
        )
    return tail_BWC
