"""Arguments of a model's forward pass: invalid ones are refused, with the name and the value."""

import pytest
import torch

import implicit_blocks as ib


@pytest.fixture(scope="module")
def model():
    mixer = ib.AttentionSpec(n_heads=2)
    return ib.build(ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, mixer=mixer))


@pytest.mark.parametrize("row", ["110011", "011110", "101101", "111111"])
@torch.no_grad()
def test_padding_at_any_position_does_not_change_logits(row):
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
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"\(batch, tokens\)"),
        ({"input_ids": torch.zeros(3, 0, dtype=torch.int64)}, r"\(3, 0\)"),
        ({"input_ids": torch.zeros(1, 3)}, "input_ids .*float32.*int64"),
        ({"input_ids": torch.tensor([[0, 999]])}, "token 999.* 0 to 18"),
        ({"input_ids": torch.tensor([[0, -1]])}, "token -1.* 0 to 18"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "window_length": 0},
            "window_length .*0",
        ),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.zeros(1, 2)},
            "labels .*shape",
        ),
        ({"input_ids": [[0, 1]]}, "input_ids .*list.*tensor"),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": torch.zeros(1, 3)},
            "labels .*float32",
        ),
        (
            {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "labels": torch.tensor([[-100, -1]])},
            "labels .*-1.* 0 to 18.*-100",
        ),
        (
            {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
            "attention_mask .*shape",
        ),
        (
            {
                "input_ids": torch.zeros(2, 3, dtype=torch.int64),
                "documents": torch.tensor([[0, 1, 1], [0, 2, 1]]),
            },
            "documents .*row 1 .*from 2 to 1",
        ),
        (
            {
                "input_ids": torch.zeros(1, 4, dtype=torch.int64),
                "documents": torch.tensor([[1, 9, 2, 1]]),
                "attention_mask": torch.tensor([[1, 0, 1, 1]]),
            },
            "documents .*row 0 .*from 2 to 1",
        ),
        (
            {
                "input_ids": torch.zeros(1, 3, dtype=torch.int64),
                "documents": torch.zeros(1, 5, dtype=torch.int64),
                "window_length": 2,
            },
            r"documents .*\(1, 5\).*\(1, 3\)",
        ),
    ],
)
def test_invalid_forward_arguments_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_document_numbers_of_padding_are_ignored(model):
    ids, mask = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[0, 1, 0, 1, 0]])
    with torch.no_grad():
        outputs = [
            model(ids, attention_mask=mask, documents=torch.tensor([d]))
            for d in ([7, 1, 9, 2, 0], [1] * 3 + [2] * 2)
        ]
    assert torch.equal(outputs[0].logits[mask.bool()], outputs[1].logits[mask.bool()])
