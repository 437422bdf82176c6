"""The convolution over a board: contracts, its plain reference, boards of several sizes, refusals."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import MIXER_CONTRACTS

SPECS = {
    "square": ib.GridConvSpec(),
    "columns": ib.GridConvSpec(columns=4, d_inner=6, bias=True),
    "kernel-5": ib.GridConvSpec(columns=3, kernel_size=5),
}


def window(valid: torch.Tensor) -> ib.Window:
    """Return a window of boards with padding where ``valid`` (B, L) is False."""
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    return ib.Window(
        batch_size=len(valid),
        start=0,
        length=valid.shape[1],
        positions_BL=positions,
        valid_BT=None if bool(valid.all()) else valid,
    )


def mixed(mixer: ib.Mixer, z: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    valid = torch.ones(z.shape[:2], dtype=torch.bool) if valid is None else valid
    return mixer(z, None, (), mixer.prepare(window(valid)))


def built(spec: ib.GridConvSpec, d_model: int = 8) -> ib.Mixer:
    torch.manual_seed(0)
    return ib.build(spec, d_model=d_model).double()


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", SPECS)
def test_grid_conv_satisfies_the_contract(name, contract):
    MIXER_CONTRACTS[contract](SPECS[name])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("cells", [1, 9, 11, 20], ids=lambda cells: f"L{cells}")
def test_the_gathered_reference_equals_the_convolution_in_values_and_gradients(name, cells):
    mixer = built(SPECS[name])
    z = torch.randn(2, cells, 8, dtype=torch.float64, requires_grad=True)
    padded = torch.cat((torch.randn(2, 3, 8, dtype=torch.float64), z), dim=1)
    valid = torch.arange(cells + 3).expand(2, -1) >= 3
    leaves = [z, *mixer.parameters()]
    found, expected = mixed(mixer, padded, valid)[:, 3:], mixed(mixer, z)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("columns", "cells"), [(None, 25), (5, 25), (5, 35), (7, 21)])
def test_a_cell_reads_the_cells_around_it_and_no_others(columns, cells):
    mixer = built(ib.GridConvSpec(columns=columns))
    z = torch.randn(1, cells, 8, dtype=torch.float64)
    width = columns or 5
    before = mixed(mixer, z)
    for cell in (0, width - 1, width, cells // 2, cells - 1):
        other = z.clone()
        other[:, cell] += 1
        changed = (mixed(mixer, other) - before).abs().amax(-1)[0] > 1e-12
        row, column = divmod(cell, width)
        around = {
            (row + down) * width + column + right
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            if 0 <= row + down < cells // width and 0 <= column + right < width
        }
        assert set(changed.nonzero().flatten().tolist()) == around


def test_square_boards_of_unequal_sizes_in_one_batch_equal_the_boards_alone():
    mixer = built(ib.GridConvSpec())
    boards = [torch.randn(1, side * side, 8, dtype=torch.float64) for side in (2, 4, 3)]
    batch = torch.full((3, 16, 8), torch.nan, dtype=torch.float64)
    valid = torch.zeros(3, 16, dtype=torch.bool)
    for row, board in enumerate(boards):
        first = row * (16 - board.shape[1]) // 2  # padding on the right, none, on both sides
        batch[row, first : first + board.shape[1]] = board[0]
        valid[row, first : first + board.shape[1]] = True
    together = mixed(mixer, batch, valid)
    for row, board in enumerate(boards):
        torch.testing.assert_close(together[row, valid[row]][None], mixed(mixer, board))


def test_a_model_of_one_size_reads_boards_of_another_as_one_window():
    spec = ib.ImplicitLMSpec(vocab_size=5, d_model=8, n_layers=2, mixer=ib.GridConvSpec())
    model = ib.build(spec).eval()
    assert spec.bidirectional
    with torch.no_grad():
        for side in (4, 6):
            tokens = torch.randint(5, (2, side * side))
            assert model(tokens).logits.shape == (2, side * side, 5)
        with pytest.raises(ValueError, match="sees later tokens"):
            model(tokens, window_length=6)


def test_windows_after_committed_tokens_and_packed_documents_are_refused():
    mixer = built(ib.GridConvSpec())
    positions = torch.arange(9)[None]
    with pytest.raises(ValueError, match=r"follows 4 committed tokens.*one window"):
        mixer.prepare(ib.Window(batch_size=1, start=4, length=5, positions_BL=positions[:, 4:]))
    documents = torch.tensor([[0] * 4 + [1] * 5])
    with pytest.raises(ValueError, match=r"one board per row.*documents"):
        mixer.prepare(
            ib.Window(batch_size=1, start=0, length=9, positions_BL=positions, documents_BT=documents)
        )


def test_an_even_kernel_is_refused_with_its_place():
    with pytest.raises(SpecError, match=r"kernel_size 4 is even.*odd"):
        ib.GridConvSpec(kernel_size=4)
