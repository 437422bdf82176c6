"""Training data: word problems made on the fly, and memory-mapped tokens.

`trainer.data.source` is what the training loop knows of either; `trainer.data.groups` imports no torch, so
that specs may check a group's name.
"""
