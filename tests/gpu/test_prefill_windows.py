"""Windows after committed tokens on a GPU: kernels without gradients compute what plain operators do."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.mixers.mamba2 import mixer as mamba2
from implicit_blocks.ops.attention import after, attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=32, head_dim=32, n_groups=2)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


def built(name):
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(vocab_size=61, d_model=128, n_layers=2, **MIXERS[name])
    model = ib.build(spec).cuda().eval()
    with torch.no_grad():
        for block in model.backbone.blocks():  # so that the untrained map contracts
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model


def relative(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def cut(model, ids, lengths):
    """Return the outputs after windows of these lengths, with one call of the map each, and the states."""
    state = model.initial_state(len(ids))
    outputs = []
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for part in ids.split(lengths, dim=1):
            found = model(part, state=state, return_state=True, max_iterations=2, tolerance=0.0)
            state = found.state
            outputs.append(found.logits)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", [[300, 212], [64, 33, 415], [2, 510]], ids=str)
def test_mamba2_continues_as_with_plain_operators(monkeypatch, rows, lengths):
    model = built("mamba2")
    ids = torch.randint(61, (rows, 512), device="cuda")
    used = []
    fused = mamba2.mamba2_after
    monkeypatch.setattr(mamba2, "mamba2_after", lambda *a, **k: used.append(1) or fused(*a, **k))
    found, states = cut(model, ids, lengths)
    assert used
    monkeypatch.setattr(mamba2, "eligible_after", lambda *_: False)
    expected, expected_states = cut(model, ids, lengths)
    assert relative(found, expected) < 0.02
    for own, other in zip(states.layers, expected_states.layers, strict=True):
        assert relative(own.conv_BWC, other.conv_BWC) < 0.02
        assert relative(own.h_BHPN, other.h_BHPN) < 0.02


def test_training_in_windows_with_an_injection_table_equals_plain_operators(monkeypatch):
    ids = torch.randint(61, (16, 96), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for fused in (True, False):
        model = built("mamba2")
        spec = model.spec.model_copy(
            update={"window_length": 32, "stopping": ib.Stopping(tolerance=0.0, max_iterations=12)}
        )
        model.reconfigure(spec)
        if not fused:
            monkeypatch.setattr(mamba2, "eligible_after", lambda *_: False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model.train()(ids, labels=ids)
        out.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((out.logits.detach(), gradients))
    for own, other in zip(*found, strict=True):
        assert relative(own, other) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("length", "keys"), [(256, 512), (256, 1792), (512, 2560)])
def test_attention_in_pieces_equals_attention_with_a_mask(kv_heads, length, keys):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has other kernels")
    q = torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, kv_heads, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = k[:, :, :keys], v[:, :, :keys]  # as in a cache with room for more
    assert after.suits(q, k)
    found = attend(q, k, v, mask=causal_lower_right(length, keys), causal=True)
    seen = torch.arange(keys, device="cuda") <= torch.arange(keys - length, keys, device="cuda")[:, None]
    expected = attend(q.float(), k.float(), v.float(), mask=seen, causal=True, backend="torch")
    assert found.dtype == torch.bfloat16
    assert relative(found, expected) < 5e-3


@torch.no_grad()
@pytest.mark.parametrize("room", [None, 600], ids=["grows", "reserved"])
def test_windows_of_attention_equal_the_whole_sequence(room):
    model = built("attention")
    ids = torch.randint(61, (2, 512), device="cuda")
    values = []
    for lengths in ([512], [256, 256], [300, 212], [511, 1]):
        state = model.initial_state(2, max_seq_len=room)  # in float32, beside queries in bfloat16
        outputs = []
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for part in ids.split(lengths, dim=1):
                found = model(part, state=state, return_state=True, max_iterations=30, tolerance=1e-3)
                state = found.state
                outputs.append(found.logits)
        values.append(torch.cat(outputs, 1))
    for value in values[1:]:
        assert relative(value, values[0]) < 0.05


@pytest.mark.parametrize("name", MIXERS)
def test_chunks_of_a_prompt_equal_the_whole_prompt(name):
    model = built(name)
    prompt = torch.randint(61, (700,), generator=torch.Generator().manual_seed(0))
    logits = []
    for chunk in (None, 256):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            decoder = ContinuousDecoder(
                model,
                max_batch_size=2,
                max_seq_len=720,
                prefill_chunk=chunk,
                tolerance=1e-3,
                max_iterations=40,
            )
        decoder.submit(Request(prompt=prompt, max_new_tokens=2))
        logits.append(next(decoder.run()).logits)
    assert relative(logits[1], logits[0]) < 0.05
