"""Options of attention: contracts, equations in float64, bidirectional attention, value embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.describing import model_tree
from implicit_blocks.layers import add_weight_norm
from implicit_blocks.models import map_graphs
from implicit_blocks.testing import MIXER_CONTRACTS, ContractError, check_walk
from implicit_blocks.testing.mixer_runs import make
from implicit_blocks.weights.cache import WeightCache

D_MODEL = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "bias-qkv": {"bias": "qkv"},
    "bias-qk": {"bias": "qk"},
    "weighted-norm": {"qk_norm": "weighted"},
    "unweighted-norm": {"qk_norm": "unweighted", "qk_norm_eps": 0.1},
    "clip": {"clip_qkv": 0.4},
    "value-embeddings": {"value_embeddings": 5},
    "all": {
        "bias": "qk",
        "qk_norm": "weighted",
        "clip_qkv": 0.7,
        "value_embeddings": 4,
        "head_dim": 6,
    },
    "bidirectional": {"causal": False},
    "bidirectional-all": {
        "causal": False,
        "bias": "qkv",
        "qk_norm": "weighted",
        "clip_qkv": 0.7,
        "value_embeddings": 4,
    },
}
CAUSAL = [name for name, options in OPTIONS.items() if options.get("causal", True)]


def spec_of(name: str) -> ib.AttentionSpec:
    return ib.AttentionSpec(n_heads=4, n_kv_heads=2, rope_theta=100.0, **OPTIONS[name])


def window_of(length: int, *, batch: int = 2, **fields: Any) -> ib.Window:
    given = {"batch_size": batch, "start": 0, "positions_BL": torch.arange(length)[None]}
    return ib.Window(length=length, **(given | {"dtype": torch.float64} | fields))


def mix(mixer: ib.Mixer, z: Tensor, u: Tensor | None, window: ib.Window) -> Tensor:
    state = mixer.initial_state(window.batch_size, device=z.device, dtype=z.dtype)
    return mixer(z, u, state, mixer.prepare(window))


@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_an_option_satisfies_the_contract(name, contract):
    MIXER_CONTRACTS[contract](spec_of(name), D_MODEL)


@pytest.mark.parametrize(
    ("padding", "cuts", "documents"),
    [("holes", "ragged windows", True), ("left", "tokens", False), ("between", "one window", True)],
)
@pytest.mark.parametrize("name", CAUSAL)
def test_padding_documents_and_windows_do_not_change_a_row(name, padding, cuts, documents):
    check_walk(spec_of(name), padding=padding, cuts=cuts, documents=documents, d_model=D_MODEL, length=12)


# ------------------------------------------------------------------------------------------ equations


def written_out(mixer: ib.Attention, spec: ib.AttentionSpec, z: Tensor, u: Tensor, ids: Tensor) -> Tensor:
    """Return attention's output by the equations of its docstring, one head and one token at a time."""
    heads, kv_heads, width = 4, 2, spec.head_width(D_MODEL)
    batch, length, _ = z.shape
    qkv = z @ mixer.in_proj.weight.T + u
    if spec.bias in (True, "qkv"):
        qkv = qkv + mixer.in_proj.bias
    q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    q, k, v = (part.reshape(batch, length, -1, width) for part in (q, k, v))
    if spec.value_embeddings is not None:
        gate = 2 * torch.sigmoid(z[..., :32] @ mixer.value_gate.weight.T)
        table = mixer.value_embedding.weight.view(-1, kv_heads, width)
        v = v + gate[..., None] * table[ids]
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    if spec.bias == "qk":
        biases = mixer.qk_bias.view(-1, width)
        q, k = q + biases[:heads], k + biases[heads:]
    if spec.qk_norm != "none":
        q, k = (x / (x.pow(2).mean(-1, keepdim=True) + spec.qk_norm_eps).sqrt() for x in (q, k))
    if spec.qk_norm == "weighted":
        q, k = q * mixer.q_norm.weight, k * mixer.k_norm.weight
    half = width // 2
    angle = torch.arange(length)[:, None] * spec.rope_theta ** (-torch.arange(half, dtype=z.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    q, k = (
        torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)
        for x in (q, k)
    )
    outputs = []
    for token in range(length):
        seen = slice(0, token + 1) if spec.causal else slice(None)
        parts = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = (k[:, seen, group] @ q[:, token, head, :, None])[..., 0] / math.sqrt(width)
            parts.append((scores.softmax(-1)[..., None] * v[:, seen, group]).sum(1))
        outputs.append(torch.cat(parts, dim=-1))
    y = torch.stack(outputs, dim=1) @ mixer.out_proj.weight.T
    return y + mixer.out_proj.bias if spec.bias is True else y


@pytest.mark.parametrize("name", OPTIONS)
def test_the_output_and_every_gradient_are_those_of_the_equations(name):
    spec = spec_of(name)
    mixer = make(spec, D_MODEL)
    z, u = torch.randn(2, 7, D_MODEL).double(), torch.randn(2, 7, mixer.injection_width).double()
    ids = torch.randint(4, (2, 7))
    leaves = {"z": z.requires_grad_(), "u": u.requires_grad_(), **dict(mixer.named_parameters())}
    found = mix(mixer, z, u, window_of(7, ids_BL=ids))
    expected = written_out(mixer, spec, z, u, ids)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(found)
    gradients, oracle = (
        torch.autograd.grad((y * weights).sum(), list(leaves.values())) for y in (found, expected)
    )
    for leaf, gradient, by_equation in zip(leaves, gradients, oracle, strict=True):
        torch.testing.assert_close(gradient, by_equation, rtol=1e-9, atol=1e-11, msg=leaf)
        assert gradient.abs().max() > 0, leaf


@pytest.mark.parametrize("name", ["bias-qkv", "bias-qk", "weighted-norm", "unweighted-norm", "clip"])
def test_continuous_decoding_gives_the_tokens_of_generate(name):
    spec = ib.ExplicitLMSpec(vocab_size=19, d_model=D_MODEL, n_layers=2, mixer=spec_of(name))
    model = ib.build(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    prompts = [[0, 3, 2], [5], [1, 4, 7, 7]]
    made = ib.generate(model, prompts, max_new_tokens=5).tokens
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=12)
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5))
    texts: dict[int, list[int]] = {}
    for new in decoder.run():
        texts.setdefault(new.request, []).append(new.token)
    assert [texts[number] for number in range(3)] == made.tolist()


