"""Batches: rows, and the model's additional arguments."""

from __future__ import annotations

import torch

from trainer.data.source import Batch


def test_rows_of_a_batch_keep_their_labels_and_documents() -> None:
    numbers = torch.arange(12).view(4, 3)
    plain = Batch(inputs=numbers, labels=numbers + 1)
    assert (len(plain), plain.tokens, plain.context()) == (4, 12, {})
    packed = Batch(inputs=numbers, labels=numbers + 1, documents=numbers // 2)
    part = packed.rows(1, 3).to(torch.device("cpu"))
    assert torch.equal(part.inputs, numbers[1:3])
    assert torch.equal(part.labels, numbers[1:3] + 1)
    assert torch.equal(part.context()["documents"], numbers[1:3] // 2)
