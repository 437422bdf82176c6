"""Exit criteria in searches of language models' maps, whose tokens mix."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.windowed import WindowedSearch

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}
CRITERIA = {
    "second_difference": ib.SecondDifferenceExit(tolerance=1e-4),
    "kl": ib.KLExit(tolerance=1e-9),
    "argmax_stability": ib.ArgmaxStabilityExit(calls=6),
    "gate": ib.GateExit(threshold=0.95),
}


@pytest.fixture(params=list(MIXERS))
def model(request):
    """Return a model in float64 that converges."""
    made = ib.build(ib.ImplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, **MIXERS[request.param]))
    with torch.no_grad():
        for block in made.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return made.double().eval()


def bound(model, ids):
    return model.bind(model.embedding(ids), model.initial_state(len(ids)), weights=model.cache_weights())


def search(model, kind, **options):
    gate = torch.linspace(-0.1, 0.1, 16, dtype=torch.float64)
    readout = ib.Readout(
        predict=lambda points: points @ model.embedding.weight.T, gate=lambda points: points @ gate - 1
    )
    stopping = ib.Stopping(tolerance=1e-6, max_iterations=200, scope="prefix")
    return ib.Search(
        solver=ib.Picard(damping=0.9), stopping=stopping, exit=CRITERIA[kind].bind(readout), **options
    )


@pytest.mark.parametrize("kind", CRITERIA)
@torch.no_grad()
def test_an_exit_depends_neither_on_later_tokens_nor_on_other_rows_nor_on_the_working_set(model, kind):
    ids = torch.randint(19, (3, 12), generator=torch.Generator().manual_seed(5))
    whole = search(model, kind, compact=False)(*bound(model, ids))
    assert whole.converged.all()
    compacted = search(model, kind, commit_prefix=4)(*bound(model, ids))
    alone = search(model, kind)(*bound(model, ids[1:2]))
    prefix = search(model, kind)(*bound(model, ids[:, :5]))
    for found, expected, name in (
        (compacted, slice(None), "compacted"),
        (alone, slice(1, 2), "alone"),
        (prefix, (slice(None), slice(5)), "prefix"),
    ):
        assert torch.equal(found.token_iterations, whole.token_iterations[expected]), name
        torch.testing.assert_close(found.z, whole.z[expected], atol=1e-6, rtol=0)


@torch.no_grad()
def test_windows_apply_the_criterion_to_each_window(model):
    ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(5))
    whole = search(model, "kl")(*bound(model, ids))
    windows = WindowedSearch(search(model, "kl"), 4)(*bound(model, ids))
    assert windows.converged.all()
    assert torch.equal(windows.token_iterations[:, :4], whole.token_iterations[:, :4])
    torch.testing.assert_close(windows.z, whole.z, atol=0.02, rtol=0)


@torch.no_grad()
def test_committed_prefixes_of_a_model_with_a_coda_do_not_change_when_tokens_leave():
    found = []
    for commit_prefix in (None, 1):
        torch.manual_seed(0)
        at_evaluation = ib.AtEvaluation(
            solver=ib.PicardSpec(),
            stopping=ib.StoppingOverrides(tolerance=1e-6, max_iterations=60),
            exit=ib.ArgmaxStabilityExitSpec(),
            commit_prefix=commit_prefix,
        )
        spec = ib.ImplicitLMSpec(
            vocab_size=11, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2), weight_norm=False,
            embedding_std=1.0, core_residual=True, injection={"kind": "none"}, coda={"n_layers": 1},
            at_evaluation=at_evaluation,
        )  # fmt: skip
        model = ib.build(spec).double().eval()
        for name, parameter in model.named_parameters():
            if "out_proj" in name or "coda.layers.0.mixer.in_proj" in name:
                parameter.mul_(20)
        found.append(model(torch.randint(11, (8, 12), generator=torch.Generator().manual_seed(3))))
    assert torch.equal(found[0].solution.token_iterations, found[1].solution.token_iterations)
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=1e-10)
