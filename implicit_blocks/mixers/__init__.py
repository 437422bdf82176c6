"""Mixers: how a window of tokens is mixed, one a file."""

from implicit_blocks.mixers.attention import Attention
from implicit_blocks.mixers.mamba2 import Mamba2
from implicit_blocks.mixers.parallel import Parallel, ParallelLanes

__all__ = ["Attention", "Mamba2", "Parallel", "ParallelLanes"]
