"""Language models: windows, independence of rows, weights, initialization, dropout, precision, loss."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.layers import WeightNorm

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}
LENGTH = 11


def spec_of(mixer, *, tolerance=1e-12, max_iterations=400, **changes):
    stopping = ib.StoppingOverrides(tolerance=tolerance, max_iterations=max_iterations)
    at_evaluation = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.9), stopping=stopping)
    fields = {"vocab_size": 19, "d_model": 16, "n_layers": 2, "at_evaluation": at_evaluation}
    return ib.ImplicitLMSpec(**(fields | MIXERS[mixer] | changes))


def contracting(mixer, dtype=torch.float64, **changes):
    """Return a model that converges fast: its layers read z weakly and write their output strongly."""
    model = ib.build(spec_of(mixer, **changes))
    with torch.no_grad():
        for block in model.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.05)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(30.0)
    return model.to(dtype)


def tokens(rows=3, length=LENGTH):
    return torch.randint(19, (rows, length), generator=torch.Generator().manual_seed(5))


# ------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "error"), [(torch.float64, 1e-12, 1e-9), (torch.float32, 1e-6, 1e-4)]
)
def test_logits_do_not_depend_on_the_window_length(mixer, dtype, tolerance, error):
    model = contracting(mixer, dtype, tolerance=tolerance).eval()
    ids = tokens()
    with torch.no_grad():
        whole = model(ids)
        assert whole.solution.converged.all()
        for window_length in (1, 3, 4, 5, LENGTH - 1):  # around chunk_size, and at both ends
            parts = model(ids, window_length=window_length)
            assert parts.solution.converged.all()
            assert parts.solution.token_iterations.shape == ids.shape
            assert (parts.logits - whole.logits).abs().max() <= error
        halves = model(ids[:, :4], return_state=True)
        rest = model(ids[:, 4:], state=halves.state)
    assert (torch.cat((halves.logits, rest.logits), 1) - whole.logits).abs().max() <= error


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_window_never_recomputes_earlier_tokens(mixer):
    model = contracting(mixer, tolerance=1e-6).eval()
    lengths = []
    forward, advance = (
        type(model.backbone.blocks()[0].mixer).forward,
        type(model.backbone.blocks()[0].mixer).advance,
    )

    def watch(method):
        def call(self, z, u, state, context):
            lengths.append(z.shape[1])
            return method(self, z, u, state, context)

        return call

    mixer_type = type(model.backbone.blocks()[0].mixer)
    with (
        mock.patch.object(mixer_type, "forward", watch(forward)),
        mock.patch.object(mixer_type, "advance", watch(advance)),
        torch.no_grad(),
    ):
        out = model(tokens(1), window_length=2)
    assert set(lengths) == {2, 1}  # eleven tokens: five windows of two tokens, one of one
    starts = range(0, LENGTH, 2)
    per_window = [int(out.solution.token_iterations[0, s : s + 2].max()) + 1 for s in starts]
    assert len(lengths) == 2 * sum(per_window)  # layers × (iterations + the last call)


@pytest.mark.parametrize("mixer", MIXERS)
def test_training_calls_the_map_s_plus_k_times_and_evaluation_s_plus_1(mixer):
    model = contracting(
        mixer, stopping=ib.Stopping(tolerance=0.0, max_iterations=6), max_iterations=9, tolerance=0.0
    )
    calls = []
    model.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    model.train()(tokens(), labels=tokens())
    assert len(calls) == 6 + 4
    calls.clear()
    with torch.no_grad():
        model.eval()(tokens())
    assert len(calls) == 9 + 1


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_reserved_max_seq_len_does_not_change_logits(mixer):
    model = contracting(mixer).eval()
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        state = model.initial_state(3, max_seq_len=LENGTH + 3)
        found = []
        for part in ids.split([5, 1, 1, 4], dim=1):
            out = model(part, state=state, return_state=True)
            found.append(out.logits)
            state = out.state
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=0)
    assert state.length == LENGTH


def test_ift_gradients_through_windows_equal_those_of_one_window():
    tight = ib.Stopping(tolerance=1e-12, max_iterations=300)
    for mixer in MIXERS:
        gradient = ib.ImplicitFunctionSpec(stopping=tight)
        model = contracting(mixer, gradient=gradient, stopping=tight).train()
        ids, labels = tokens(), tokens()
        whole = torch.autograd.grad(model(ids, labels=labels).loss, list(model.parameters()))
        parts = torch.autograd.grad(model(ids, labels=labels, window_length=4).loss, list(model.parameters()))
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


# ------------------------------------------------------------------------------------------- independence


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_a_rows_answer_does_not_depend_on_batch_mates_later_tokens_or_padding(mixer, tolerance):
    """Also at a loose tolerance, where a joint stopping rule would change answers."""
    model = contracting(mixer, tolerance=tolerance).eval()
    ids = tokens()
    with torch.no_grad():
        together = model(ids)
        for row in range(3):
            alone = model(ids[row : row + 1])
            torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-9, rtol=0)
            assert torch.equal(alone.solution.token_iterations[0], together.solution.token_iterations[row])
        shorter = model(ids[:, :6])
        torch.testing.assert_close(shorter.logits, together.logits[:, :6], atol=1e-9, rtol=0)
        for left in (True, False):
            real = slice(4, None) if left else slice(0, LENGTH)
            padded = torch.full((3, LENGTH + 4), 7)
            padded[:, real] = ids
            mask = torch.zeros_like(padded)
            mask[:, real] = 1
            found = model(padded, attention_mask=mask)
            torch.testing.assert_close(found.logits[:, real], together.logits, atol=1e-9, rtol=0)
            assert torch.equal(found.solution.token_iterations[:, real], together.solution.token_iterations)


@pytest.mark.parametrize("mixer", MIXERS)
def test_padded_prompts_continue_as_they_would_alone(mixer):
    model = contracting(mixer).eval()
    ids, more = tokens(), tokens(3, 4)
    lengths = [3, 8, 11]
    with torch.no_grad():
        alone = [
            model(torch.cat((ids[row : row + 1, :n], more[row : row + 1]), 1)).logits[0, n:]
            for row, n in enumerate(lengths)
        ]
        for left in (True, False):
            order = torch.arange(LENGTH)
            mask = torch.stack([order >= LENGTH - n if left else order < n for n in lengths])
            prompt = torch.zeros_like(ids)
            for row, n in enumerate(lengths):
                prompt[row, mask[row]] = ids[row, :n]
            state = model(prompt, attention_mask=mask, return_state=True, window_length=4).state
            found = model(more, state=state, window_length=1).logits
            torch.testing.assert_close(found, torch.stack(alone), atol=1e-9, rtol=0)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("window_length", [None, 1, 4])
def test_packed_documents_do_not_affect_each_other(mixer, window_length):
    model = contracting(mixer).eval()
    ids = tokens(2)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4]])
    with torch.no_grad():
        packed = model(ids, documents=documents, window_length=window_length).logits
        for row in range(2):
            for document in documents[row].unique():
                where = documents[row] == document
                alone = model(ids[row : row + 1, where]).logits[0]
                torch.testing.assert_close(packed[row, where], alone, atol=1e-9, rtol=0)


def test_selected_rows_of_a_state_continue_unchanged():
    for mixer in MIXERS:
        model = contracting(mixer).eval()
        with torch.no_grad():
            state = model(tokens(), return_state=True).state
            more = tokens(3, 2)
            rows = torch.tensor([2, 0, 2])
            found = model(more[rows], state=state.select_rows(rows, model.state_blocks())).logits
            torch.testing.assert_close(found, model(more, state=state).logits[rows], atol=1e-9, rtol=0)


# ------------------------------------------------------------------------------------------- training

SOLVERS = {
    "picard": ib.PicardSpec(),
    "damped": ib.PicardSpec(damping=0.8),
    "anderson": ib.AndersonSpec(memory=3),
}
GRADIENTS = {
    "phantom": ib.PhantomSpec(steps=2),
    "jacobian-free": ib.PhantomSpec(steps=1, damping=1.0),
    "unrolled": ib.UnrolledSpec(steps=5),
    "checkpointed": ib.UnrolledSpec(steps=5, checkpointing=True),
    "implicit-function": ib.ImplicitFunctionSpec(),
    "implicit-function-anderson": ib.ImplicitFunctionSpec(solver=ib.AndersonSpec()),
}


# Every solver with every gradient; alternating mixers also give every mixer every solver and every gradient.
COMBINATIONS = [
    (list(MIXERS)[(row + column) % len(MIXERS)], solver, gradient)
    for row, solver in enumerate(SOLVERS)
    for column, gradient in enumerate(GRADIENTS)
]


@pytest.mark.parametrize(
    ("mixer", "solver", "gradient"), COMBINATIONS, ids=["-".join(parts) for parts in COMBINATIONS]
)
def test_every_pair_of_mixer_solver_and_gradient_trains(mixer, solver, gradient):
    model = contracting(
        mixer,
        torch.float32,
        solver=SOLVERS[solver],
        gradient=GRADIENTS[gradient],
        stopping=ib.Stopping(tolerance=0.02, max_iterations=12),
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(4)
    losses = []
    for _ in range(6):
        out = model(ids, labels=ids)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_explicit_model_is_built_from_the_same_fields_and_trains():
    for mixer in MIXERS:
        implicit = spec_of(mixer)
        shared = ib.ExplicitLMSpec.model_fields.keys() - {"weight_norm", "kind"}
        fields = implicit.model_dump(include=shared)
        explicit = ib.build(ib.ExplicitLMSpec(**fields))
        out = explicit(tokens(), labels=tokens())
        assert out.solution is None
        out.loss.backward()
        with torch.no_grad():
            whole = explicit.eval()(tokens()).logits
            torch.testing.assert_close(
                explicit(tokens(), window_length=3).logits, whole, atol=1e-5, rtol=1e-4
            )


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("gradient", [ib.PhantomSpec(), ib.UnrolledSpec(steps=3, checkpointing=True)])
def test_weight_norm_is_computed_once_per_forward_pass(gradient):
    model = contracting("attention", gradient=gradient)
    matrices = sum(isinstance(m, WeightNorm) for m in model.modules())
    assert matrices == 2 * 5 + 1
    with mock.patch.object(WeightNorm, "compute", side_effect=WeightNorm.compute) as compute:
        out = model.train()(tokens(), labels=tokens())
        assert compute.call_count == matrices
        out.loss.backward()
        assert compute.call_count == matrices
        compute.reset_mock()
        with torch.no_grad():
            model.eval()(tokens(), window_length=1)
        assert compute.call_count == matrices


def test_weight_norm_gives_each_row_the_norm_of_its_gain():
    model = ib.build(spec_of("mamba2"))
    projection = model.backbone.blocks()[0].mixer.in_proj
    with torch.no_grad():
        projection.parametrizations.weight.original0.fill_(2.5)
    torch.testing.assert_close(projection.weight.norm(dim=1), torch.full((len(projection.weight),), 2.5))


@pytest.mark.parametrize("mixer", MIXERS)
def test_deepcopy_and_state_dict_reproduce_logits(mixer):
    model = contracting(mixer).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        assert torch.equal(copy.deepcopy(model)(tokens()).logits, expected)
        other = ib.build(model.spec).double().eval()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(tokens()).logits, expected)
    model.train()(tokens(), labels=tokens()).loss.backward()
    clone = copy.deepcopy(model)  # also after a training pass
    assert torch.equal(clone(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_built_on_meta_is_initialized_as_on_the_cpu(mixer):
    with torch.device("meta"):
        model = ib.build(spec_of(mixer))
    assert all(p.is_meta for p in model.parameters())
    model = model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    other = ib.build(spec_of(mixer))
    other_after = copy.deepcopy(other)
    torch.manual_seed(3)
    other_after.reset_parameters()
    for a, b in zip(model.parameters(), other_after.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_are_initialized_at_the_documented_scales():
    spec = spec_of("attention", d_model=64, n_layers=3, vocab_size=500, embedding_std=0.02)
    model = ib.build(spec)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    scale = (2 * 3) ** -0.5
    block = model.backbone.blocks()[0]
    assert block.mixer.in_proj.weight.abs().max().item() == pytest.approx(1 / 8, rel=0.02)
    assert block.mixer.out_proj.weight.abs().max().item() == pytest.approx(scale / 8, rel=0.02)
    assert block.mlp.out_proj.weight.abs().max().item() == pytest.approx(scale / 24**0.5, rel=0.05)
    unscaled = ib.build(spec.model_copy(update={"scale_residual_init": False}))
    assert unscaled.backbone.blocks()[0].mixer.out_proj.weight.abs().max().item() == pytest.approx(
        1 / 8, rel=0.02
    )
    mamba = ib.build(spec_of("mamba2", d_model=64)).backbone.blocks()[0].mixer
    assert mamba.A_log.exp().min() >= 1
    assert mamba.A_log.exp().max() <= 16
    dt = nn.functional.softplus(mamba.dt_bias)
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 1.01e-1
    assert (mamba.D == 1).all()


def test_decay_groups_contain_every_parameter_once():
    for mixer in MIXERS:
        model = ib.build(spec_of(mixer))
        decayed, others = model.decay_groups()
        assert (
            len({id(p) for p in decayed + others}) == len(decayed + others) == len(list(model.parameters()))
        )
        assert all(p.ndim >= 2 for p in decayed)
        assert any(p is model.embedding.weight for p in decayed)
        gains = {id(p) for name, p in model.named_parameters() if name.endswith("original0")}
        assert gains
        assert not gains & {id(p) for p in decayed}  # although they have two dimensions
        assert not any(
            name.endswith("original1") and p in set(others) for name, p in model.named_parameters()
        )


@pytest.mark.parametrize("gradient", [ib.PhantomSpec(), ib.UnrolledSpec(steps=3, checkpointing=True)])
def test_dropout_masks_are_fixed_within_a_pass_and_differ_between_passes(gradient):
    """With fixed masks the iteration still converges."""
    model = contracting(
        "attention", dropout=0.5, stopping=ib.Stopping(tolerance=1e-10, max_iterations=300)
    ).train()
    first = model(tokens())
    assert first.solution.converged.all()
    assert not torch.equal(first.logits, model(tokens()).logits)
    model.reconfigure(model.spec.model_copy(update={"gradient": gradient}))
    model(tokens(), labels=tokens()).loss.backward()
    model.eval()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bfloat16_weights_and_autocast_stay_close_to_float32(mixer):
    exact = contracting(mixer, torch.float32, tolerance=1e-2)
    low = copy.deepcopy(exact).to(torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        expected = exact.eval()(ids).logits
        found = low.eval()(ids, window_length=4)
        assert found.logits.dtype == torch.float32
        assert (found.logits - expected).norm() < 0.1 * expected.norm()
    low.train()(ids, labels=ids).loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = exact.train()(ids, labels=ids)
    out.loss.backward()
    assert (out.logits - exact(ids).logits).norm() < 0.1 * expected.norm()
    assert all(p.grad.isfinite().all() for p in [*low.parameters(), *exact.parameters()])


def test_one_unrolled_step_from_the_embedding_equals_the_explicit_model():
    model = ib.build(spec_of("attention", z_init="embedding", stopping=ib.Stopping(max_iterations=1)))
    with torch.no_grad():
        model.injection.proj.bias.zero_()
        model.injection.proj.parametrizations.weight.original0.zero_()
    explicit_fields = model.spec.model_dump(include=ib.ExplicitLMSpec.model_fields.keys() - {"kind"})
    explicit = ib.build(ib.ExplicitLMSpec(**explicit_fields))
    explicit.load_state_dict({k: v for k, v in model.state_dict().items() if "injection" not in k})
    model.reconfigure(model.spec.model_copy(update={"gradient": ib.UnrolledSpec(steps=1)}))
    torch.testing.assert_close(model.train()(tokens()).logits, explicit(tokens()).logits)


def test_an_untied_head_covers_the_padded_vocabulary_and_gets_gradients():
    model = ib.build(spec_of("attention", tie_embeddings=False, pad_vocab_to=16))
    out = model(tokens(), labels=tokens())
    assert out.logits.shape == (3, LENGTH, 32)
    out.loss.backward()
    assert model.head.weight.grad is not None


def test_reconfigure_changes_the_search_and_refuses_other_fields():
    model = ib.build(spec_of("attention"))
    model.reconfigure(model.spec.model_copy(update={"stopping": ib.Stopping(max_iterations=3)}))
    assert model.stopping.max_iterations == 3
    with pytest.raises(ValueError, match="d_model"):
        model.reconfigure(model.spec.model_copy(update={"d_model": 32}))


def test_loss_aligns_labels_by_position_and_ignores_minus_100():
    model = contracting("attention").eval()
    ids, labels = tokens(), tokens()
    labels[:, ::2] = -100
    with torch.no_grad():
        out = model(ids, labels=labels)
        expected = nn.functional.cross_entropy(
            out.logits[:, 1::2].reshape(-1, 19), labels[:, 1::2].reshape(-1)
        )
        torch.testing.assert_close(out.loss, expected)
        assert model(ids, labels=torch.full_like(ids, -100)).loss == 0


def test_loss_without_logits_equals_loss_with_logits():
    model = contracting("attention", tie_embeddings=False).train()
    ids, labels = tokens(), tokens()
    labels[:, ::3] = -100
    whole, chunked = model(ids, labels=labels), model(ids, labels=labels, return_logits=False)
    assert chunked.logits is None
    assert torch.equal(chunked.predictions, whole.logits.argmax(-1))
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(whole.loss, parameters),
        torch.autograd.grad(chunked.loss, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-7)
    with pytest.raises(ValueError, match="labels"):
        model(ids, return_logits=False)


def test_gpu_width_padding_is_disabled_for_wrapped_layers():
    """A wrapper such as a low-rank adapter adds to the layer's output and relies on its width."""
    mlp = contracting("attention").backbone.blocks()[0].mlp
    mlp.choose_padding()
    assert (mlp.gate_proj.pad_out, mlp.up_proj.pad_out, mlp.out_proj.pad_in) == (True, True, True)
    inner = mlp.up_proj
    mlp.up_proj = nn.Sequential(inner)
    mlp.choose_padding()
    assert not any(layer.pad_out or layer.pad_in for layer in (mlp.gate_proj, inner, mlp.out_proj))
