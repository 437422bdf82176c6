"""Buffers that are lent: who holds one, or a view of one, never sees it overwritten."""

from __future__ import annotations

import torch

from implicit_blocks.cuda.buffer_pool import BufferPool


def test_a_loan_or_a_view_of_it_keeps_a_buffer():
    buffers = BufferPool(torch.zeros(2, 3), 2)
    assert buffers.free() == 0
    loan = buffers.acquire(0)
    assert buffers.free() == 1
    view = loan.view(3, 2).transpose(0, 1)
    del loan
    assert buffers.free() == 1
    second = buffers.acquire(1)
    assert buffers.free() is None
    del view
    assert buffers.free() == 0
    assert second.shape == (2, 3)


def test_what_autograd_saved_keeps_a_buffer():
    buffers = BufferPool(torch.zeros(2, 3), 1)
    weight = torch.ones(2, 3, requires_grad=True)
    product = buffers.acquire(0) * weight  # saves the loan for the weight's gradient
    assert buffers.free() is None
    product.sum().backward()
    assert buffers.free() == 0


def test_a_point_is_known_where_it_is_a_whole_buffer_laid_out_alike():
    buffers = BufferPool(torch.zeros(4, 6), 3)
    loan = buffers.acquire(2)
    assert buffers.index_of(loan) == 2
    assert buffers.index_of(loan.view(-1).view(4, 6)) == 2
    assert buffers.index_of(loan[:2]) is None
    assert buffers.index_of(loan.view(6, 4)) is None
    assert buffers.index_of(loan.clone()) is None
    with torch.inference_mode():
        assert buffers.index_of(loan.detach()) == 2
