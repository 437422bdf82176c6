"""Imports what the ranks of the distributed tests need, in the server that they are forked from.

Not transformers: ranks that inherit it wait for each other without end in an evaluation that generates text.
"""

from tests.trainer.fork_server import import_everything

import_everything()
