"""State between windows: truncation, selected rows and positions, with padding and documents."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.windows import SequenceState, check_inputs

VALID = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 0, 0]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0]])


def attention_model() -> ib.ImplicitLM:
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(vocab_size=13, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    return ib.ImplicitLM(spec).double().eval()


@pytest.mark.parametrize("kept", [6, 4, 1])
@pytest.mark.parametrize("parts", [{}, {"attention_mask": VALID}, {"documents": DOCUMENTS}], ids=str)
@torch.no_grad()
def test_a_truncated_state_equals_the_state_of_the_shorter_sequence(parts, kept):
    model, ids = attention_model(), torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(1))
    whole = model(ids, **parts, return_state=True).state
    first = {name: value[:, :kept] for name, value in parts.items()}
    expected = model(ids[:, :kept], **first, return_state=True).state
    found = whole.truncate(7 - kept, model.state_blocks())
    assert found.length == expected.length == kept
    assert torch.equal(found.next_position.expand(3), expected.next_position.expand(3))
    for name in ("valid_BT", "documents_BT"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None) or bool(ours.all())  # without a mask all tokens are real
    following = torch.randint(0, 13, (3, 2), generator=torch.Generator().manual_seed(2))
    after = {
        name: value[:, kept - 1 :][:, :1].expand(-1, 2)
        for name, value in first.items()
        if name == "documents"
    }
    torch.testing.assert_close(
        model(following, state=found, **after).logits, model(following, state=expected, **after).logits
    )


def test_truncating_more_tokens_than_the_state_has_is_refused():
    model = attention_model()
    state = model(torch.zeros(1, 3, dtype=torch.int64), return_state=True).state
    assert state.truncate(3, model.state_blocks()).length == 0
    for tokens in (4, -1):
        with pytest.raises(ValueError, match=rf"{tokens} tokens.* 3\b"):
            state.truncate(tokens, model.state_blocks())


def test_positions_count_only_real_tokens_across_windows():
    state = attention_model().initial_state(2)
    first = state.window(3, valid_BL=None, documents_BL=None, dtype=torch.float64)
    assert first.positions_BL.expand(2, 3).tolist() == [[0, 1, 2]] * 2
    state = state.after(first, state.layers)
    valid = torch.tensor([[False, True, True], [True, False, False]])
    second = state.window(3, valid_BL=valid, documents_BL=None, dtype=torch.float64)
    assert second.positions_BL[valid].tolist() == [3, 4, 3]
    state = state.after(second, state.layers)
    third = state.window(2, valid_BL=None, documents_BL=None, dtype=torch.float64)
    assert third.positions_BL.tolist() == [[5, 6], [4, 5]]


def test_a_row_of_padding_only_has_no_warm_start():
    state = attention_model().initial_state(2)
    valid = torch.tensor([[True, True], [False, False]])
    window = state.window(2, valid_BL=valid, documents_BL=None, dtype=torch.float64)
    state = state.after(window, state.layers, torch.full((2, 2, 16), 7.0))
    window = state.window(3, valid_BL=None, documents_BL=None, dtype=torch.float64)
    warm = state.warm_start(window, torch.full((2, 3, 16), -1.0))
    assert warm[0].eq(7.0).all()
    assert warm[1].eq(-1.0).all()


def test_the_next_window_continues_the_document_of_the_last_real_token():
    state = attention_model().initial_state(2)
    valid = torch.tensor([[True, True, False], [False, True, True]])
    documents = torch.tensor([[0, 1, 2], [0, 1, 1]])
    window = state.window(3, valid_BL=valid, documents_BL=documents, dtype=torch.float64)
    state = state.after(window, state.layers, torch.full((2, 3, 16), 7.0))
    window = state.window(2, valid_BL=None, documents_BL=None, dtype=torch.float64)
    assert window.documents_BL.tolist() == [[1, 1], [1, 1]]
    assert state.warm_start(window, torch.full((2, 2, 16), -1.0)).eq(7.0).all()


@pytest.mark.parametrize("parts", [{"attention_mask": VALID}, {"documents": DOCUMENTS}], ids=str)
@torch.no_grad()
def test_selected_rows_continue_as_in_the_full_batch(parts):
    model, ids = attention_model(), torch.randint(0, 13, (3, 9), generator=torch.Generator().manual_seed(1))
    state = model(ids[:, :7], **parts, return_state=True).state
    following = {name: value[:, -1:].expand(-1, 2) for name, value in parts.items()}
    whole = model(ids[:, 7:], state=state, **following).logits
    rows = torch.tensor([2, 0, 2])
    chosen = state.select_rows(rows, model.state_blocks())
    following = {name: value[rows] for name, value in following.items()}
    torch.testing.assert_close(model(ids[rows, 7:], state=chosen, **following).logits, whole[rows])


@pytest.mark.parametrize(
    ("mask", "trailing"),
    [
        ([[1, 1, 0], [1, 1, 1]], True),
        ([[0, 1, 1], [1, 1, 1]], False),
        ([[1, 0, 1], [1, 1, 0]], False),
        ([[1, 1, 1], [1, 1, 1]], False),
    ],
)
def test_padding_after_all_real_tokens_is_recognized(mask, trailing):
    x_BLD, state = torch.zeros(2, 3, 4), SequenceState(2, 0, torch.zeros(1, dtype=torch.int64), ())
    inputs = check_inputs(
        x_BLD, ids_BL=None, attention_mask=torch.tensor(mask), documents=None, state=None, window_length=None
    )
    assert inputs.trailing is trailing

    def window(state):
        more = {"documents_BL": None, "gaps": inputs.gaps, "trailing": inputs.trailing}
        return state.window(3, valid_BL=inputs.valid_BL, dtype=x_BLD.dtype, **more)

    assert window(state).trailing is trailing
    assert not window(state).cut(1, 3).trailing
    assert not window(state.after(window(state), ())).trailing
