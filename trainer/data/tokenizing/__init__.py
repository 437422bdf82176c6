"""Tokenization of text into shards: documents, tokenizers, shard format, the parallel job. Imports no torch.

`python -m trainer.tokenize` is the command; `tokenize` is its Python interface.
"""

from trainer.data.tokenizing.documents import Documents
from trainer.data.tokenizing.job import Job, Result, tokenize
from trainer.data.tokenizing.pieces import Piece
from trainer.data.tokenizing.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from trainer.data.tokenizing.training import train_tokenizer_for

__all__ = [
    "Documents",
    "Job",
    "Piece",
    "Result",
    "Tokenizer",
    "load_tokenizer",
    "tokenize",
    "train_tokenizer",
    "train_tokenizer_for",
]
