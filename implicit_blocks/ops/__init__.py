"""Operators on sequences: a plain torch reference beside every accelerated backend, one dispatcher each.

Import each from its own package (``from implicit_blocks.ops.ssd import ssd``): exported here, the functions
would hide the packages of the same names.
"""