# ------------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize("bias", [False, True])
def test_defaults_have_the_projections_alone_initialized_in_order(bias):
    torch.manual_seed(3)
    mixer = ib.build(ib.AttentionSpec(n_heads=4, n_kv_heads=2, bias=bias), d_model=D_MODEL)
    after = torch.rand(1)
    torch.manual_seed(3)
    layers = {"in_proj": torch.nn.Linear(D_MODEL, 64, bias=bias)}
    layers |= {"out_proj": torch.nn.Linear(D_MODEL, D_MODEL, bias=bias)}
    expected = {
        f"{name}.{of}": value for name, layer in layers.items() for of, value in layer.named_parameters()
    }
    found = dict(mixer.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert torch.equal(after, torch.rand(1))  # no further random numbers were drawn
    assert (mixer.causal, mixer.truncates, mixer.needs_token_ids, mixer.is_plain) == (True, True, False, True)


def test_options_keep_the_values_of_the_projections_of_a_default_mixer():
    mixers = []
    for name in ("all", "bidirectional-all"):
        torch.manual_seed(3)
        mixers.append(ib.build(spec_of(name).model_copy(update={"head_dim": None}), d_model=D_MODEL))
    torch.manual_seed(3)
    plain = ib.build(ib.AttentionSpec(n_heads=4, n_kv_heads=2), d_model=D_MODEL)
    assert all(torch.equal(mixer.in_proj.weight, plain.in_proj.weight) for mixer in mixers)


def test_a_specs_default_headline_names_no_options():
    plain = ib.AttentionSpec(n_heads=4).headline(D_MODEL)
    headline = spec_of("bidirectional-all").headline(D_MODEL)
    assert plain == "4 heads of 8, RoPE θ 500000"
    for option in ("bidirectional", "weighted", "0.7", "qkv", "4 value embeddings"):
        assert option in headline
        assert option not in plain


# ------------------------------------------------------------------------------------------ bidirectional


def test_bidirectional_attention_costs_twice_the_scores_of_long_causal_attention():
    causal, both = (ib.AttentionSpec(n_heads=4, causal=causal) for causal in (True, False))
    projections = 2 * D_MODEL * 4 * D_MODEL
    assert causal.flops_per_token(D_MODEL, 99) == projections + 2 * D_MODEL * 100
    assert both.flops_per_token(D_MODEL, 99) == projections + 4 * D_MODEL * 99


def test_a_bidirectional_output_depends_on_later_tokens_of_its_document_alone():
    mixer = make(ib.AttentionSpec(n_heads=4, causal=False), D_MODEL)
    z = torch.randn(1, 6, D_MODEL).double().requires_grad_()
    window = window_of(
        6,
        batch=1,
        valid_BT=torch.tensor([[True, True, False, True, True, True]]),
        documents_BT=torch.tensor([[0, 0, 0, 0, 1, 1]]),
    )
    y = mix(mixer, z, None, window)
    reached = [torch.autograd.grad(y[0, i].sum(), z, retain_graph=True)[0][0].abs().sum(-1) for i in range(6)]
    found = (torch.stack(reached) > 0).int().tolist()
    first, second = [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1]
    assert [found[i] for i in (0, 1, 3)] == [first] * 3
    assert found[4:] == [second] * 2


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_agree_on_bidirectional_attention(backend, padded):
    window = window_of(9, valid_BT=torch.rand(2, 9) > 0.3 if padded else None)
    z = torch.randn(2, 9, D_MODEL).double()
    outputs = []
    for name in ("torch", backend):
        mixer = make(ib.AttentionSpec(n_heads=4, n_kv_heads=2, causal=False, backend=name), D_MODEL)
        with torch.no_grad():
            outputs.append(mix(mixer, z, None, window))
    torch.testing.assert_close(*outputs)


def test_causal_and_bidirectional_mixers_of_a_hybrid_have_their_own_masks():
    causal, both = (ib.AttentionSpec(n_heads=4, causal=causal) for causal in (True, False))
    hybrid = make(ib.HybridSpec(mixers=(causal, both)), D_MODEL)
    z, window = torch.randn(2, 6, D_MODEL).double(), window_of(6, valid_BT=torch.ones(2, 6, dtype=bool))
    first, second = hybrid.mixers
    expected = mix(first, z, None, window_of(6)) + mix(second, z, None, window_of(6))
    torch.testing.assert_close(mix(hybrid, z, None, window), expected)
    assert [part.causal for part in (first, second, hybrid)] == [True, False, False]
    assert not hybrid.truncates
    assert not ib.HybridSpec(mixers=(causal, both)).is_causal
    MIXER_CONTRACTS["causality"](ib.HybridSpec(mixers=(causal, both)), D_MODEL)


def test_a_hybrid_of_causal_mixers_is_causal_and_needs_the_token_ids_of_any():
    plain, tokens = ib.AttentionSpec(n_heads=4), ib.AttentionSpec(n_heads=4, value_embeddings=4)
    hybrid = ib.build(ib.HybridSpec(mixers=(plain, tokens)), d_model=D_MODEL)
    assert (hybrid.causal, hybrid.needs_token_ids) == (True, True)
    assert not ib.build(ib.HybridSpec(mixers=(plain, plain)), d_model=D_MODEL).needs_token_ids


def test_bidirectional_attention_refuses_windows_after_committed_tokens():
    mixer = ib.build(ib.AttentionSpec(n_heads=4, causal=False), d_model=D_MODEL)
    with pytest.raises(ValueError, match=r"follows 3 committed tokens.*causal: true"):
        mixer.prepare(window_of(2, start=3))


def test_the_contract_finds_a_bidirectional_mixer_that_accepts_committed_tokens(monkeypatch):
    monkeypatch.setattr(ib.Attention, "prepare", lambda self, window: None)
    with pytest.raises(ContractError, match="committed tokens"):
        MIXER_CONTRACTS["causality"](spec_of("bidirectional"), D_MODEL)


def test_the_contract_finds_a_spec_that_does_not_state_its_direction(monkeypatch):
    monkeypatch.setattr(ib.AttentionSpec, "is_causal", True)
    with pytest.raises(ContractError, match="is_causal"):
        MIXER_CONTRACTS["causality"](spec_of("bidirectional"), D_MODEL)


def test_bidirectional_attention_has_no_slots_and_no_truncation():
    mixer = ib.build(ib.AttentionSpec(n_heads=4, causal=False), d_model=D_MODEL)
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"slots.*causal: true"):
        mixer.slots(2, device=cpu, dtype=torch.float32, max_seq_len=4)
    with pytest.raises(ValueError, match=r"truncated.*causal: true"):
        mixer.truncate(mixer.initial_state(2, device=cpu, dtype=torch.float32), 0)


