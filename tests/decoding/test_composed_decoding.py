"""Decoding of models with prelude and coda: slots, windows and one pass give the same tokens.

The maps contract, because committed states are those of fixed points: short of convergence one pass over a
text differs from its windows.
"""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request

ATTENTION = {
    "mixer": {"kind": "attention", "n_heads": 4, "n_kv_heads": 2},
    "mlp": {"kind": "swiglu", "d_ff": 48},
}
MAMBA2 = {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8}}
SANDWICH = {"prelude": {"n_layers": 1}, "coda": {"n_layers": 1}}
CASES = {
    "residual": {"injection": {"kind": "residual", "gate_init": 0.3}, **SANDWICH},
    "attractor": {"injection": {"kind": "attractor"}, **SANDWICH},
    "diagonal": {"injection": {"kind": "diagonal"}, "prelude_norm": True, **SANDWICH},
    "projection": {"prelude": {"n_layers": 2}, "core_residual": True, "weight_norm": True},
    "coda only": {
        "injection": {"kind": "residual", "gate_init": 0.3},
        "coda": {"n_layers": 1},
        "norm_before_coda": True,
    },
    "narrow core": {
        "injection": {"kind": "diagonal"},
        "core_d_model": 16,
        "core_projection": True,
        **SANDWICH,
    },
    "fixed loops": {
        "injection": {"kind": "residual"},
        "at_evaluation": {"exit": {"kind": "fixed", "loops": 3}},
        **SANDWICH,
    },
    "one loop": {
        "injection": {"kind": "residual"},
        "at_evaluation": {"exit": {"kind": "fixed", "loops": 1}},
        **SANDWICH,
    },
    "explicit": {"kind": "explicit_lm", **SANDWICH},
    "scaled": {
        "injection": {"kind": "attractor"},
        "embedding_scale": 3.0,
        "logit_scale": 2.0,
        "logit_softcap": 5.0,
        "residual_scaling": {"kind": "bounded_gate", "maximum": 0.75, "init": 0.5},
        **SANDWICH,
    },
}
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6], [3, 3, 1]]


def built(case, layers, *, device="cpu"):
    fields = {"kind": "implicit_lm", "vocab_size": 23, "d_model": 32, "n_layers": 1, **layers, **CASES[case]}
    if fields["kind"] == "implicit_lm":
        fields.setdefault("weight_norm", False)
        fields.setdefault(
            "at_evaluation",
            {"stopping": {"tolerance": 1e-5, "max_iterations": 200}, "solver": {"kind": "picard"}},
        )
    torch.manual_seed(0)
    spec_class = ib.ExplicitLMSpec if fields["kind"] == "explicit_lm" else ib.ImplicitLMSpec
    model = ib.build(spec_class(**fields)).eval().to(device)
    with torch.no_grad():
        model.embedding.weight.mul_(20)
        for block in model.backbone.blocks():  # let the map contract
            if model.spec.weight_norm:
                block.mixer.in_proj.parametrizations.weight.original0.mul_(0.05)
                block.mixer.out_proj.parametrizations.weight.original0.mul_(30.0)
            elif case == "narrow core":
                block.mixer.out_proj.weight.mul_(0.3)
    return model


@torch.no_grad()
def chosen(model, prompt, tokens):
    """Return the token that one pass over the whole text chooses at the position of each of ``tokens``.

    If these are all equal, each is the one that a pass over the text before it chooses.
    """
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.embedding.weight.device)
    logits = model(ids).logits[0, len(prompt) - 1 :, : model.spec.vocab_size]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("layers", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
@pytest.mark.parametrize("case", CASES)
def test_slots_generate_the_tokens_of_single_passes(case, layers):
    model = built(case, layers)
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=10)
    for prompt in PROMPTS:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    found = {}
    for new in decoder.run():
        found.setdefault(new.request, []).append(new.token)
    assert list(found) == list(range(len(PROMPTS)))
    assert {len(tokens) for tokens in found.values()} == {5}
    assert list(found.values()) == [
        chosen(model, *each) for each in zip(PROMPTS, found.values(), strict=True)
    ]


@pytest.mark.parametrize("layers", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
@pytest.mark.parametrize("case", CASES)
def test_batches_generate_the_tokens_of_single_passes(case, layers):
    model = built(case, layers)
    found = ib.generate(model, PROMPTS, max_new_tokens=5).tokens.tolist()
    assert {len(tokens) for tokens in found} == {5}
    assert found == [chosen(model, *each) for each in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("layers", [ATTENTION, MAMBA2], ids=["attention", "mamba2"])
@pytest.mark.parametrize("search", [{}, {"warm_start": True}], ids=str)
def test_a_step_makes_all_calls_of_a_fixed_number_of_loops(layers, search):
    model = built("residual", layers)
    options = {"max_new_tokens": 5, "loops": 4, **search}
    expected = ib.generate(model, PROMPTS, return_logits=True, **options)
    decoder = ContinuousDecoder(model, max_batch_size=len(PROMPTS), max_seq_len=10, loops=4, **search)
    for prompt in PROMPTS:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    steps = []
    while decoder.busy:
        steps.append(decoder.step())
    assert [len(made) for made in steps] == [2 * len(PROMPTS), *[len(PROMPTS)] * 3]
    assert decoder.statistics.calls == 4 * len(steps)
    made = {n: [new for each in steps for new in each if new.request == n] for n in range(len(PROMPTS))}
    assert expected.logits is not None
    assert expected.residual is not None
    for row, tokens in made.items():
        assert [new.token for new in tokens] == expected.tokens[row].tolist()
        assert [new.iterations for new in tokens] == expected.iterations[row].tolist() == [4] * 5
        assert [new.converged for new in tokens] == expected.converged[row].tolist()
        logits = torch.stack([new.logits for new in tokens])
        torch.testing.assert_close(logits, expected.logits[row], rtol=1e-4, atol=1e-4)
        residuals = torch.tensor([new.residual for new in tokens], dtype=expected.residual.dtype)
        torch.testing.assert_close(residuals, expected.residual[row], rtol=1e-3, atol=1e-6)
