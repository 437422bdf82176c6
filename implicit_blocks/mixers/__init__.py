"""Mixers: the parts of a layer that mix the tokens of a window."""

from implicit_blocks._utils.padding import PaddingPermutation, permute
from implicit_blocks.mixers.attention.mixer import Attention
from implicit_blocks.mixers.hybrid import Hybrid, HybridSlots
from implicit_blocks.mixers.mamba2.mixer import Mamba2
from implicit_blocks.mixers.short_conv import DepthwiseConv, DocumentsAround

__all__ = [
    "Attention",
    "DepthwiseConv",
    "DocumentsAround",
    "Hybrid",
    "HybridSlots",
    "Mamba2",
    "PaddingPermutation",
    "permute",
]
