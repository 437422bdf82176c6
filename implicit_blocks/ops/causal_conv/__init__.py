"""Short depthwise causal convolution, on the windowed contract.

Shapes: B batch, L length, C channels, W taps.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

__all__ = ["causal_conv", "conv_tail"]


def causal_conv(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    tail_BWC: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    documents_BL: Tensor | None = None,
    tail_documents_BW: Tensor | None = None,
) -> Tensor:
    """Convolve each channel with its own W taps, the last on the current token: ``y_t = b + Σ_k w_k x_{t-W+1+k}``.

    Args:
        x_BLC: the window's inputs.
        weight_CW: taps, oldest first, as in ``nn.Conv1d``'s ``weight[:, 0]``.
        bias_C: added to every output.
        tail_BWC: the W-1 inputs before the window, (B, W-1, C); None is zeros.
        activation: "silu", applied to the result, or None.
        documents_BL: a number for each token's document; taps on another document's tokens count as zero.
        tail_documents_BW: the documents of the tail's tokens, (B, W-1); None: the first token's.

    Returns:
        y_BLC, in the type of x.

    Raises:
        ValueError: if the tail or the weight does not fit, or the activation is unknown.
    """
    length, channels = x_BLC.shape[1:]
    taps = weight_CW.shape[1]
    if weight_CW.shape[0] != channels:
        raise ValueError(
            f"the weight has {weight_CW.shape[0]} channels and the input {channels}; they must agree"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"unknown activation {activation!r}; choose 'silu' or None")
    full = _with_tail(x_BLC, tail_BWC, taps)
    weight_WC = weight_CW.to(x_BLC.dtype).t()
    documents = None
    if documents_BL is not None:
        if tail_documents_BW is None:
            tail_documents_BW = documents_BL[:, :1].expand(-1, taps - 1)
        documents = torch.cat([tail_documents_BW, documents_BL], dim=1)
    y = x_BLC * weight_WC[taps - 1]
    for k in range(taps - 1):
        shifted = full[:, k : k + length]
        if documents is not None:
            same_BL = documents[:, k : k + length] == documents_BL
            shifted = torch.where(same_BL[..., None], shifted, 0.0)
        y = torch.addcmul(y, shifted, weight_WC[k])
    if bias_C is not None:
        y = y + bias_C.to(y.dtype)
    return F.silu(y) if activation == "silu" else y


def conv_tail(x_BLC: Tensor, tail_BWC: Tensor | None, *, taps: int) -> Tensor:
    """Return the last W-1 inputs of tail and window together, a copy: the tail of the next window.

    Args:
        x_BLC: the window's inputs, any length.
        tail_BWC: the W-1 inputs before the window, (B, W-1, C); None is zeros.
        taps: W.
    """
    if x_BLC.shape[1] >= taps - 1:
        return x_BLC[:, x_BLC.shape[1] - (taps - 1) :].clone()
    return _with_tail(x_BLC, tail_BWC, taps)[:, -(taps - 1) :].clone()


def _with_tail(x_BLC: Tensor, tail_BWC: Tensor | None, taps: int) -> Tensor:
    """Put the tail in front of the window."""
    if tail_BWC is None:
        return F.pad(x_BLC, (0, 0, taps - 1, 0))
    expected = (x_BLC.shape[0], taps - 1, x_BLC.shape[2])
    if tail_BWC.shape != expected:
        raise ValueError(
            f"the tail must have shape (B, W-1, C) = {expected}, but has {tuple(tail_BWC.shape)}"
        )
    return torch.cat([tail_BWC.to(x_BLC.dtype), x_BLC], dim=1)
