"""Wavefront decoding: tokens in flight give the texts of sequential decoding, in fewer calls."""

from __future__ import annotations

import logging
from collections import defaultdict
from unittest import mock

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots import generation as slot_generation
from implicit_blocks.decoding.slots import in_flight
from implicit_blocks.decoding.slots.wavefront import Wavefront
from implicit_blocks.ops.attention import slots as slot_attention

COUNT = 8
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6], [3, 3, 1]]
LAYERS = {
    "attention": {
        "mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2),
        "mlp": ib.SwiGLUSpec(d_ff=48),
    },
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=8)},
}
SANDWICH = {"prelude": {"n_layers": 1}, "coda": {"n_layers": 1}}
COMPOSED = {
    "residual": {"injection": {"kind": "residual", "gate_init": 0.3}, **SANDWICH},
    "prelude": {"injection": {"kind": "attractor"}, "prelude": {"n_layers": 1}, "core_residual": True},
    "narrow core": {
        "injection": {"kind": "diagonal"},
        "core_d_model": 16,
        "core_projection": True,
        **SANDWICH,
    },
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.5),
    "top-k-and-p": Sampling(temperature=2.0, top_k=8, top_p=0.9),
}


def decode(
    model, prompts, *, tokens, sampling=None, count=COUNT, slots=2, requests=None, late=False, **options
):
    """Return the decoder and the new tokens of each request; ``late``: read as on a GPU."""
    decoder = ContinuousDecoder(model, max_batch_size=slots, max_seq_len=32, max_in_flight=tokens, **options)
    decoder.on_gpu |= late
    for row, prompt in enumerate(prompts):
        own = {} if requests is None else requests[row]
        request = Request(
            prompt=prompt, max_new_tokens=count, sampling=sampling or Sampling(), seed=row, **own
        )
        decoder.submit(request)
    found = defaultdict(list)
    for new in decoder.run():
        found[new.request].append(new)
    return decoder, [found[row] for row in range(len(prompts))]


def check_equal(found, expected, *, atol):
    for news, olds in zip(found, expected, strict=True):
        assert [new.token for new in news] == [old.token for old in olds]
        assert [new.last for new in news] == [old.last for old in olds]
        assert [new.converged for new in news] == [old.converged for old in olds]
        for new, old in zip(news, olds, strict=True):
            torch.testing.assert_close(new.logits, old.logits, atol=atol, rtol=0)


def check_texts(model, prompts, *, tokens, atol=5e-3, **options):
    """Compare the texts with those of sequential decoding; return both decoders."""
    flying, found = decode(model, prompts, tokens=tokens, **options)
    one_by_one, expected = decode(model, prompts, tokens=1, **options)
    check_equal(found, expected, atol=atol)
    assert flying.wavefront is not None
    assert one_by_one.wavefront is None
    return flying, one_by_one


def composed(case, family):
    """Return a model with a prelude, a coda or both."""
    torch.manual_seed(0)
    stopping = {"tolerance": 1e-5, "max_iterations": 200}
    spec = ib.ImplicitLMSpec(
        vocab_size=23,
        d_model=32,
        n_layers=1,
        weight_norm=False,
        at_evaluation={"stopping": stopping, "solver": {"kind": "picard"}},
        **LAYERS[family],
        **COMPOSED[case],
    )
    model = ib.build(spec).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model


def of_mixer(family, tiny_model):
    """Return a model of a mixer, or of a hybrid of all."""
    if family == "hybrid":
        parts = (ib.AttentionSpec(n_heads=4), ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4))
        torch.manual_seed(0)
        stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=100)
        spec = ib.ImplicitLMSpec(
            vocab_size=19,
            d_model=16,
            n_layers=1,
            mixer=ib.HybridSpec(mixers=parts),
            at_evaluation=ib.AtEvaluation(stopping=stopping),
        )
        model = ib.build(spec).eval()
        with torch.no_grad():
            model.embedding.weight.mul_(20)
            for mixer in model.backbone.blocks()[0].mixer.mixers:
                mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
        return model
    return tiny_model(family, tolerance=1e-4)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("mamba2", "greedy"), ("attention", "top-k-and-p"), ("hybrid", "sampled"), ("attention", "sampled")],
)
def test_the_texts_are_those_of_sequential_decoding(family, tiny_model, prompts, sampling):
    model = of_mixer(family, tiny_model)
    flying, one_by_one = check_texts(model, prompts, tokens=4, sampling=SAMPLINGS[sampling])
    assert flying.calls < one_by_one.calls
    assert 1 < flying.statistics.tokens_in_flight <= 4
    assert one_by_one.statistics.restarts == 0


