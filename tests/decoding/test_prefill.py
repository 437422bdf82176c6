"""Prompts in chunks beside running texts, and the reuse of prefixes."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from implicit_blocks.decoding import ContinuousDecoder, Request

SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6]


def made(model, prompts, **options):
    """Return the decoder and the tokens of each prompt."""
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=32, tolerance=1e-4, **options)
    for row, prompt in enumerate(prompts):
        decoder.submit(Request(prompt=prompt, max_new_tokens=4, seed=row))
    found = defaultdict(list)
    for new in decoder.run():
        found[new.request].append(new)
    return decoder, [found[row] for row in range(len(prompts))]


def tokens(texts):
    return [[new.token for new in text] for text in texts]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_chunks_of_a_prompt_give_the_text_of_windows(family, tiny_model, prompts, in_flight):
    model = tiny_model(family)
    _, chunked = made(model, prompts, prefill_chunk=3, max_in_flight=in_flight)
    _, windows = made(model, prompts, window_length=3, max_in_flight=in_flight)
    assert tokens(chunked) == tokens(windows)
    for news, olds in zip(chunked, windows, strict=True):
        torch.testing.assert_close(news[0].logits, olds[0].logits, atol=1e-3, rtol=0)


def test_a_running_text_does_not_wait_for_a_long_prompt(family, tiny_model):
    model = tiny_model(family)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=64, prefill_chunk=4, tolerance=1e-2)
    decoder.submit(Request(prompt=[1, 2], max_new_tokens=30))
    decoder.step()
    lengths = []
    decoder.model.backbone.norm.register_forward_hook(lambda _, given, out: lengths.append(out.shape[1]))
    decoder.submit(Request(prompt=[2] * 40, max_new_tokens=2))
    before, running = decoder.calls, 0
    while not any(new.request == 1 for new in decoder.step()):
        running += 1
    assert running >= 9
    assert decoder.calls >= before + 9
    assert max(lengths) <= 8


def test_a_known_prefix_is_solved_once_and_does_not_change_the_text(family, tiny_model):
    model = tiny_model(family)
    prompts = [[*SYSTEM, 7], [*SYSTEM, 2, 2], SYSTEM, [5, *SYSTEM]]
    solved = []
    model.backbone.norm.register_forward_hook(lambda _, given, out: solved.append(out.shape[1]))
    decoder, found = made(model, prompts, prefill_chunk=4, prefix_cache_bytes=1 << 20)
    with_cache = len(solved)
    _, expected = made(model, prompts, prefill_chunk=4)
    assert with_cache < len(solved) - with_cache
    assert tokens(found) == tokens(expected)
    for news, olds in zip(found, expected, strict=True):
        assert torch.equal(news[0].logits, olds[0].logits)
    assert decoder.prefill.cache.hits == 2


def test_the_cache_of_prefixes_keeps_to_its_size(tiny_model):
    model = tiny_model("mamba2")
    decoder, _ = made(model, [SYSTEM], prefill_chunk=2, prefix_cache_bytes=1 << 20)
    whole = decoder.prefill.cache
    assert len(whole) == 3
    size = whole.bytes // 3
    decoder, _ = made(model, [SYSTEM, SYSTEM[::-1]], prefill_chunk=2, prefix_cache_bytes=2 * size)
    assert len(decoder.prefill.cache) == 2
    assert decoder.prefill.cache.bytes <= 2 * size
    decoder, _ = made(model, [SYSTEM], prefill_chunk=2, prefix_cache_bytes=1)
    assert len(decoder.prefill.cache) == 0


def test_a_prompt_in_chunks_can_be_cancelled(tiny_model):
    model = tiny_model("attention")
    decoder = ContinuousDecoder(model, max_batch_size=1, max_seq_len=32, prefill_chunk=2, tolerance=1e-3)
    first = decoder.submit(Request(prompt=SYSTEM, max_new_tokens=2))
    second = decoder.submit(Request(prompt=[1], max_new_tokens=2))
    decoder.step()
    assert decoder.busy
    assert decoder.cancel(first)
    assert {new.request for new in decoder.run()} == {second}


def test_invalid_options_of_prompts_are_refused(tiny_model):
    model = tiny_model("mamba2")
    for message, options in (
        ("prefill_chunk", {"prefill_chunk": 0}),
        ("window_length is 2 and prefill_chunk 3", {"prefill_chunk": 3, "window_length": 2}),
        ("prefix_cache_bytes is -1", {"prefill_chunk": 3, "prefix_cache_bytes": -1}),
        ("prefix_cache_bytes is 9.*prefill_chunk", {"prefix_cache_bytes": 9}),
    ):
        with pytest.raises(ValueError, match=message):
            ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, **options)
