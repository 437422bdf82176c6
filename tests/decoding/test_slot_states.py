"""Slot states: when they are written, and in which dtype they are stored."""

from __future__ import annotations

import pytest
import torch

from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.ops.attention.slots import attend_slots
from implicit_blocks.ops.quantization import eight_bits


def committed(decoder, slot):
    """Return the length of a slot and a copy of its committed state."""
    length = int(decoder.batch.lengths_S[slot])
    kept = []
    for states in decoder.states:
        if hasattr(states, "keys"):
            kept += [states.keys[slot, :, :length], states.values[slot, :, :length]]
        else:
            taps = states.taps_SWC[slot].roll(-int(states.next_S[slot]), 0)
            kept += [states.h_SHPN[slot], taps[1:]]  # the first entry belongs to the next token
    return length, [t.clone() for t in kept]


def test_slot_states_change_only_when_a_token_is_committed(family, tiny_model):
    decoder = ContinuousDecoder(
        tiny_model(family), max_batch_size=3, max_seq_len=24, tolerance=1e-3, max_in_flight=1
    )
    for prompt in ([1, 2, 3], [4], [5, 6, 7, 8, 9]):
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    decoder.step()
    before = [committed(decoder, slot) for slot in range(3)]
    commits = searching = 0
    while decoder.busy:
        decoder.step()
        for slot, text in enumerate(decoder.texts):
            if text is None:
                continue
            after = committed(decoder, slot)
            if after[0] == before[slot][0]:
                searching += 1
                assert all(map(torch.equal, after[1], before[slot][1]))
            else:
                commits += 1
                assert after[0] == before[slot][0] + 1
                assert not any(map(torch.equal, after[1], before[slot][1]))
            before[slot] = after
    assert commits >= 3 * 3
    assert searching > 2 * commits


@pytest.mark.parametrize("slots", [1, 4])
def test_int8_keys_and_values_stay_close_to_float32(tiny_model, prompts, slots):
    made, kept = {}, {}
    for dtype in (None, torch.int8):
        decoder = ContinuousDecoder(
            tiny_model("attention"), max_batch_size=slots, max_seq_len=16, state_dtype=dtype
        )
        for prompt in prompts:
            decoder.submit(Request(prompt=prompt, max_new_tokens=3))
        decoder.step()
        length = len(prompts[0])
        kept[dtype] = decoder.states[0].keys[0, :, :length].clone(), decoder.states[0]
        new = sorted([*decoder.run()], key=lambda new: new.request)
        made[dtype] = torch.stack([one.logits for one in new])
        assert all(one.converged for one in new)  # the search does not quantize the current token's own key
    states = kept[torch.int8][1]
    assert states.keys.dtype == states.values.dtype == torch.int8
    assert torch.equal(kept[torch.int8][0], eight_bits(kept[None][0]).codes)
    error = (made[torch.int8] - made[None]).norm() / made[None].norm()
    assert 0 < error < 1e-2


def test_int8_quantization_error_is_within_half_a_step():
    x = torch.randn(50, 64) * torch.logspace(-6, 6, 50)[:, None]
    found = eight_bits(x)
    error = (found.wide(torch.float64) - x.double()).abs().amax(-1)
    assert (error <= x.double().abs().amax(-1) / 253.9).all()
    zeros = eight_bits(torch.zeros(3, 8))
    assert torch.equal(zeros.wide(torch.float32), torch.zeros(3, 8))


@pytest.mark.parametrize("rows", [None, [3, 0]])
def test_slot_attention_reads_int8_keys_and_values(rows):
    generator = torch.Generator().manual_seed(0)
    keys, values = (eight_bits(t) for t in torch.randn(2, 4, 2, 7, 6, generator=generator).unbind(0))
    lengths = torch.tensor([7, 1, 4, 2])
    slots = torch.arange(4) if rows is None else torch.tensor(rows)
    q = torch.randn(len(slots), 4, 6, generator=generator)
    where = {"rows_R": None if rows is None else slots, "lengths_R": lengths[slots]}
    wide = attend_slots(q, keys.wide(q.dtype), values.wide(q.dtype), **where)
    scales = {"key_scales_SKC": keys.scales, "value_scales_SKC": values.scales}
    for backend in ("each", "masked"):
        found = attend_slots(q, keys.codes, values.codes, backend=backend, **scales, **where)
        torch.testing.assert_close(found, wide, msg=backend)
    own = torch.randn(2, len(slots), 2, 6, generator=generator).unbind()
    seen = [kept.wide(q.dtype) for kept in (keys, values)]
    for whole, new in zip(seen, own, strict=True):
        whole[slots, :, lengths[slots] - 1] = new
    wide = attend_slots(q, *seen, **where)
    scales |= {"own_keys_RKP": own[0], "own_values_RKP": own[1]}
    for backend in ("each", "masked"):
        found = attend_slots(q, keys.codes, values.codes, backend=backend, **scales, **where)
        torch.testing.assert_close(found, wide, msg=backend)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["unquantized", "int8"])
def test_a_new_request_does_not_see_the_previous_keys_of_its_slot(tiny_model, dtype):
    mixer = tiny_model("attention").backbone.blocks()[0].mixer
    states = mixer.slots(2, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=6)
    if dtype is not None:
        states.set_dtype(dtype)
    for kept in (states.keys, states.values) if dtype is None else (states.key_scales, states.value_scales):
        kept[1] = torch.nan  # left by an overflow in 16 bits
    state = states.prefill(1)
    shape = (1, states.keys.shape[1], 2, states.keys.shape[3])
    state = type(state)(torch.ones(shape), torch.ones(shape), 2)
    states.commit_rows(mixer, [1], torch.tensor([1]), state)
    seen = states.gather(None, torch.tensor([1, 2]))
    q = torch.randn(2, states.keys.shape[1], states.keys.shape[3])
    for backend in ("each", "masked"):
        y = attend_slots(
            q,
            seen.keys_SKCP,
            seen.values_SKCP,
            rows_R=None,
            lengths_R=seen.lengths_R,
            key_scales_SKC=seen.key_scales_SKC,
            value_scales_SKC=seen.value_scales_SKC,
            backend=backend,
        )
        torch.testing.assert_close(y[1], torch.ones_like(y[1]), msg=backend)


def test_unsupported_state_dtypes_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"Mamba2Slots.*torch.int8"):
        ContinuousDecoder(tiny_model("mamba2"), max_batch_size=1, max_seq_len=8, state_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"torch.int16.*torch.int8"):
        ContinuousDecoder(tiny_model("attention"), max_batch_size=1, max_seq_len=8, state_dtype=torch.int16)
