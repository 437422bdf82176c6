"""Prelude and coda in the fused kernels of decoding: texts and states of their own operators.

With ``TRITON_INTERPRET=1`` they run in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots.fused_flight import fused_flight
from implicit_blocks.decoding.slots.fused_map import fused_map
from implicit_blocks.decoding.slots.fused_windows import fused_windows
from tests.gpu.interpreter import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "attention": {
        "mixer": ib.AttentionSpec(n_heads=2, n_kv_heads=1, qk_norm="weighted"),
        "mlp": ib.SwiGLUSpec(d_ff=48),
    },
}
ENDS = {"prelude": {"n_layers": 1}, "coda": {"n_layers": 1}}
MODELS = {
    "residual": {"injection": {"kind": "residual"}, **ENDS},
    "attractor": {"injection": {"kind": "attractor"}, "prelude_norm": True, **ENDS},
    "prelude": {"injection": {"kind": "residual"}, "prelude": {"n_layers": 2}},
    "coda": {"injection": {"kind": "residual"}, "coda": {"n_layers": 2}},
    "options": {
        "injection": {"kind": "diagonal"},
        "z_init": ib.NormalStartSpec(std=0.5),
        "norm_before_coda": True,
        "core_residual": True,
        "logit_scale": 2.0,
        **ENDS,
    },
    "gates": {
        "injection": {"kind": "residual"},
        "residual_scaling": {"kind": "bounded_gate", "maximum": 0.75, "init": 0.5},
        **ENDS,
    },
    "factors": {
        "injection": {"kind": "residual"},
        "residual_scaling": {"kind": "layer_scale", "init": 0.25},
        **ENDS,
    },
    "fixed loops": {
        "injection": {"kind": "residual"},
        "at_evaluation": ib.AtEvaluation(exit=ib.exits.FixedExitSpec(loops=3)),
        **ENDS,
    },
    "explicit": {"kind": "explicit_lm", **ENDS},
}
PROMPTS = ([3, 14, 15, 9, 26, 5], [35, 8, 9], [7], [9, 32, 38, 46, 26, 43, 38])
COUNTS = (2, 3, 1, 2)


@pytest.fixture(autouse=True)
def _exact_products():
    pytest.importorskip("triton", reason="Triton is not installed")
    torch.set_float32_matmul_precision("highest")


def built(mixer, model):
    fields = {
        "vocab_size": 61,
        "d_model": 32,
        "n_layers": 1,
        "weight_norm": False,
        **MIXERS[mixer],
        **MODELS[model],
    }
    kind = ib.ExplicitLMSpec if fields.pop("kind", None) else ib.ImplicitLMSpec
    if kind is ib.ImplicitLMSpec:
        stopping = ib.StoppingOverrides(tolerance=1e-4, max_iterations=3)
        search = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.8), stopping=stopping)
        fields.setdefault("at_evaluation", search)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        found = ib.build(kind(**fields)).eval()
    with torch.no_grad():
        found.embedding.weight.mul_(20)
        for name, weight in found.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight", "gamma")):
                weight.uniform_(0.5, 1.5)
    return found


def decode(model, *, tokens, fused, slots):
    decoder = ContinuousDecoder(model, max_batch_size=slots, max_seq_len=16, max_in_flight=tokens)
    batch, wavefront = decoder.batch, decoder.wavefront
    if not fused:
        batch.fused = batch.ends.fused_prelude = batch.ends.fused_coda = None
        if wavefront is not None:
            wavefront.whole = None
    elif INTERPRETED:  # as on a GPU, but eager
        batch.fused = fused_map(model, batch.states, batch.weights, max_seq_len=batch.ends.max_seq_len)
        batch.ends.fuse()
        if wavefront is not None:
            wavefront.fused = fused_windows(batch.fused, tokens=tokens)
            wavefront.whole = fused_flight(wavefront, wavefront.fused)
    if wavefront is not None:
        assert (wavefront.whole is not None) == fused
    for prompt, count in zip(PROMPTS, COUNTS, strict=True):
        decoder.submit(Request(prompt=prompt, max_new_tokens=count))
    made = defaultdict(list)
    for new in decoder.run():
        made[new.request].append(new)
    return decoder, [made[row] for row in range(len(made))]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_texts_are_those_of_the_layers_own_operators(mixer, model, slots, tokens):
    """With 2 slots of single tokens products run row by row, with 3 on matrix units; slots are reused."""
    if model in ("explicit", "fixed loops") and tokens > 1:
        pytest.skip("this model has no tokens in flight")
    if INTERPRETED and slots == 2 and tokens > 1:
        pytest.skip("slow in the interpreter, and the kernels are those of 3 slots")
    whole = built(mixer, model)
    decoder, found = decode(whole, tokens=tokens, fused=True, slots=slots)
    ends = decoder.batch.ends
    assert [ends.fused_prelude is None, ends.fused_coda is None] == [model == "coda", model == "prelude"]
    _, expected = decode(whole, tokens=tokens, fused=False, slots=slots)
    for news, olds, count in zip(found, expected, COUNTS, strict=True):
        assert [new.token for new in news] == [old.token for old in olds]
        assert len(news) == count
        for new, old in zip(news, olds, strict=True):
            torch.testing.assert_close(new.logits, old.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="the default number of tokens in flight is that of a GPU")
@pytest.mark.parametrize("model", ["residual", "attractor", "prelude", "options"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_prelude_and_coda_commit_each_token_once_while_the_number_in_flight_changes(mixer, model):
    """Sequential decoding commits the prelude's token before its search, the wavefront after it."""
    whole, found = built(mixer, model), []
    for asked in (None, 1):
        decoder = ContinuousDecoder(whole, max_batch_size=8, max_seq_len=40, max_in_flight=asked)
        made, numbers = defaultdict(list), []
        waiting = [
            Request(prompt=PROMPTS[row % 4], max_new_tokens=28 if row == 0 else 2 + row) for row in range(8)
        ]
        decoder.submit(waiting.pop(0))
        while decoder.busy:
            for new in decoder.step():
                made[new.request].append(new)
            if waiting and len(made[0]) >= 4:
                for request in waiting:
                    decoder.submit(request)
                waiting = []
            if decoder.tokens_in_flight not in numbers[-1:]:
                numbers.append(decoder.tokens_in_flight)
        assert numbers == ([1] if asked else [8, 1, 4, 8])
        found.append([made[row] for row in range(8)])
    for news, olds in zip(*found, strict=True):
        assert [new.token for new in news] == [old.token for old in olds]
        for new, old in zip(news, olds, strict=True):
            torch.testing.assert_close(new.logits, old.logits, atol=5e-3, rtol=1e-3)
