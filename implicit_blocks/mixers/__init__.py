"""Mixers: how a window of tokens is mixed, one a file."""

from implicit_blocks.mixers.attention import Attention
from implicit_blocks.mixers.mamba2 import Mamba2
from implicit_blocks.mixers.parallel import Parallel, ParallelLanes
from implicit_blocks.mixers.short_conv import DepthwiseConv, DocumentsAround

__all__ = ["Attention", "DepthwiseConv", "DocumentsAround", "Mamba2", "Parallel", "ParallelLanes"]