def test_a_bidirectional_model_uses_later_tokens_and_trains():
    spec = ib.ImplicitLMSpec(
        vocab_size=11,
        d_model=D_MODEL,
        n_layers=1,
        mixer=spec_of("bidirectional"),
        mlp={"kind": "mlp", "d_ff": 8},
    )
    model = ib.build(spec)
    tokens = torch.randint(11, (2, 6))
    other = torch.cat((tokens[:, :-1], (tokens[:, -1:] + 1) % 11), dim=1)
    first, second = model(tokens).logits, model(other).logits
    assert (first[:, 0] - second[:, 0]).abs().max() > 0
    first.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert "bidirectional" in str(model_tree(spec))


# ------------------------------------------------------------------------------------------ value embeddings


def test_the_ids_of_a_window_follow_its_cuts_and_rows():
    ids = torch.arange(12).view(3, 4)
    window = window_of(4, batch=3, ids_BL=ids)
    assert torch.equal(window.cut(1, 3).ids_BL, ids[:, 1:3])
    assert torch.equal(window.select_rows(torch.tensor([2, 0])).ids_BL, ids[[2, 0]])
    assert window_of(4).cut(1, 3).ids_BL is None


def test_the_context_reads_ids_that_change_in_place():
    mixer = make(spec_of("value-embeddings"), D_MODEL)
    z, ids = torch.randn(2, 3, D_MODEL).double(), torch.zeros(2, 3, dtype=torch.int64)
    state = mixer.initial_state(2, device=z.device, dtype=z.dtype)
    context = mixer.prepare(window_of(3, ids_BL=ids))
    before = mixer(z, None, state, context)
    ids.fill_(2)
    after = mixer(z, None, state, context)
    torch.testing.assert_close(after, mix(mixer, z, None, window_of(3, ids_BL=ids)))
    assert (after - before).abs().max() > 0


