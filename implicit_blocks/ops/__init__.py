"""Operators on sequences: a plain torch reference beside every accelerated backend, one dispatcher each."""

from implicit_blocks.ops.causal_conv import causal_conv, conv_tail
from implicit_blocks.ops.ssd import ssd

__all__ = ["causal_conv", "conv_tail", "ssd"]
