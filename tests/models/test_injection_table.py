"""Injections looked up in a table over the vocabulary equal those computed per token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.injections.projection import pays_by_token
from implicit_blocks.mixers.mamba2 import mixer
from implicit_blocks.mixers.mamba2.mixer import Mamba2


def built(**changes):
    fields = {
        "vocab_size": 7,
        "d_model": 16,
        "n_layers": 2,
        "mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=8),
        "stopping": ib.Stopping(tolerance=1e-9, max_iterations=300),
        "gradient": ib.PhantomSpec(steps=2),
    }
    torch.manual_seed(0)
    return ib.build(ib.ImplicitLMSpec(**(fields | changes))).double()


@pytest.fixture
def tables(monkeypatch):
    """Let Mamba2 read tables as on a GPU; return the list of the maps that models bind."""
    monkeypatch.setattr(Mamba2, "supports_injection_table", lambda mixer, window: window.start == 0)
    seen = []
    bind = ib.ImplicitLM.bind_core

    def recorded(model, *arguments, **named):
        f, start = bind(model, *arguments, **named)
        seen.append(f)
        return f, start

    monkeypatch.setattr(ib.ImplicitLM, "bind_core", recorded)
    return seen


def loss_and_gradients(model, ids, **options):
    out = model(ids, labels=ids, **options)
    model.zero_grad()
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return out.loss.detach(), grads, out.solution.iterations


@pytest.mark.parametrize("changes", [{}, {"z_init": "embedding"}, {"window_length": 8}], ids=str)
def test_training_with_an_injection_table_equals_training_without(tables, monkeypatch, changes):
    ids = torch.randint(7, (6, 20))
    ids[1:, 5:] = ids[1:, :1]  # rows of unequal difficulty leave the batch at different times
    model = built(**changes)
    by_row = loss_and_gradients(model, ids)
    assert [f.by_row for f in tables] == [True]
    assert tables[0].u_BLU.shape == (model.spec.padded_vocab_size, model.backbone.injection_width)
    monkeypatch.setattr(Mamba2, "supports_injection_table", lambda *_: False)
    by_token = loss_and_gradients(model, ids)
    assert not tables[1].by_row
    torch.testing.assert_close(by_row, by_token, rtol=1e-7, atol=1e-10)


def test_windows_and_committed_states_are_equal_with_an_injection_table(tables, monkeypatch):
    ids = torch.randint(7, (8, 24))
    model = built(stopping=ib.Stopping(tolerance=1e-9, max_iterations=10)).eval()  # 40 in evaluation
    with torch.no_grad():
        found = model(ids, window_length=16, return_state=True)
        assert [f.by_row for f in tables] == [True, False]  # the second window follows a state
        monkeypatch.setattr(Mamba2, "supports_injection_table", lambda *_: False)
        expected = model(ids, window_length=16, return_state=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.state.layers, expected.state.layers, rtol=1e-7, atol=1e-10)


def test_injection_tables_follow_selected_rows_and_committed_prefixes(tables):
    ids = torch.randint(7, (8, 24))
    model = built().eval()
    with torch.no_grad():
        f, z = model.bind(
            model.embedding(ids), model.initial_state(8), weights=model.cache_weights(), ids_BL=ids
        )
        whole = f(z)
        assert f.by_row
        rows = torch.tensor([5, 2])
        torch.testing.assert_close(f.select_rows(rows)(z[rows]), whole[rows])
        late = f.after(z[:, :8])
        torch.testing.assert_close(late(z[:, 8:]), whole[:, 8:])


def test_the_fused_operator_after_committed_tokens_gets_the_rows_of_the_table(tables, monkeypatch):
    ids = torch.randint(7, (8, 24))
    model = built().eval()
    given = {}

    def after(projected, u, *, rows_BL, state_BHPN, **weights):
        given.update(u=u, rows=rows_BL)
        return projected[..., : model.backbone.layers[0].mixer.d_inner], state_BHPN

    with torch.no_grad():
        f, z = model.bind(
            model.embedding(ids), model.initial_state(8), weights=model.cache_weights(), ids_BL=ids
        )
        late = f.after(z[:, :8])
        monkeypatch.setattr(mixer, "_fusible", lambda *_: True)
        monkeypatch.setattr(mixer, "eligible_after", lambda *_: True)
        monkeypatch.setattr(mixer.mamba2_mix, "suits", lambda _: True)
        monkeypatch.setattr(mixer, "mamba2_after", after)
        late(z[:, 8:])
    assert torch.equal(given["rows"], ids[:, 8:])
    assert given["u"] is f.u_BLU


def test_injection_tables_are_used_only_for_small_plain_embeddings():
    few = nn.Embedding(60, 32)
    assert pays_by_token(few, 480)
    assert not pays_by_token(few, 479)
    assert not pays_by_token(nn.Embedding(65, 32), 1 << 20)
    few.register_forward_hook(lambda module, given, x: x + torch.randn_like(x))  # NEFTune adds noise this way
    assert not pays_by_token(few, 480)

    class Tuned(nn.Embedding):
        pass

    assert not pays_by_token(Tuned(60, 32), 480)


@pytest.mark.parametrize("kind", ["add", "concat", "diagonal"])
def test_injections_into_the_stream_are_computed_per_token(tables, kind):
    ids = torch.randint(7, (7, 16))  # more tokens than a table would need
    model = built(injection={"kind": kind}).eval()
    with torch.no_grad():
        found = model(ids, loops=3).logits
        alone = torch.cat([model(row[None], loops=3).logits for row in ids])
    assert not any(f.by_row for f in tables)
    torch.testing.assert_close(found, alone)
