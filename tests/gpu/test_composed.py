"""Models with prelude and coda on a GPU: captured training and decoding equal eager ones."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from tests.decoding.test_composed_decoding import ATTENTION, CASES, MAMBA2, PROMPTS, built, chosen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS = {"attention": ATTENTION, "mamba2": MAMBA2}
TRAINED = ["residual", "attractor", "diagonal", "projection", "narrow core", "scaled"]


@pytest.fixture(autouse=True)
def _exact_products():
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_captured_slots_generate_the_tokens_of_single_passes(case, layers, caplog):
    model = built(case, LAYERS[layers], device="cuda")
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=10)
    for prompt in PROMPTS:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    found = {}
    for new in decoder.run():
        found.setdefault(new.request, []).append(new.token)
    texts = list(found.values())
    assert [len(tokens) for tokens in texts] == [5] * len(PROMPTS)
    assert texts == [chosen(model, *each) for each in zip(PROMPTS, texts, strict=True)]
    assert ib.generate(model, PROMPTS, max_new_tokens=5).tokens.tolist() == texts
    assert "cannot be captured" not in caplog.text


def losses(model, ids, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("looped", [False, True], ids=["phantom", "last_loops"])
def test_training_with_captured_stacks_equals_eager_training(case, layers, looped):
    ids = torch.randint(23, (4, 32), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for captured in (False, True):
        model = built(case, LAYERS[layers], device="cuda").train()
        if looped:
            changes = {"depth": {"kind": "fixed", "loops": 3}, "gradient": {"kind": "last_loops", "loops": 2}}
            model.reconfigure(model.spec.model_copy(update=changes))
        model.capture_graphs(captured)
        found.append(losses(model, ids))
    assert found[1] == pytest.approx(found[0], rel=2e-5)
