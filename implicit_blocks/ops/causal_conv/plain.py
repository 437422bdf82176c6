"""The causal convolution as a sum of shifted products, differentiated by autograd: the reference.

Shapes: B batch, L length, C channels, W taps.
"""

import torch
from torch import Tensor
from torch.nn import functional


def convolve(
    full_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool, same_BLW: Tensor | None
) -> Tensor:
    """Convolve ``full``, the W-1 inputs before the window and the window: T = W-1 + L tokens give L outputs.

    ``same_BLW`` says which taps of a token lie in its own document; None: all.
    """
    taps = weight_CW.shape[1]
    length = full_BTC.shape[1] - (taps - 1)
    y = None
    for k in range(taps):
        shifted = full_BTC[:, k : k + length]
        if same_BLW is not None:
            shifted = torch.where(same_BLW[:, :, k, None], shifted, 0.0)
        y = shifted * weight_CW[:, k] if y is None else y + shifted * weight_CW[:, k]
    assert y is not None, "a convolution has at least one tap"
    if bias_C is not None:
        y = y + bias_C
    return functional.silu(y) if silu else y
