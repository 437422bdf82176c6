"""Hybrid mixers: output, training, decoding, costs, errors, YAML and pretrained folders."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.describing import model_tree
from implicit_blocks.specs.counting import count_flops, count_parameters

HYBRID = ib.HybridSpec(
    mixers=(ib.AttentionSpec(n_heads=4), ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4))
)


def spec_of(mixer: ib.MixerSpec, **changes: object) -> ib.ImplicitLMSpec:
    fields = {"vocab_size": 19, "d_model": 16, "n_layers": 2, "mixer": mixer}
    return ib.ImplicitLMSpec(**(fields | changes))


@pytest.fixture
def model() -> ib.ImplicitLM:
    """Return a hybrid whose fixed point converges."""
    tight = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=1e-6, max_iterations=200))
    model = ib.build(spec_of(HYBRID, at_evaluation=tight)).eval()
    with torch.no_grad():
        for block in model.backbone.blocks():
            for mixer in block.mixer.mixers:
                mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
    return model


def test_a_hybrids_output_is_the_sum_of_its_mixers():
    hybrid = ib.build(HYBRID, d_model=16)
    attention, mamba2 = hybrid.mixers
    z = torch.randn(2, 5, 16)
    u = torch.randn(2, 5, hybrid.injection_width)
    positions = torch.arange(5)[None]
    window = ib.Window(batch_size=2, start=0, length=5, positions_BL=positions)
    state = hybrid.initial_state(2, device=z.device, dtype=z.dtype)
    found, after = hybrid.advance(z, u, state, hybrid.prepare(window))
    cut = attention.injection_width
    first, of_first = attention.advance(z, u[..., :cut], state[0], attention.prepare(window))
    second, of_second = mamba2.advance(z, u[..., cut:], state[1], mamba2.prepare(window))
    torch.testing.assert_close(found, first + second)
    torch.testing.assert_close(hybrid(z, u, state, hybrid.prepare(window)), found)
    torch.testing.assert_close(after[0].keys, of_first.keys)
    torch.testing.assert_close(after[1].h_BHPN, of_second.h_BHPN)


def test_a_hybrids_logits_do_not_depend_on_the_window_length(model):
    tokens = torch.randint(19, (3, 9))
    with torch.no_grad():
        simultaneous, sequential = model(tokens), model(tokens, window_length=1)
    assert simultaneous.solution.converged.all()
    torch.testing.assert_close(simultaneous.logits, sequential.logits, atol=1e-4, rtol=0)


def test_a_hybrid_model_learns():
    torch.manual_seed(0)
    spec = spec_of(HYBRID, stopping=ib.Stopping(tolerance=1e-2, max_iterations=8))
    model = ib.build(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(19, (4, 13))
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_continuous_decoding_of_a_hybrid_gives_the_tokens_of_generate(model):
    prompts = [[0, 3, 2], [5], [1, 4, 7, 7]]
    made = ib.generate(model, prompts, max_new_tokens=5).tokens
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=12)
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    texts: dict[int, list[int]] = {}
    for new in decoder.run():
        texts.setdefault(new.request, []).append(new.token)
    assert [texts[number] for number in range(3)] == made.tolist()


def test_a_hybrid_supports_only_what_all_its_mixers_support():
    heads = ib.AttentionSpec(n_heads=4)
    assert ib.build(ib.HybridSpec(mixers=(heads, heads)), d_model=16).truncates
    assert not ib.build(HYBRID, d_model=16).truncates
    with pytest.raises(ValueError, match=r"torch\.int8"):
        ContinuousDecoder(
            ib.build(spec_of(HYBRID)).eval(), max_batch_size=2, max_seq_len=8, state_dtype=torch.int8
        )


def test_counted_costs_and_tree_of_a_hybrid_match_the_built_model():
    spec = spec_of(HYBRID)
    shapes = {name: tuple(p.shape) for name, p in ib.build(spec).named_parameters()}
    assert model_tree(spec).shapes() == shapes
    counted = count_parameters(spec)
    assert counted is not None
    assert counted.total == sum(torch.Size(shape).numel() for shape in shapes.values())
    alone = [count_flops(spec_of(mixer), length=8) for mixer in HYBRID.mixers]
    whole = count_flops(spec, length=8)
    assert whole.layers == sum(part.layers for part in alone)
    assert whole.injection == sum(part.injection for part in alone)


def test_invalid_hybrid_specs_are_refused_with_their_path():
    with pytest.raises(ValueError, match="at least 2"):
        ib.HybridSpec(mixers=(ib.AttentionSpec(n_heads=4),))
    with pytest.raises(ValueError, match=r"mixers\.1: .*d_model 16 .*n_heads 3"):
        spec_of(ib.HybridSpec(mixers=(ib.AttentionSpec(n_heads=4), ib.AttentionSpec(n_heads=3))))


def test_a_hybrid_in_yaml_accepts_overrides_of_its_parts(tmp_path):
    path = tmp_path / "hybrid.yaml"
    path.write_text(
        "extends: word_problem_s3\nmodel:\n  mixer:\n    kind: hybrid\n    mixers:\n"
        "      - {kind: attention, n_heads: 4}\n      - {kind: mamba2, head_dim: 16}\n"
    )
    mixer = ib.load_spec(path, ["model.mixer.mixers.1.d_state=32"]).model.mixer
    assert [part.kind for part in mixer.mixers] == ["attention", "mamba2"]
    assert mixer.mixers[1].d_state == 32


def test_a_hybrid_is_saved_and_loaded_as_a_pretrained_folder(model, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from implicit_blocks.hf import from_library

    named = model.spec.mixer.model_copy(
        update={"mixers": (ib.AttentionSpec(n_heads=4, backend="torch"), HYBRID.mixers[1])}
    )
    assert named.portable() == HYBRID  # the choice of a backend is not saved, in any part
    from_library(model).save_pretrained(tmp_path)
    again = ib.load_model(tmp_path)
    assert again.spec.mixer == HYBRID
    tokens = torch.randint(19, (2, 6))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