def test_predictions_are_as_near_to_the_fixed_point_as_those_of_sequential_decoding(
    family, tiny_model, prompts
):
    """The logits are those of the second call within the tolerance, as in sequential decoding."""
    undamped = ib.AtEvaluation(solver=ib.PicardSpec(), stopping=ib.StoppingOverrides(max_iterations=200))
    model = tiny_model(family, at_evaluation=undamped)
    exact, flown, one_by_one = (
        decode(model, prompts, tokens=tokens, tolerance=tolerance)[1]
        for tokens, tolerance in ((1, 1e-6), (4, 3e-2), (1, 3e-2))
    )

    def error(found):
        total = 0.0
        for news, olds in zip(found, exact, strict=True):
            for new, old in zip(news[1:], olds[1:], strict=True):
                total += float((new.logits - old.logits).norm())
                if new.token != old.token:
                    break
        return total

    assert 0 < error(flown) <= 1.2 * error(one_by_one)


@pytest.mark.parametrize("case", COMPOSED)
def test_prelude_and_coda_take_provisional_tokens(case, family):
    check_texts(composed(case, family), PROMPTS[:3], tokens=3, count=5)


def test_generate_decodes_one_token_after_the_other_unless_asked(family, tiny_model, prompts):
    model = tiny_model(family, tolerance=1e-4)
    found = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True, max_in_flight=8)
    expected = ib.generate(model, prompts, max_new_tokens=COUNT, return_logits=True)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, atol=5e-3, rtol=0)
    assert found.statistics.tokens_in_flight > 1
    assert found.statistics.calls < expected.statistics.calls
    assert expected.statistics.tokens_in_flight == 1


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_text_ends_at_a_stop_token_inside_a_wavefront(family, tiny_model, prompts, late):
    model = tiny_model(family, tolerance=1e-4)
    _, free = decode(model, prompts, tokens=1, sampling=SAMPLINGS["sampled"])
    stops = sorted({news[index].token for news, index in zip(free, (2, 5, 7, 3), strict=True)})
    _, found = decode(
        model,
        prompts,
        tokens=5,
        sampling=SAMPLINGS["sampled"],
        requests=[{"stop_token_ids": stops}] * len(prompts),
        late=late,
    )
    for news, olds in zip(found, free, strict=True):
        end = next((i + 1 for i, old in enumerate(olds) if old.token in stops), COUNT)
        assert [new.token for new in news] == [old.token for old in olds[:end]]
        assert [new.last for new in news] == [False] * (end - 1) + [True]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_on_a_gpu_the_host_reads_a_call_while_the_next_one_runs(
    family, tiny_model, prompts, sampling, monkeypatch
):
    # As on a GPU: eager calls have fewer tokens while a text has few in flight, and products round by size.
    monkeypatch.setattr(Wavefront, "_width", lambda self, rows_R: self.tokens)
    model = tiny_model(family, tolerance=1e-4)
    expected = decode(model, prompts, tokens=4, sampling=sampling)[1]
    decoder, found = decode(model, prompts, tokens=4, sampling=sampling, late=True)
    check_equal(found, expected, atol=0.0)
    decoder.submit(Request(prompt=[1, 2, 3], max_new_tokens=COUNT, sampling=sampling))
    calls = decoder.calls
    while decoder.busy:
        decoder.step()
        if decoder.calls > calls:  # the report of this call is not read
            assert decoder._chosen[-1].call == decoder.calls
            calls = decoder.calls
    assert not decoder._chosen


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_a_cancelled_text_frees_its_slot_and_changes_no_other(family, tiny_model, prompts, late):
    model = tiny_model(family, tolerance=1e-4)
    _, expected = decode(model, prompts, tokens=1)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=32, max_in_flight=4)
    decoder.on_gpu |= late
    for row, prompt in enumerate(prompts):
        decoder.submit(Request(prompt=prompt, max_new_tokens=COUNT, seed=row))
    found = defaultdict(list)
    while decoder.busy:
        for new in decoder.step():
            found[new.request].append(new)
        if decoder.calls == 3:
            assert decoder.cancel(0)
            assert not decoder.cancel(0)
    assert len(found[0]) < COUNT
    check_equal([found[row] for row in (1, 2, 3)], expected[1:], atol=5e-3)


@pytest.mark.parametrize("limit", [1, 4])
def test_a_token_that_misses_the_tolerance_is_that_of_sequential_decoding(family, tiny_model, prompts, limit):
    """Its second search, as the head of its window, takes the steps of the sequential one."""
    model = tiny_model(family)
    options = {"tolerance": 1e-7, "max_iterations": limit}
    flying, _ = check_texts(model, prompts, tokens=4, atol=1e-5, count=5, **options)
    assert not limit > 1 or flying.statistics.restarts > 0


