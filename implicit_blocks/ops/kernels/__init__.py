"""Triton kernels; each is tested against a plain operator.

These modules import Triton, so they are imported only when a GPU uses them.
"""
