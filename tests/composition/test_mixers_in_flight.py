"""Tokens in flight give the texts of sequential decoding for random models of every mixer."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request, Sampling
from tests.composition.test_composition import D_MODEL, MIXERS

VOCAB_SIZE, COUNT = 19, 6
SAMPLINGS = (Sampling(), Sampling(temperature=2.0), Sampling(temperature=3.0, top_k=8, top_p=0.9))
WITHOUT_WINDOWS = {"sliding_window_attention"}
"""Mixers whose states cannot mix provisional tokens."""


def contracting_model(mixer, seed):
    """Return a random model whose map depends little on z: its searches take about 10 calls."""
    torch.manual_seed(seed)
    spec = ib.ImplicitLMSpec(
        vocab_size=VOCAB_SIZE,
        d_model=D_MODEL,
        n_layers=1,
        mixer=mixer,
        mlp={"kind": "swiglu", "d_ff": 24} if seed % 2 else None,
        weight_norm=False,
        at_evaluation={
            "solver": {"kind": "picard"},
            "stopping": {"tolerance": 1e-4, "max_iterations": 100},
        },
    )
    model = ib.build(spec).eval().double()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
        for block in model.backbone.blocks():
            outputs = set(block.mixer.output_projections())
            for module in block.mixer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.mul_(200 if module in outputs else 0.05)
    return model


def decode(model, requests, *, tokens, late=False, cancelled=None):
    """Return the decoder and the new tokens of each request; ``cancelled`` ends after a few calls."""
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=16, max_in_flight=tokens)
    decoder.on_gpu |= late  # tokens are read one call late
    for request in requests:
        decoder.submit(request)
    found = defaultdict(list)
    while decoder.busy:
        for new in decoder.step():
            found[new.request].append(new)
        if cancelled is not None and len(found[cancelled]) >= 2 and decoder.cancel(cancelled):
            assert decoder.busy
    return decoder, [found[number] for number in range(len(requests))]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mixer", MIXERS, ids=[mixer["kind"] for mixer in MIXERS])
def test_the_texts_are_those_of_sequential_decoding(mixer, seed):
    """Ragged prompts, greedy and sampled; a stop token among tokens in flight; a cancelled request."""
    model, draw = contracting_model(mixer, seed), random.Random(seed)
    requests = [
        Request(
            prompt=[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 8))],
            max_new_tokens=COUNT,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            seed=draw.randrange(1000),
        )
        for number in range(4)
    ]
    _, expected = decode(model, requests, tokens=1)
    assert all(new.converged for news in expected for new in news)
    ended = [old.token for old in expected[1]]
    end = next(n for n in range(3, COUNT) if ended[n - 1] not in ended[: n - 1])
    requests[1] = Request(**vars(requests[1]) | {"stop_token_ids": [ended[end - 1]]})
    decoder, found = decode(model, requests, tokens=draw.randint(3, 6), late=bool(seed), cancelled=0)
    assert (decoder.wavefront is None) == (mixer["kind"] in WITHOUT_WINDOWS)
    assert decoder.wavefront is None or decoder.statistics.tokens_in_flight > 1.5
    assert 2 <= len(found[0]) < COUNT
    lengths = [len(found[0]), end, COUNT, COUNT]
    for news, olds, length in zip(found, expected, lengths, strict=True):
        assert [new.token for new in news] == [old.token for old in olds[:length]]
        assert all(new.converged for new in news)
        for new, old in zip(news, olds, strict=False):
            torch.testing.assert_close(new.logits, old.logits, atol=5e-3, rtol=0)
    assert [news[-1].stopped for news in found] == [False, True, False, False]