def test_a_diverging_token_leaves_the_others_finite(tiny_model, prompts):
    model = tiny_model("attention", tolerance=1e-4)
    inject = type(model).inject

    def large(self, x_BLD, weights, **options):
        u, e = inject(self, x_BLD, weights, **options)
        return u.masked_fill((x_BLD == self.embedding.weight[7]).all(-1, keepdim=True), 1e38), e

    texts = [[1, 2, 3], [2, 7], [4]]
    with mock.patch.object(type(model), "inject", large):
        _, found = decode(model, texts, tokens=4, sampling=SAMPLINGS["sampled"])
        _, expected = decode(model, texts, tokens=1, sampling=SAMPLINGS["sampled"])
    assert all(new.logits.isfinite().all() for news in found for new in news)
    for row in (0, 2):
        if all(old.token != 7 for old in expected[row]):
            check_equal([found[row]], [expected[row]], atol=5e-3)
    assert not all(new.converged for new in found[1])


OPTIONS = {
    "random start": {"z_init": ib.NormalStartSpec(std=0.5, seed=3)},
    "Anderson": {"at": {"solver": ib.AndersonSpec(memory=3)}},
    "damped": {"at": {"solver": ib.PicardSpec(damping=0.7)}},
    "undamped first": {"at": {"solver": ib.PicardSpec(damping=0.7, undamped_first=True)}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_starts_and_solvers_apply_to_tokens_in_flight(option, tiny_model, prompts):
    changes = dict(OPTIONS[option])
    stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=200)
    evaluation = ib.AtEvaluation(stopping=stopping, **changes.pop("at", {}))
    model = tiny_model("mamba2", at_evaluation=evaluation, **changes)
    check_texts(model, prompts[:2], tokens=4, count=6, atol=5e-3)


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_requests_have_their_own_limits_in_flight(family, tiny_model, prompts, late):
    """Each text is that of sequential decoding by its limits, also with the tolerance 0, which ends none."""
    model, usual = tiny_model(family), {"tolerance": 1e-4}
    own = [
        {"tolerance": 1e-3},
        {},
        {"max_iterations": 2, "tolerance": 1e-7},
        {"tolerance": 0.0, "max_iterations": 9},
    ]
    flying, found = decode(model, prompts, tokens=4, requests=own, late=late, **usual)
    assert flying.statistics.tokens_in_flight > 1
    for prompt, limits, news in zip(prompts, own, found, strict=True):
        _, expected = decode(model, [prompt], tokens=1, **(usual | limits))
        check_equal([news], expected, atol=5e-3)
    for row, limit in ((2, 2), (3, 9)):
        assert not any(new.converged for new in found[row])
        assert {new.iterations for new in found[row]} == {limit}
    assert max(new.residual for new in found[1]) <= 1e-4
    assert max(new.residual for new in found[0]) > 1e-4


def test_provisional_tokens_change_nothing_committed(family, tiny_model, prompts):
    """The state after a text is that of its tokens alone."""
    model = tiny_model(family, tolerance=1e-5)
    states = {}
    for tokens in (1, 4):
        decoder = ContinuousDecoder(model, max_batch_size=1, max_seq_len=32, max_in_flight=tokens)
        decoder.submit(Request(prompt=prompts[0], max_new_tokens=COUNT, sampling=SAMPLINGS["sampled"]))
        while decoder.batch.lengths_S[0] < len(prompts[0]) + 4:
            decoder.step()
        length = int(decoder.batch.lengths_S[0])
        states[tokens] = length, [each.gather(None, decoder.batch.lengths_S) for each in decoder.states]
    if family == "mamba2":
        assert states[1][0] <= states[4][0]
    kept = states[1][0]
    for one, flown in zip(states[1][1], states[4][1], strict=True):
        if family == "attention":
            torch.testing.assert_close(
                one.keys_SKCP[:, :, :kept], flown.keys_SKCP[:, :, :kept], atol=1e-3, rtol=0
            )
        elif states[4][0] == kept:
            torch.testing.assert_close(one.h_BHPN, flown.h_BHPN, atol=1e-3, rtol=0)
            torch.testing.assert_close(one.conv_BWC, flown.conv_BWC, atol=1e-3, rtol=0)


class Replayed:
    """Replaces captured graphs on the CPU: procedures of fixed shapes that read no value."""

    def replay(self, name, slots):
        return False

    def do(self, name, slots, procedure):
        def refuse(*_, **__):
            raise AssertionError(f"{name} reads a value of the device")

        with mock.patch.multiple(
            torch.Tensor, item=refuse, tolist=refuse, __bool__=refuse, __int__=refuse, nonzero=refuse
        ):
            procedure()


@pytest.mark.parametrize("model_of", ["mamba2", "attention", "sandwich"])
def test_captured_calls_have_fixed_shapes_and_read_no_value(model_of, tiny_model, prompts, monkeypatch):
    masked = slot_attention.attend_slot_windows
    monkeypatch.setattr(
        "implicit_blocks.mixers.attention.mixer.attend_slot_windows",
        lambda *args, **options: masked(*args, backend="masked", **options),
    )
    sandwich = model_of == "sandwich"
    model = composed("residual", "attention") if sandwich else tiny_model(model_of, tolerance=1e-4)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=32, max_in_flight=4)
    decoder.batch.captured = Replayed()
    for row, prompt in enumerate(prompts):
        decoder.submit(Request(prompt=prompt, max_new_tokens=6, sampling=SAMPLINGS["sampled"], seed=row))
    found = defaultdict(list)
    with mock.patch.object(decoder.batch, "predict", lambda size: _predict(decoder.batch, size)):
        for new in decoder.run():
            found[new.request].append(new)
    _, expected = decode(model, prompts, tokens=1, count=6, sampling=SAMPLINGS["sampled"])
    check_equal([found[row] for row in range(len(prompts))], expected, atol=5e-3)


