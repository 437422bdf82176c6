"""Searches that begin with weights in 8 bits: their solutions are those of full precision."""

from __future__ import annotations

import logging

import pytest
import torch

from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from implicit_blocks.decoding.slots import quantized
from implicit_blocks.ops.quantization import eight_bits

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]


def decode(model, prompts=PROMPTS, *, slots=1, count=6, **options):
    decoder = ContinuousDecoder(
        model, max_batch_size=slots, max_seq_len=16, **({"max_in_flight": 1} | options)
    )
    for seed, prompt in enumerate(prompts):
        decoder.submit(Request(prompt=prompt, max_new_tokens=count, sampling=Sampling(), seed=seed))
    made = [[] for _ in prompts]
    for new in decoder.run():
        made[new.request].append(new)
    return decoder, made


@pytest.mark.parametrize(("slots", "dtype"), [(1, torch.int8), (3, torch.int8), (1, torch.float8_e4m3fn)])
def test_solutions_are_those_of_full_precision(family, tiny_model, slots, dtype):
    model, tolerance = tiny_model(family), 1e-4
    _, exact = decode(model, tolerance=1e-6)
    _, usual = decode(model, tolerance=tolerance)
    decoder, found = decode(model, slots=slots, tolerance=tolerance, search_dtype=dtype)
    assert 0 < decoder.quantized.calls < decoder.calls
    for new, old, true in zip(found, usual, exact, strict=True):
        assert [token.token for token in new] == [token.token for token in true]
        assert all(token.converged and token.residual <= tolerance for token in new)
        near, reference = (torch.stack([token.logits for token in row]) for row in (new, true))
        error = float((torch.stack([token.logits for token in old]) - reference).abs().max())
        assert float((near - reference).abs().max()) <= max(2 * error, 1e-3)


def test_calls_in_8_bits_differ_from_full_precision(family, tiny_model):
    """Otherwise the test above would not show that the last calls correct the solution."""
    model = tiny_model(family)
    decoder, _ = decode(model, PROMPTS[:1], search_dtype=torch.int8)
    weight = decoder.quantized.weights.items()[-1][1][0]
    exact = decoder.batch.weights.items()[-1][1][0]
    assert 0 < float((weight - exact).norm() / exact.norm()) < 0.02


def test_limits_count_the_calls_in_8_bits(tiny_model):
    model = tiny_model("mamba2")
    decoder, made = decode(model, tolerance=1e-12, max_iterations=6, search_dtype=torch.int8)
    assert decoder.quantized.calls > 0
    assert all(new.iterations == 6 and not new.converged for row in made for new in row[1:])


def test_requests_can_have_their_own_limits(tiny_model):
    model = tiny_model("attention")
    decoder = ContinuousDecoder(model, max_batch_size=1, max_seq_len=16, search_dtype=torch.int8)
    decoder.submit(Request(prompt=[1, 2], max_new_tokens=4, tolerance=1e-3, max_iterations=90))
    assert all(new.residual <= 1e-3 for new in decoder.run())


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a_request_takes_at_most_its_iterations(tiny_model, limit, late):
    """Calls in 8 bits leave at least the last iteration; on a GPU the host reads their end one call late."""
    sizes = {"max_batch_size": 2, "max_seq_len": 16}
    decoder = ContinuousDecoder(tiny_model("attention"), **sizes, tolerance=1e-6, search_dtype=torch.int8)
    decoder.on_gpu |= late
    for own in (limit, 40):
        decoder.submit(Request(prompt=[1, 2], max_new_tokens=5, max_iterations=own))
    made = [[], []]
    for new in decoder.run():
        made[new.request].append(new.iterations)
    assert made[0] == [limit] * 5
    assert max(made[1]) <= 40
    assert decoder.quantized.calls > 0


def test_the_type_is_chosen_by_the_device_and_logged(tiny_model, caplog):
    model = tiny_model("mamba2")
    _, expected = decode(model, PROMPTS[:1], search_dtype=torch.int8)
    with caplog.at_level(logging.INFO):
        decoder, found = decode(model, PROMPTS[:1], search_dtype="auto")
    assert decoder.quantized.begin_fine == quantized.BEGIN_FINE[torch.int8]
    assert [new.token for new in found[0]] == [new.token for new in expected[0]]
    assert sum("search_dtype is torch.int8" in record.message for record in caplog.records) == 1


def test_bad_options_are_refused(tiny_model):
    model = tiny_model("mamba2")
    with pytest.raises(ValueError, match=r"search_dtype is torch.float16; choose torch.int8"):
        decode(model, search_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"search_dtype is 8bit; choose torch.int8, .*'auto'"):
        decode(model, search_dtype="8bit")
    with pytest.raises(ValueError, match=r"search_dtype .* max_in_flight 4"):
        decode(model, search_dtype=torch.int8, max_in_flight=4)


def test_models_without_kernels_are_searched_in_full_precision_with_the_reason(tiny_model, caplog):
    quantized._report_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            decoder, made = decode(
                tiny_model("mamba2"), PROMPTS[:1], moving_average=0.5, search_dtype=torch.int8
            )
    assert decoder.quantized is None
    assert len(made[0]) == 6
    messages = [record.message for record in caplog.records if "8 bits" in record.message]
    assert len(messages) == 1
    assert "full precision" in messages[0]


def test_calls_on_more_rows_than_the_kernels_serve_say_so_once(tiny_model, caplog):
    quantized._report_once.cache_clear()
    sizes = {"max_batch_size": 3, "buckets": [3], "max_seq_len": 32}
    decoder = ContinuousDecoder(tiny_model("mamba2"), **sizes, tolerance=1e-2, search_dtype=torch.int8)
    decoder.quantized.fused = object()  # as on a GPU, where kernels serve two rows
    for prompt in ([1, 2], [3], [2, 0, 1]):
        decoder.submit(Request(prompt=prompt, max_new_tokens=4))
    with caplog.at_level(logging.WARNING):
        assert len(list(decoder.run())) == 12
    assert decoder.quantized.calls == 0
    messages = [record.message for record in caplog.records if "8 bits" in record.message]
    assert len(messages) == 1
    assert "at most 2 texts" in messages[0]


def test_rounding_to_floats_of_8_bits_is_that_of_their_mantissa():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = eight_bits(weight, torch.float8_e4m3fn)
    assert codes.dtype == torch.float8_e4m3fn
    rounded = eight_bits(weight, torch.float8_e4m3fn).wide(torch.float32)
    assert torch.equal(rounded, codes.float() * scales[:, None])
    assert float(((rounded - weight).abs() - weight.abs() / 16 - scales[:, None] / 512).max()) <= 0


def test_rounding_is_that_of_one_scale_per_output():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = eight_bits(weight)
    assert codes.dtype == torch.int8
    assert float((codes * scales[:, None] - weight).abs().max()) <= float(scales.max()) / 2 * 1.001
