"""Triton kernels, each beside a plain operator elsewhere that it is tested against.

The modules here import Triton, so they are imported where a GPU asks for them and nowhere else.
"""
