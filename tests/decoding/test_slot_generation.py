"""``generate`` through slots, as on a GPU: the tokens and reports of a batch, without waiting rows."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, generation


@pytest.fixture
def by_slots(monkeypatch):
    """Return a ``generate`` that uses slots on the CPU too."""

    def generate(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(generation, "uses_slots", lambda model: True)
            return ib.generate(*arguments, **options)

    return generate


@pytest.mark.parametrize(
    "options",
    [{"stop_token_ids": (4, 7), "pad_token": -1}, {"temperature": 1.5, "top_k": 6, "max_length": 11}],
    ids=["stops", "draws"],
)
def test_slot_generation_equals_batch_generation(family, tiny_model, prompts, by_slots, options):
    model = tiny_model(family)
    options = options | {"max_new_tokens": 5, "tolerance": 1e-2, "return_logits": True}
    found, expected = (make(model, prompts, **options) for make in (by_slots, ib.generate))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.stopped, expected.stopped)
    assert torch.equal(found.iterations, expected.iterations)
    assert torch.equal(found.converged, expected.converged)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.residual, expected.residual, atol=1e-4, rtol=0)
    for name in ("iterations", "converged", "diverged", "token_iterations", "token_converged"):
        assert torch.equal(getattr(found.prompt, name), getattr(expected.prompt, name)), name
    for row, prompt in enumerate(prompts):
        real = slice(len(prompt))
        torch.testing.assert_close(found.prompt.z[row, real], expected.prompt.z[row, real], atol=1e-5, rtol=0)


def test_slot_generation_of_explicit_models_equals_batch_generation(family, explicit_model, by_slots):
    model = explicit_model(family)
    ids = torch.randint(19, (3, 5), generator=torch.Generator().manual_seed(1))
    found, expected = (make(model, ids, max_new_tokens=4) for make in (by_slots, ib.generate))
    assert torch.equal(found.tokens, expected.tokens)
    assert found.iterations is None
    assert found.prompt is None


def test_bfloat16_recurrent_states_stay_close_to_float32(tiny_model):
    made = {}
    for dtype in (None, torch.bfloat16):
        decoder = ContinuousDecoder(tiny_model("mamba2"), max_batch_size=1, max_seq_len=12, state_dtype=dtype)
        decoder.submit(Request(prompt=[3, 1, 4, 1, 5], max_new_tokens=3))
        made[dtype] = torch.stack([new.logits for new in decoder.run()])
        assert {s.h_SHPN.dtype for s in decoder.states} == {dtype or torch.float32}
    error = (made[torch.bfloat16] - made[None]).norm() / made[None].norm()
    assert 0 < error < 1e-2
