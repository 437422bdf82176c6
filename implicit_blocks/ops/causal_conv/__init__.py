"""Short depthwise causal convolution, with a choice of backends behind one function."""

from implicit_blocks.ops.causal_conv.conv import CAUSAL_CONV, causal_conv, conv_tail

__all__ = ["CAUSAL_CONV", "causal_conv", "conv_tail"]
