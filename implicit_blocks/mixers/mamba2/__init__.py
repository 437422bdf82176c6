"""Mamba2: the mixer and its slot states."""

from implicit_blocks.mixers.mamba2.mixer import Mamba2

__all__ = ["Mamba2"]
