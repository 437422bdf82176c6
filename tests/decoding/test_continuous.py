"""Continuous decoding: each request gets the tokens of ``generate`` from calls shared by all slots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.ops.attention.slots import attend_slots


@pytest.fixture
def many():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(19, (n,), generator=generator).tolist() for n in (6, 3, 1, 8, 2)]


def counts(prompts):
    return [2 + 3 * (row % 4) for row in range(len(prompts))]


def decode(model, prompts, *, slots, sampling=None, stop_token_ids=(), **options):
    decoder = ContinuousDecoder(model, max_batch_size=slots, max_seq_len=24, **options)
    for row, (prompt, count) in enumerate(zip(prompts, counts(prompts), strict=True)):
        request = Request(
            prompt=prompt,
            max_new_tokens=count,
            sampling=sampling or Sampling(),
            seed=row,
            stop_token_ids=stop_token_ids,
        )
        assert decoder.submit(request) == row
    made = defaultdict(list)
    for new in decoder.run():
        assert not (made[new.request] and made[new.request][-1].last)
        made[new.request].append(new)
    assert all(tokens[-1].last for tokens in made.values())
    return decoder, [made[row] for row in range(len(prompts))]


def compare(model, prompts, made, *, atol=1e-5, **options):
    for row, (prompt, count) in enumerate(zip(prompts, counts(prompts), strict=True)):
        alone = ib.generate(model, [prompt], max_new_tokens=count, seed=row, return_logits=True, **options)
        length = int(alone.lengths[0])
        assert [new.token for new in made[row]] == alone.tokens[0, :length].tolist()
        logits = torch.stack([new.logits for new in made[row]])
        torch.testing.assert_close(logits, alone.logits[0, :length], atol=atol, rtol=0)
        if alone.iterations is not None and options.get("tolerance", 0) > 1e-4:
            assert [new.iterations for new in made[row]] == alone.iterations[0, :length].tolist()
            assert [new.converged for new in made[row]] == alone.converged[0, :length].tolist()


@pytest.mark.parametrize(("slots", "tolerance"), [(1, 1e-2), (3, 1e-6), (16, 1e-2)])
def test_each_request_gets_the_tokens_of_generate_alone(family, tiny_model, many, slots, tolerance):
    model = tiny_model(family)
    options = {"tolerance": tolerance, "max_in_flight": 3}
    decoder, made = decode(model, many, slots=slots, **options)
    compare(model, many, made, **options)
    assert not decoder.busy


@pytest.mark.parametrize(
    "options",
    [
        {"warm_start": True},
        {"moving_average": 0.6},
        {"damping": 0.7, "window_length": 2},
        {"max_iterations": 3},
        {"loops": 1},
        {"loops": 3, "warm_start": True},
        {"exit": ib.exits.KLExitSpec(tolerance=1e-2)},
        {"buckets": [2]},
    ],
    ids=str,
)
def test_search_options_act_as_in_generate(family, tiny_model, many, options):
    model = tiny_model(family)
    options = options if "exit" in options else {"tolerance": 1e-2, **options}
    _, made = decode(model, many, slots=4, **options)
    alone = {name: value for name, value in options.items() if name != "buckets"}
    compare(model, many, made, **alone)


def test_sampling_and_stop_tokens_apply_per_request(family, tiny_model, many):
    model = tiny_model(family)
    sampling = {"temperature": 1.5, "top_k": 8}
    _, made = decode(
        model, many, slots=3, sampling=Sampling(**sampling), stop_token_ids=(4, 7), tolerance=1e-2
    )
    compare(model, many, made, stop_token_ids=(4, 7), tolerance=1e-2, **sampling)


def test_solver_state_is_reset_for_each_token(tiny_model, many):
    evaluation = ib.AtEvaluation(
        solver=ib.AndersonSpec(memory=3), stopping=ib.StoppingOverrides(tolerance=1e-2, max_iterations=50)
    )
    for family in ("mamba2", "attention"):
        model = tiny_model(family, at_evaluation=evaluation)
        _, made = decode(model, many, slots=4)
        compare(model, many, made)


def test_explicit_models_decode_as_with_generate(family, explicit_model, many):
    model = explicit_model(family)
    decoder, made = decode(model, many, slots=4)
    compare(model, many, made)
    assert all(new.iterations is None for tokens in made for new in tokens)
    tokens = sum(counts(many)) - len(many)  # the first token of each request comes from its prompt
    assert decoder.calls >= tokens / 4


def test_slots_do_not_wait_for_each_other(family, tiny_model, many):
    """A batch waits for its slowest row at every token; here the longest slot determines the calls."""
    model = tiny_model(family)
    count = 12
    decoder = ContinuousDecoder(
        model, max_batch_size=len(many), max_seq_len=24, tolerance=1e-4, max_in_flight=1
    )
    for prompt in many:
        request = Request(prompt=prompt, max_new_tokens=count, sampling=Sampling(temperature=3.0))
        decoder.submit(replace(request, seed=decoder.submitted))
    spent = defaultdict(int)
    firsts = set()
    for new in decoder.run():
        spent[new.request] += new.iterations + 1 if new.request in firsts else 0
        firsts.add(new.request)
    assert decoder.calls == max(spent.values())
    batch = ib.generate(model, many, max_new_tokens=count, tolerance=1e-4, temperature=3.0, max_in_flight=1)
    waiting = int((batch.iterations[:, 1:].amax(0) + 1).sum())
    assert decoder.calls < waiting
    assert decoder.rows_called < decoder.calls * len(many)  # fewer active slots use smaller buckets


def test_keys_and_values_are_never_moved(tiny_model, many):
    model = tiny_model("attention")
    decoder = ContinuousDecoder(model, max_batch_size=4, max_seq_len=24)
    addresses = [(s.keys.data_ptr(), s.values.data_ptr()) for s in decoder.states]
    for prompt in many:
        decoder.submit(Request(prompt=prompt, max_new_tokens=3))
    list(decoder.run())
    assert [(s.keys.data_ptr(), s.values.data_ptr()) for s in decoder.states] == addresses


@pytest.mark.parametrize("grouped", [1, 2])
@pytest.mark.parametrize("rows", [None, [3, 0], [2]])
def test_slot_attention_equals_attention_per_slot(grouped, rows):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 4, 2, 7, 5, generator=generator).unbind(0)
    lengths = torch.tensor([7, 1, 4, 2])
    slots = torch.arange(4) if rows is None else torch.tensor(rows)
    q = torch.randn(len(slots), 2 * grouped, 5, generator=generator)
    given = {"rows_R": None if rows is None else slots, "lengths_R": lengths[slots]}
    found = {
        backend: attend_slots(q, keys, values, backend=backend, **given) for backend in ("each", "masked")
    }
    for row, slot in enumerate(slots.tolist()):
        k, v = (t[slot, :, : lengths[slot]].repeat_interleave(grouped, 0) for t in (keys, values))
        weights = (torch.einsum("hp,htp->ht", q[row], k) / 5**0.5).softmax(-1)
        expected = torch.einsum("ht,htp->hp", weights, v)
        for backend, y in found.items():
            torch.testing.assert_close(y[row], expected, msg=backend)
    with pytest.raises(ValueError, match="each, masked"):
        attend_slots(q, keys, values, backend="flash", **given)


def test_a_diverging_slot_is_reported_and_does_not_affect_others():
    device, dtype = torch.device("cpu"), torch.float64
    stopping = ib.Stopping(tolerance=1e-8, max_iterations=200)
    search = SlotSearch(ib.Picard(), stopping, slots=3, width=4, device=device, dtype=dtype)
    slots = torch.arange(3)
    search.begin(slots, torch.ones(3, 4, dtype=dtype))
    slopes = torch.tensor([[0.5], [1e200], [0.9]], dtype=dtype)

    def f(z):
        return slopes * z + 1

    while not search.done.all():
        search.take(slots, f(search.z), ~search.done, f)
    alone = ib.Search(solver=ib.Picard(), stopping=stopping)(f, torch.ones(3, 4, dtype=dtype))
    assert torch.equal(search.converged, alone.converged)
    assert torch.equal(search.iterations, alone.iterations)
    assert torch.equal(search.z, alone.z)


def test_invalid_requests_and_decoder_options_are_refused(tiny_model, many):
    model = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"window_length .*0"):
        ContinuousDecoder(model, max_batch_size=2, max_seq_len=8, window_length=0)
    with pytest.raises(ValueError, match=r"max_batch_size .*0"):
        ContinuousDecoder(model, max_batch_size=0, max_seq_len=8)
    with pytest.raises(ValueError, match=r"buckets .*\[2, 9\]"):
        ContinuousDecoder(model, max_batch_size=2, max_seq_len=8, buckets=[9])
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=8)
    with pytest.raises(ValueError, match=r"prompt 0 .*6 tokens.* 5 .*max_seq_len 8"):
        decoder.submit(Request(prompt=many[0], max_new_tokens=3))
    with pytest.raises(ValueError, match=r"prompt 0 .*shape"):
        decoder.submit(Request(prompt=[], max_new_tokens=3))
    with pytest.raises(ValueError, match=r"19.* 0 to 18"):
        decoder.submit(Request(prompt=[19], max_new_tokens=3))
    with pytest.raises(ValueError, match=r"max_new_tokens .*0"):
        decoder.submit(Request(prompt=[1], max_new_tokens=0))
    with pytest.raises(ValueError, match=r"max_new_tokens .*8.*max_seq_len 8"):
        decoder.submit(Request(prompt=[1], max_new_tokens=8))
    with pytest.raises(ValueError, match=r"stop_token_ids .*-1.* 0 to 18"):
        decoder.submit(Request(prompt=[1], max_new_tokens=1, stop_token_ids=[-1]))
    with pytest.raises(ValueError, match=r"seed .*None"):
        decoder.submit(Request(prompt=[1], max_new_tokens=1, seed=None))
    assert not decoder.busy
    with pytest.raises(ValueError, match="training mode"):
        ContinuousDecoder(model.train(), max_batch_size=2, max_seq_len=8)
