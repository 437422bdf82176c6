"""Imports the installed `trainer`, although the working directory may have a file of that name.

A server of processes starts in the working directory and preloads this module first.
"""

import warnings

from implicit_blocks._utils.own_packages import load_own

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", RuntimeWarning
    )  # the program that starts the server has reported the file
    load_own("trainer")
