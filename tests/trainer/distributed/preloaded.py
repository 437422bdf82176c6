"""Imports what the ranks of the distributed tests need, in the server that they are forked from.

Python has one such server per process: sweeps that are tested in the same process use it for their runs, too.
Not transformers: ranks that inherit it wait for each other without end in an evaluation that generates text.
"""

import contextlib
import importlib

from tests.trainer.fork_server import import_everything

import_everything()
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("matplotlib.backends.backend_agg")  # every run of a sweep draws a picture
