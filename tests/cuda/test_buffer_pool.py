"""Buffer pool: a buffer is not reused while a caller, a view or autograd refers to it."""

from __future__ import annotations

import torch

from implicit_blocks.cuda.buffer_pool import BufferPool


def test_a_buffer_stays_acquired_while_a_view_of_it_exists():
    buffers = BufferPool(torch.zeros(2, 3), 2)
    assert buffers.free() == 0
    acquired = buffers.acquire(0)
    assert buffers.free() == 1
    view = acquired.view(3, 2).transpose(0, 1)
    del acquired
    assert buffers.free() == 1
    second = buffers.acquire(1)
    assert buffers.free() is None
    del view
    assert buffers.free() == 0
    assert second.shape == (2, 3)


def test_a_buffer_stays_acquired_while_autograd_needs_it():
    buffers = BufferPool(torch.zeros(2, 3), 1)
    weight = torch.ones(2, 3, requires_grad=True)
    product = buffers.acquire(0) * weight  # autograd saves the buffer for the weight's gradient
    assert buffers.free() is None
    product.sum().backward()
    assert buffers.free() == 0


def test_index_of_finds_only_whole_buffers_of_the_same_layout():
    buffers = BufferPool(torch.zeros(4, 6), 3)
    acquired = buffers.acquire(2)
    assert buffers.index_of(acquired) == 2
    assert buffers.index_of(acquired.view(-1).view(4, 6)) == 2
    assert buffers.index_of(acquired[:2]) is None
    assert buffers.index_of(acquired.view(6, 4)) is None
    assert buffers.index_of(acquired.clone()) is None
    with torch.inference_mode():
        assert buffers.index_of(acquired.detach()) == 2