def test_weight_norm_keeps_the_output_of_every_option():
    mixer = make(spec_of("all"), D_MODEL)
    z, window = torch.randn(2, 5, D_MODEL).double(), window_of(5, ids_BL=torch.randint(4, (2, 5)))
    expected = mix(mixer, z, None, window)
    add_weight_norm(mixer)
    torch.testing.assert_close(mix(mixer, z, None, window), expected)
    assert spec_of("all").parameter_count(D_MODEL).weight_normed_rows == 48 + 32 + 2 + 4


def test_a_captured_map_reads_the_token_ids_of_the_current_call():
    spec = ib.ImplicitLMSpec(vocab_size=5, d_model=D_MODEL, n_layers=2, mixer=spec_of("value-embeddings"))
    model = ib.build(spec).double()
    backbone, z = model.backbone, torch.randn(2, 3, D_MODEL).double()
    states = model.initial_state(2).layers
    first, second = (
        backbone.bind(
            window_of(3, ids_BL=torch.full((2, 3), token)),
            u_BLU=None,
            states=states,
            start_BLD=z,
            weights=WeightCache(backbone),
        )
        for token in (1, 4)
    )
    buffers = map_graphs._Buffers(first, None)
    captured = buffers.bind(first, with_gradients=False)
    for f in (first, second):
        buffers.load(f)
        torch.testing.assert_close(captured.compute(z), f.compute(z))
    assert (first.compute(z) - second.compute(z)).abs().max() > 0


def test_value_embeddings_without_token_ids_are_refused():
    mixer = ib.build(spec_of("value-embeddings"), d_model=D_MODEL)
    with pytest.raises(ValueError, match=r"token IDs.*ids_BL"):
        mixer.prepare(window_of(3))


def test_a_token_id_beyond_the_table_is_refused():
    mixer = ib.build(spec_of("value-embeddings"), d_model=D_MODEL)
    with pytest.raises(ValueError, match=r"token ID 5 .*5 rows"):
        mixer.prepare(window_of(3, ids_BL=torch.tensor([[0, 1, 5]])))


def test_value_embeddings_support_vmap_over_the_token_ids():
    mixer = make(spec_of("value-embeddings"), D_MODEL)
    z, ids = torch.randn(3, 2, 4, D_MODEL).double(), torch.randint(5, (3, 2, 4))
    found = torch.vmap(lambda z, ids: mix(mixer, z, None, window_of(4, ids_BL=ids)))(z, ids)
    expected = [mix(mixer, one, None, window_of(4, ids_BL=of)) for one, of in zip(z, ids, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_value_embeddings_in_a_narrow_model_are_refused():
    mixer = ib.AttentionSpec(n_heads=2, value_embeddings=11)
    with pytest.raises(ValueError, match=r"d_model 16 .*at least 32"):
        ib.ExplicitLMSpec(vocab_size=11, d_model=16, n_layers=1, mixer=mixer)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"bias": "kv"}, "bias"),
        ({"qk_norm": "layer"}, "qk_norm"),
        ({"qk_norm_eps": 0}, "qk_norm_eps"),
        ({"clip_qkv": 0}, "clip_qkv"),
        ({"value_embeddings": 0}, "value_embeddings"),
        ({"causal": "sometimes"}, "causal"),
    ],
)
def test_an_invalid_option_is_refused_at_its_place(options, place):
    with pytest.raises(ValueError, match=place):
        ib.AttentionSpec(n_heads=4, **options)