def _predict(batch, size):
    batch._predict(batch.places("choose", size))


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("warm_start", {"warm_start": True}),
        ("moving_average", {"moving_average": 0.6}),
        ("fixed number of loops", {"loops": 3}),
        ("tolerance 0", {"tolerance": 0.0, "max_iterations": 4}),
        ("exit criterion", {"exit": ib.exits.SecondDifferenceExitSpec()}),
        ("Mamba2Slots", {"state_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_unsupported_options_decode_sequentially_and_say_so_once(
    reason, options, tiny_model, prompts, caplog
):
    in_flight.report_sequential.cache_clear()
    model = tiny_model("mamba2", tolerance=1e-2)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            decoder, found = decode(model, prompts[:1], tokens=4, count=2, **options)
    assert decoder.wavefront is None
    assert len(found[0]) == 2
    assert [reason in record.message for record in caplog.records if "in flight" in record.message] == [True]


def test_models_with_a_state_per_loop_decode_sequentially(prompts):
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=19,
        d_model=16,
        n_layers=1,
        mixer=ib.AttentionSpec(n_heads=2),
        state_policy="per_loop",
        at_evaluation=ib.AtEvaluation(exit=ib.exits.FixedExitSpec(loops=3)),
    )
    found = ib.generate(ib.build(spec).eval(), prompts, max_new_tokens=3, max_in_flight=4)
    assert found.statistics.tokens_in_flight == 1


@pytest.mark.parametrize(
    ("texts", "room", "tokens"),
    [(1, 32, 8), (2, 32, 8), (3, 32, 4), (4, 32, 4), (5, 32, 1), (64, 32, 1), (1, 7, 4), (1, 3, 1)],
)
def test_the_default_of_fused_calls_fills_the_columns_of_a_product(texts, room, tokens):
    assert in_flight.most_in_flight(None, texts=texts, max_seq_len=room, fused=True) == tokens
    assert in_flight.most_in_flight(None, texts=texts, max_seq_len=room, fused=False) == 1


def test_more_tokens_in_flight_than_room_are_refused(tiny_model, prompts):
    model = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"max_in_flight is 9, and max_seq_len .* 8 .*at most 8"):
        ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, max_in_flight=9)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="max_in_flight"):
            ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, max_in_flight=wrong)
        with pytest.raises(ValueError, match="max_in_flight"):
            ib.generate(model, prompts, max_new_tokens=2, max_in_flight=wrong)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_in_flight": 99}, "max_in_flight is 99, and all texts are shorter"),
        ({"max_in_flight": 4, "max_length": 8}, "a prompt has max_length tokens"),
    ],
)
def test_generation_with_fewer_tokens_in_flight_than_asked_says_so_once(
    options, reason, tiny_model, prompts, caplog
):
    in_flight.report_sequential.cache_clear()
    slot_generation._report_once.cache_clear()
    model = tiny_model("mamba2", tolerance=1e-2)
    with caplog.at_level(logging.INFO):
        found = ib.generate(model, prompts, max_new_tokens=4, **options)
        assert list(ib.stream(model, prompts, max_new_tokens=4, **options))
    assert found.lengths.tolist() == ([2, 4, 4, 0] if "max_length" in options else [4] * 4)
    assert found.statistics.tokens_in_flight < 4
    assert [reason in record.message for record in caplog.records if "in flight" in record.message] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_captured_tokens_in_flight_on_a_gpu(family, tiny_model, prompts, sampling):
    model = tiny_model(family, tolerance=1e-4).to("cuda")
    flying, _ = check_texts(model, prompts, tokens=4, sampling=sampling)
    captured = flying.batch.captured.graphs
    for name in ("wave", "decide") if sampling.draws else ("advance",):
        assert captured[name, 2] is not None
