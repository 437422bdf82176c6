"""Mamba2's state-space scan (SSD), with a choice of backends behind one function."""

from implicit_blocks.ops.ssd.scan import SSD, ssd

__all__ = ["SSD", "ssd"]
