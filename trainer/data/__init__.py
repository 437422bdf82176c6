"""Training data: generated word problems, catbAbI, tokenized text, streamed datasets and mixtures.

`trainer.data.source` defines the interface to the training loop. `trainer.data.groups` imports no torch, so
that specs can validate group names.
"""
