"""The chunked loss against torch's: value, predictions and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the usual name
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_blocks.ops import cross_entropy
from implicit_blocks.ops.cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_chunked_loss_equals_the_loss_of_full_logits(monkeypatch, rows, dtype):
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", rows * 13)
    z = torch.randn(17, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(13, 6, dtype=dtype, requires_grad=True)
    labels = torch.randint(13, (17,))
    labels[::4] = -100
    loss, predictions = linear_cross_entropy(z, weight, labels)
    found = torch.autograd.grad(3 * loss, (z, weight))
    logits = z @ weight.T
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert torch.equal(predictions, logits.argmax(1))
    for a, b in zip(found, torch.autograd.grad(3 * expected, (z, weight)), strict=True):
        torch.testing.assert_close(a, b)


def test_overflow_in_ignored_tokens_has_no_effect():
    weight = torch.full((5, 3), 300.0, dtype=torch.float16, requires_grad=True)
    z = torch.tensor([[1.0] * 3, [100.0] * 3], dtype=torch.float16, requires_grad=True)
    assert not (z[1] @ weight.T).isfinite().all()
    loss, _ = linear_cross_entropy(z, weight, torch.tensor([2, -100]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(5), rel=1e-5)
    assert weight.grad.isfinite().all()
    assert z.grad.isfinite().all()
    assert torch.equal(z.grad[1], torch.zeros(3, dtype=torch.float16))


def test_the_loss_is_equal_without_gradients_and_under_autocast():
    z, weight, labels = torch.randn(9, 8), torch.randn(30, 8, requires_grad=True), torch.randint(30, (9,))
    with torch.no_grad():
        exact, _ = linear_cross_entropy(z, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(z, weight, labels)
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    assert weight.grad.dtype == torch.float32


def test_full_logits_are_never_stored(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 4 * 50)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            made.extend(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))
            return out

    z, weight = torch.randn(200, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)
    with Watch():
        loss, _ = linear_cross_entropy(z, weight, torch.randint(50, (200,)))
        loss.backward()
    assert max(made) < 200 * 50  # four bytes each
