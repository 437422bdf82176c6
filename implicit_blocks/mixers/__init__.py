"""Mixers: how a window of tokens is mixed, one a file."""

from implicit_blocks.mixers.attention import Attention
from implicit_blocks.mixers.mamba2 import DepthwiseConv, Mamba2
from implicit_blocks.mixers.parallel import Parallel, ParallelLanes

__all__ = ["Attention", "DepthwiseConv", "Mamba2", "Parallel", "ParallelLanes"]
