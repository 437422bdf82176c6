"""Attention: the mixer and its slot states."""

from implicit_blocks.mixers.attention.mixer import Attention

__all__ = ["Attention"]
