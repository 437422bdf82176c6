"""What a model is called with: anything that doesn't fit is refused in a sentence."""

import pytest
import torch

import implicit_blocks as ib


@pytest.fixture(scope="module")
def model():
    mixer = ib.AttentionSpec(n_heads=2)
    return ib.build(ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, mixer=mixer))


@pytest.mark.parametrize("row", ["110011", "011110", "101101", "111111"])
@torch.no_grad()
def test_padding_counts_for_nothing_wherever_it_stands(row):
    spec = ib.ExplicitLMSpec(
        vocab_size=19, d_model=16, n_layers=2, mixer=ib.Mamba2Spec(d_state=4, head_dim=8)
    )
    model = ib.build(spec).double().eval()
    ids = torch.randint(19, (2, 6))
    mask = torch.tensor([[int(flag) for flag in row], [1, 0, 0, 0, 0, 1]])
    padded = model(ids, attention_mask=mask).logits
    for number, real in enumerate(mask.bool()):
        alone = model(ids[number : number + 1, real]).logits[0]
        torch.testing.assert_close(padded[number, real], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "give \\(batch, tokens\\)"),
        ({"input_ids": torch.zeros(3, 0, dtype=torch.int64)}, "neither of them 0"),
        ({"input_ids": torch.zeros(1, 3)}, "input_ids are torch.float32; give tokens, as int64"),
        ({"input_ids": torch.tensor([[0, 999]])}, "have token 999, and the model knows 0 to"),
        ({"input_ids": torch.tensor([[0, -1]])}, "have token -1, and the model knows 0 to"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.int64), "window_length": 0}, "choose at least 1"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.zeros(1, 2)},
            "labels have shape",
        ),
        ({"input_ids": [[0, 1]]}, "input_ids is a list; give a tensor"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.zeros(1, 3)},
            "labels are torch.float32; give tokens",
        ),
        (
            {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.tensor([[-100, -1]])},
            "labels have -1, and the model knows 0 to 18; -100 marks",
        ),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
            "attention_mask has shape",
        ),
        (
            {
                "input_ids": torch.zeros(2, 3, dtype=torch.int64),
                "documents": torch.tensor([[0, 1, 1], [0, 2, 1]]),
            },
            "documents of row 1 go back from 2 to 1",
        ),
        (
            {
                "input_ids": torch.zeros(1, 4, dtype=torch.int64),
                "documents": torch.tensor([[1, 9, 2, 1]]),
                "attention_mask": torch.tensor([[1, 0, 1, 1]]),
            },
            "documents of row 0 go back from 2 to 1",
        ),
        (
            {
                "input_ids": torch.zeros(1, 3, dtype=torch.int64),
                "documents": torch.zeros(1, 5, dtype=torch.int64),
                "window_length": 2,
            },
            r"documents have shape \(1, 5\), the tokens \(1, 3\)",
        ),
    ],
)
def test_bad_arguments_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_padding_may_be_said_to_be_of_any_document(model):
    ids, mask = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[0, 1, 0, 1, 0]])
    with torch.no_grad():
        messages = [
            model(ids, attention_mask=mask, documents=torch.tensor([d]))
            for d in ([7, 1, 9, 2, 0], [1] * 3 + [2] * 2)
        ]
    assert torch.equal(messages[0].logits[mask.bool()], messages[1].logits[mask.bool()])
