"""Captured decoding: the tokens of eager decoding, without synchronization with the host."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import prod

import pytest
import torch
from torch.cuda import set_sync_debug_mode

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots import in_flight
from implicit_blocks.decoding.slots.fused_map import FusedMap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "mamba2-groups": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, n_groups=2, bias=True)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=90)},
}


@pytest.fixture(autouse=True)
def _exact_products():
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True, scope="module")
def _untuned_kernels():
    """Use the smallest configuration of every kernel: tuning takes longer than the tests."""
    autotuner = pytest.importorskip("triton.runtime.autotuner", reason="Triton is not installed").Autotuner

    def smallest(self, *_arguments, **_options):
        return [min(self.configs, key=lambda one: prod(one.kwargs.values()) * one.num_stages)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(autotuner, "prune_configs", smallest)
        patched.setattr(autotuner, "_bench", lambda *_arguments, **_options: [0.0] * 3)
        yield


def built(mixer, **changes):
    stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=100)
    at_evaluation = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.9), stopping=stopping)
    fields = {"vocab_size": 61, "d_model": 64, "n_layers": 2, "at_evaluation": at_evaluation}
    torch.manual_seed(0)
    model = ib.build(ib.ImplicitLMSpec(**(fields | MIXERS[mixer] | changes))).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
        for block in model.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model.cuda()


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (n,), generator=generator).tolist() for n in (6, 70, 1, 33, 2, 9)]


def decode(model, *, slots, fused=True, count=12, sampling=None, texts=None, limits=None, **options):
    options = {"max_in_flight": 1} | options
    decoder = ContinuousDecoder(model, max_batch_size=slots, max_seq_len=96, **options)
    if not fused:
        decoder.batch.fused = None
    for row, prompt in enumerate(texts or prompts()):
        own = {"sampling": sampling or Sampling()} | ({} if limits is None else limits[row])
        decoder.submit(Request(prompt=prompt, max_new_tokens=count, seed=row, **own))
    made = defaultdict(list)
    for new in decoder.run():
        made[new.request].append(new)
    return decoder, [made[row] for row in range(len(made))]


def assert_same(found, expected, *, atol=2e-3):
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert [new.token for new in row] == [new.token for new in other]
        for new, old in zip(row, other, strict=True):
            torch.testing.assert_close(new.logits, old.logits, atol=atol, rtol=1e-3)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_decoding_gives_the_tokens_of_eager_decoding(mixer, slots, fused, caplog):
    model = built(mixer)
    decoder, found = decode(model, slots=slots, fused=fused)
    assert (decoder.batch.fused is not None) == fused
    assert "cannot be captured" not in caplog.text
    assert all_captured(decoder)
    assert_same(found, eager(mixer))


def test_captured_decoding_of_hybrid_layers_equals_eager_decoding():
    parts = [MIXERS["mamba2"]["mixer"], MIXERS["attention"]["mixer"]]
    torch.manual_seed(0)
    model = ib.build(
        ib.ImplicitLMSpec(vocab_size=61, d_model=64, n_layers=2, mixer=ib.HybridSpec(mixers=parts))
    )
    model = model.cuda().eval()
    decoder, found = decode(model, slots=4)
    assert all_captured(decoder)
    assert_same(found, decode(model, slots=4, graphs=False)[1])


def all_captured(decoder) -> bool:
    """Return whether there are captured graphs and no capture failed."""
    made = decoder.batch.captured.graphs.values()
    return bool(made) and None not in made


@cache
def eager(mixer):
    return decode(built(mixer), slots=4, graphs=False)[1]


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_decoding_gives_the_tokens_of_the_cpu(mixer):
    model = built(mixer)
    _, found = decode(model, slots=4, count=6)
    for row, prompt in enumerate(prompts()):
        alone = ib.generate(model.cpu(), [prompt], max_new_tokens=6)
        assert [new.token for new in found[row]] == alone.tokens[0].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"warm_start": True},
        {"moving_average": 0.6},
        {"max_iterations": 3},
        {"damping": 0.4},
        {"sampling": Sampling(temperature=1.5, top_k=8, top_p=0.9)},
    ],
    ids=str,
)
def test_search_options_and_sampling_act_as_in_eager_decoding(options):
    model = built("mamba2")
    assert_same(decode(model, slots=4, **options)[1], decode(model, slots=4, graphs=False, **options)[1])


def test_captured_broyden_decoding_equals_eager_decoding():
    stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=50)
    model = built("attention", at_evaluation=ib.AtEvaluation(solver=ib.BroydenSpec(), stopping=stopping))
    assert_same(decode(model, slots=4)[1], decode(model, slots=4, graphs=False)[1])


@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_decoding_in_bfloat16_equals_eager_decoding(mixer):
    model = built(mixer)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for slots in (1, 4):
            _, found = decode(model, slots=slots, count=1)
            _, expected = decode(model, slots=slots, count=1, graphs=False)
            assert_same(found, expected, atol=0.2)
            decoder, found = decode(model, slots=slots, tolerance=0.02)
            assert all(new.converged for row in found for new in row)
    assert {t.dtype for t in decoder.batch.weights.tensors() if t.ndim > 1} >= {torch.bfloat16}


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate_on_a_gpu_gives_the_tokens_of_the_cpu(mixer):
    model = built(mixer)
    together = ib.generate(model, prompts(), max_new_tokens=8, stop_token_ids=(3, 7))
    assert together.prompt.converged.all()
    for row, prompt in enumerate(prompts()):
        alone = ib.generate(model.cpu(), [prompt], max_new_tokens=8, stop_token_ids=(3, 7))
        length = int(alone.lengths[0])
        assert int(together.lengths[row]) == length
        assert together.tokens[row, :length].tolist() == alone.tokens[0, :length].tolist()


def test_captured_decoding_after_a_long_prompt_equals_eager_decoding():
    model = built("attention")
    made = []
    for graphs in (True, False):
        decoder = ContinuousDecoder(
            model, max_batch_size=2, max_seq_len=3000, graphs=graphs, tolerance=1e-3, max_in_flight=1
        )
        for length in (2200, 40):
            prompt = torch.randint(61, (length,), generator=torch.Generator().manual_seed(length))
            decoder.submit(Request(prompt=prompt, max_new_tokens=4))
        new = sorted(decoder.run(), key=lambda new: new.request)
        made.append([new[:4], new[4:]])
    assert_same(*made)


def test_captured_decoding_with_bfloat16_states_equals_eager_decoding():
    model = built("mamba2")
    for slots in (1, 4):
        decoder, found = decode(model, slots=slots, count=2, state_dtype=torch.bfloat16)
        assert decoder.states[0].h_SHPN.dtype == torch.bfloat16
        _, eager = decode(model, slots=slots, count=2, state_dtype=torch.bfloat16, graphs=False)
        assert_same(found, eager, atol=2e-2)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
def test_captured_decoding_with_int8_keys_equals_eager_decoding(fused):
    model = built("attention")
    for slots in (1, 4):
        decoder, found = decode(model, slots=slots, fused=fused, count=2, state_dtype=torch.int8)
        assert decoder.states[0].keys.dtype == torch.int8
        _, eager = decode(model, slots=slots, count=2, state_dtype=torch.int8, graphs=False)
        assert_same(found, eager, atol=2e-2)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_states_change_only_when_a_token_is_committed(mixer, fused):
    options = {"buckets": [4], "tolerance": 0.0, "max_iterations": 3, "max_in_flight": 1}
    decoder = ContinuousDecoder(built(mixer), max_batch_size=4, max_seq_len=96, **options)
    if not fused:
        decoder.batch.fused = None
    for prompt in prompts()[:4]:
        decoder.submit(Request(prompt=prompt, max_new_tokens=8))

    def committed():
        lengths = decoder.batch.lengths_S.tolist()
        for states in decoder.states:
            for slot, length in enumerate(lengths):
                if mixer == "attention":
                    yield states.keys[slot, :, :length].clone()
                    yield states.values[slot, :, :length].clone()
                else:
                    yield states.h_SHPN[slot].clone()
                    yield states.taps_SWC[slot].roll(-int(states.next_S[slot]), 0)[1:]

    decoder.step()
    lengths, before, commits = decoder.batch.lengths_S.clone(), [*committed()], 0
    for _ in range(20):
        decoder.step()
        after = [*committed()]
        same = list(map(torch.equal, after, before))
        written = bool((decoder.batch.lengths_S != lengths).any())  # all slots are at the same iteration
        assert not any(same) if written else all(same)
        lengths, before, commits = decoder.batch.lengths_S.clone(), after, commits + written
    assert commits >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2, "buckets": [2]},
        {"slots": 2, "buckets": [2], "max_in_flight": 4},
        {"slots": 1, "search_dtype": torch.int8},  # with others, fewer calls are in 8 bits
    ],
    ids=["sequential", "in-flight", "8-bit"],
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_request_is_decoded_as_by_a_decoder_with_its_limits(mixer, options):
    """Also with the tolerance 0, which a decoder has only one after the other."""
    model = built(mixer)
    limits = [
        {"tolerance": 1e-3},
        {"tolerance": 1e-2},
        {"max_iterations": 3},
        {"tolerance": 3e-3, "max_iterations": 20},
        {"tolerance": 0.0, "max_iterations": 6},
        {"tolerance": 3e-2},
    ]
    decoder, found = decode(model, limits=limits, **options)
    assert all_captured(decoder)
    assert FusedMap.searches(decoder.batch.search)
    assert decoder.wavefront is None or decoder.wavefront.whole is not None
    assert decoder.quantized is None or decoder.quantized.calls > 0
    for prompt, own, news in zip(prompts(), limits, found, strict=True):
        _, (expected,) = decode(model, texts=[prompt], **(options | own))
        assert_same([news], [expected])
        assert [new.iterations for new in news] == [old.iterations for old in expected]
        assert [new.converged for new in news] == [old.converged for old in expected]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_captured_steps_neither_synchronize_nor_move_memory(mixer, slots):
    decoder = ContinuousDecoder(
        built(mixer),
        max_batch_size=slots,
        buckets=[slots],
        max_seq_len=96,
        tolerance=0.0,
        max_iterations=4,
        max_in_flight=1,
    )
    for prompt in prompts()[:slots]:
        decoder.submit(Request(prompt=prompt, max_new_tokens=20))

    def addresses():
        batch = decoder.batch
        kept = [
            batch.lengths_S,
            batch.tokens_S,
            batch.busy_S,
            batch.ends.hidden_SD,
            batch.ends.u_SU,
            batch.search.z,
        ]
        states = [t for s in decoder.states for t in vars(s).values() if torch.is_tensor(t)]
        return [t.data_ptr() for t in (*kept, *states)]

    before = addresses()
    while decoder.calls < 15:
        decoder.step()
    set_sync_debug_mode("error")
    try:
        made = [new for _ in range(30) for new in decoder.step()]
    finally:
        set_sync_debug_mode("default")
    assert len(made) >= 5 * slots
    assert addresses() == before
    assert all_captured(decoder)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_launches_that_overlap_change_no_value(mixer, tokens, monkeypatch):
    from implicit_blocks.ops.kernels import overlap

    model, found = built(mixer), []
    for enabled in (False, True):
        monkeypatch.setattr(overlap, "ENABLED", enabled)
        for slots in (1, 2):
            decoder, texts = decode(model, slots=slots, max_in_flight=tokens)
            assert all_captured(decoder)
            found.append([[(new.token, new.iterations, new.logits) for new in text] for text in texts])
    for apart, together in zip(found[:2], found[2:], strict=True):
        for olds, news in zip(apart, together, strict=True):
            for (old, count, logits), (new, number, others) in zip(olds, news, strict=True):
                assert (new, number) == (old, count)
                assert torch.equal(others, logits)


def test_a_few_texts_have_several_tokens_in_flight_by_default(caplog):
    caplog.set_level("INFO")
    in_flight.report_sequential.cache_clear()  # a test before may have caused the same report
    model = built("mamba2")

    def tokens(model=model, *, texts=4, **options):
        options = {"max_batch_size": texts, "max_seq_len": 96} | options
        decoder = ContinuousDecoder(model, **options)
        for number in range(texts):
            decoder.submit(Request(prompt=[1], max_new_tokens=2, tolerance=1e-2 / (1 + number)))
        decoder.step()
        return 1 if decoder.wavefront is None else decoder.tokens_in_flight

    assert tokens() == tokens(texts=3) == tokens(max_batch_size=16) == 4
    assert tokens(texts=2) == tokens(texts=1) == tokens(texts=2, max_batch_size=16) == 8
    for options in (
        {"texts": 5},
        {"texts": 5, "max_batch_size": 16},
        {"max_seq_len": 3},
        {"graphs": False},
        {"search_dtype": torch.int8},
        {"warm_start": True},
        {"max_in_flight": 1},
    ):
        assert tokens(**options) == 1, options
    undamped = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.7, undamped_first=True))
    assert tokens(built("mamba2", at_evaluation=undamped)) == 1
    assert caplog.text.count("calls on several tokens are not fused") == 1
    found = ib.generate(model, prompts()[:2], max_new_tokens=12)
    expected = ib.generate(model, prompts()[:2], max_new_tokens=12, max_in_flight=1)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.statistics.calls < expected.statistics.calls
    assert found.statistics.tokens_in_flight > 1


def in_large_batch(model, *, texts, sampling=None, **options):
    """Return a decoder and the new tokens of the first ``texts`` of 12 requests; all enter together."""
    options = {"max_batch_size": 16, "max_seq_len": 120} | options
    decoder = ContinuousDecoder(model, **options)
    for row, prompt in enumerate([*prompts(), *prompts()][:texts]):
        request = {"max_new_tokens": 48 if row < 2 else 6 + row, "sampling": sampling or Sampling()}
        decoder.submit(Request(prompt=prompt, seed=row, **request))
    made = defaultdict(list)
    for new in decoder.run():
        made[new.request].append(new)
    return decoder, [made[row] for row in range(texts)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_one_text_in_a_large_batch_takes_the_calls_of_a_batch_of_one(mixer, sampling):
    model = built(mixer)
    alone, expected = in_large_batch(model, texts=1, sampling=sampling, max_batch_size=1)
    decoder, found = in_large_batch(model, texts=1, sampling=sampling)
    one_by_one, sequential = in_large_batch(model, texts=1, sampling=sampling, max_in_flight=1)
    assert all_captured(decoder)
    assert_same(found, expected, atol=5e-3)
    assert_same(found, sequential, atol=5e-3)
    assert decoder.tokens_in_flight == decoder.wavefront.tokens == 8
    assert decoder.calls <= 1.1 * alone.calls
    assert decoder.calls < one_by_one.calls


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_texts_of_a_large_batch_are_those_of_sequential_decoding(mixer, sampling):
    """Twelve texts, all but two of which end early: 1, then 4, then 8 tokens in flight."""
    model = built(mixer)
    decoder, found = in_large_batch(model, texts=12, sampling=sampling)
    one_by_one, expected = in_large_batch(model, texts=12, sampling=sampling, max_in_flight=1)
    assert all_captured(decoder)
    assert_same(found, expected, atol=5e-3)
    assert {size for name, size in decoder.batch.captured.graphs if name == "step"} >= {16}
    names = ("wave", "decide") if sampling.draws else ("advance",)
    assert {name for name, size in decoder.batch.captured.graphs if size == 2} >= set(names)
    assert decoder.calls < one_by_one.calls
    assert 1 < decoder.statistics.tokens_in_flight < 8


@pytest.mark.parametrize("mixer", MIXERS)
def test_texts_that_enter_beside_tokens_in_flight_are_those_of_sequential_decoding(mixer):
    """One text has 8 tokens in flight when eleven enter, and again when they have ended."""
    model, found = built(mixer), []
    for asked in (None, 1):
        decoder = ContinuousDecoder(model, max_batch_size=16, max_seq_len=120, max_in_flight=asked)
        made, numbers = defaultdict(list), []
        waiting = [
            Request(prompt=prompt, max_new_tokens=48 if row == 0 else 4 + row, seed=row)
            for row, prompt in enumerate([*prompts(), *prompts()])
        ]
        decoder.submit(waiting.pop(0))
        while decoder.busy:
            for new in decoder.step():
                made[new.request].append(new)
            if waiting and len(made[0]) >= 8:
                for request in waiting:
                    decoder.submit(request)
                waiting = []
            if decoder.tokens_in_flight not in numbers[-1:]:
                numbers.append(decoder.tokens_in_flight)
        assert all_captured(decoder)
        assert numbers == ([1] if asked else [8, 1, 4, 8])
        found.append([made[row] for row in range(12)])
    assert_same(found[0], found[1], atol=5e-3)


@pytest.mark.parametrize("mixer", MIXERS)
def test_prompts_of_unequal_lengths_solved_by_graphs_give_the_texts_of_eager_ones(mixer, caplog):
    model, found = built(mixer), []
    for captured in (False, True):
        decoder = ContinuousDecoder(model, max_batch_size=4, max_seq_len=96, max_in_flight=1)
        assert decoder.prompts.captured
        decoder.prompts.captured = captured
        together, made = [], defaultdict(list)
        decoder.on_prompts = lambda numbers, solution, kept=together: kept.append(len(numbers))
        for _ in range(4):  # the first calls of a shape run eagerly, the next ones are captured
            for prompt in prompts():
                decoder.submit(Request(prompt=prompt, max_new_tokens=6))
        for new in decoder.run():
            made[new.request].append(new)
        found.append([made[row] for row in range(4 * len(prompts()))])
    assert max(together) == 4  # padded: no two prompts have the same length
    assert decoder.prompts._graphs._searches
    assert all("is computed by" in message for message in caplog.messages)  # no reason against capturing
    assert_same(found[1], found[0])
