"""Training data: generated word problems, catbAbI, tokenized text, streamed datasets and mixtures.

`trainer.data.source` defines the interface to the training loop. `trainer.specs.groups` imports no torch, so
that specs can validate group names.
"""
