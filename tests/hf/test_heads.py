"""Classification heads, gradient checkpointing, and objectives as the loss of the transformers classes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import implicit_blocks as ib

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402  # after the skip
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from implicit_blocks.hf import from_library, to_library  # noqa: E402  # the same
from implicit_blocks.hf.tokenizer import load_tokenizer, token_fields  # noqa: E402  # the same

HEADS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
PAD = 18


@pytest.fixture
def language_model(family, tiny_model, tmp_path) -> Any:
    """Save a language model whose rows are padded with token 18; return its folder."""
    model = tiny_model(family)
    model.config.pad_token_id = PAD
    model.save_pretrained(tmp_path / "language")
    return tmp_path / "language"


@pytest.mark.parametrize(
    ("family", "kind"), [("mamba2", "sequence"), ("attention", "token")], indirect=["family"]
)
def test_a_head_loads_the_language_model_and_survives_saving(kind, language_model, ids, tmp_path):
    head, report = HEADS[kind].from_pretrained(language_model, num_labels=3, output_loading_info=True)
    score = {"score.weight"} if kind == "sequence" else {"score.weight", "score.bias"}
    assert report["missing_keys"] == score
    assert 0.005 < head.score.weight.std() < 0.05
    language = AutoModelForCausalLM.from_pretrained(language_model)
    assert torch.equal(head.get_input_embeddings().weight, language.get_input_embeddings().weight)
    head.save_pretrained(tmp_path / "head")
    again = HEADS[kind].from_pretrained(tmp_path / "head")
    assert again.config.num_labels == 3
    with torch.no_grad():
        found = head(ids).logits
        assert torch.equal(again(ids).logits, found)
        assert found.shape == ((3, 3) if kind == "sequence" else (3, 9, 3))
        half = HEADS[kind].from_pretrained(tmp_path / "head", dtype=torch.bfloat16)
        assert half(ids, max_iterations=8).logits.isfinite().all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_row_s_classes(side, language_model, ids):
    def padded(row: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(row, (3, 0) if side == "left" else (0, 3), value=fill)

    batch = torch.stack([padded(ids[0], PAD), ids.new_tensor([*ids[1], *ids[2][:3]])])
    mask = torch.stack([padded(torch.ones_like(ids[0]), 0), torch.ones(12, dtype=torch.int64)])
    with torch.no_grad():
        of_sequences = HEADS["sequence"].from_pretrained(language_model, num_labels=3)
        found, alone = of_sequences(batch, attention_mask=mask).logits[0], of_sequences(ids[:1]).logits[0]
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)
        of_tokens = HEADS["token"].from_pretrained(language_model, num_labels=3).eval()
        real = of_tokens(batch, attention_mask=mask).logits[0][mask[0].bool()]
        torch.testing.assert_close(real, of_tokens(ids[:1]).logits[0], atol=1e-5, rtol=1e-4)


def test_the_loss_of_a_head_reaches_all_parameters(language_model, ids):
    for kind, labels in (("sequence", torch.tensor([0, 2, 1])), ("token", ids % 3)):
        head = HEADS[kind].from_pretrained(language_model, num_labels=3).train()
        head(ids, labels=labels).loss.backward()
        without = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()]
        assert not without


def test_several_rows_without_a_padding_token_are_refused(language_model, ids):
    head = HEADS["sequence"].from_pretrained(language_model, num_labels=3, pad_token_id=None)
    with pytest.raises(ValueError, match="no padding token"):
        head(ids)


def test_the_pipeline_classifies_texts_in_batches(family, tiny_model, tokenizer_file, tmp_path):
    tokenizer = load_tokenizer(tokenizer_file)
    model = tiny_model(family, vocab_size=300)
    for name, token in token_fields(tokenizer).items():
        setattr(model.config, name, token)
    model.save_pretrained(tmp_path / "language")
    labels = {0: "bad", 1: "good"}
    head = HEADS["sequence"].from_pretrained(tmp_path / "language", id2label=labels)
    torch.nn.init.normal_(head.score.weight)
    head.save_pretrained(tmp_path / "head")
    tokenizer.save_pretrained(tmp_path / "head")
    classify = pipeline("text-classification", model=str(tmp_path / "head"), device="cpu")
    texts = ["The sun and the wind", "I", "To clean the"]
    together, alone = classify(texts, batch_size=3), [classify(text)[0] for text in texts]
    assert [each["label"] for each in together] == [each["label"] for each in alone]
    assert [each["score"] for each in together] == pytest.approx([each["score"] for each in alone], abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "head").padding_side == "left"


def test_resizing_the_vocabulary_of_a_head_changes_its_spec(language_model, ids, tmp_path):
    head = HEADS["token"].from_pretrained(language_model, num_labels=3)
    head.resize_token_embeddings(24, mean_resizing=False)
    head.save_pretrained(tmp_path / "head")
    assert HEADS["token"].from_pretrained(tmp_path / "head").config.model_spec.vocab_size == 24


# ------------------------------------------------------------------------------------ gradient checkpointing


def _gradients(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of the loss, and the bytes of the activations kept for them."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(family, kind, tiny_model, tiny_spec, ids):
    spec = tiny_spec(family)
    if kind == "explicit":
        known = set(ib.ExplicitLMSpec.model_fields) - {"kind", "weight_norm"}
        spec = ib.ExplicitLMSpec(**{name: value for name, value in spec if name in known})
    torch.manual_seed(0)
    model = from_library(ib.build(spec)).train()
    plain, kept = _gradients(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames the methods
        model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing
        again, less = _gradients(model, ids)
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
    assert less < 0.7 * kept
    assert again.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert _gradients(model, ids)[1] == kept


def test_checkpointing_some_layers_is_refused(tiny_model):
    with pytest.raises(ValueError, match="every_n_layers is 2"):
        tiny_model("attention")._set_gradient_checkpointing(True, every_n_layers=2)


# ------------------------------------------------------------------------------------ objectives

LOOPS: dict[str, Any] = {
    "depth": {"kind": "fixed", "loops": 3},
    "gradient": {"kind": "last_loops", "loops": 3},
    "exit_gate": True,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "iterates": {"kind": "iterates", "at": [1, 2, "last"], "weights": [0.2, 0.3, 0.5]},
    "exit_mixture": {"kind": "exit_mixture"},
    "exit_expectation": {"kind": "exit_expectation", "entropy_weight": 0.1},
}


def looped(tiny_spec: Any, family: str, **changes: Any) -> Any:
    kept = {name: value for name, value in tiny_spec(family) if name in {"mixer", "mlp", "d_model"}}
    spec = ib.ImplicitLMSpec(**({"vocab_size": 19, "n_layers": 1} | LOOPS | kept | changes))
    torch.manual_seed(0)
    return from_library(ib.build(spec)).train()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_loss_in_training_is_the_objective(objective, tied, family, tiny_spec, ids):
    model = looped(tiny_spec, family, objective=OBJECTIVES[objective], tie_embeddings=tied)
    labels = ids.clone()
    labels[0, 3:6] = -100
    found = model(ids, labels=labels, num_items_in_batch=40)
    library = to_library(model)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = library(ids, labels=shifted)
    torch.testing.assert_close(found.loss, expected.loss * (shifted != -100).sum() / 40)
    torch.testing.assert_close(model(ids, labels=labels).loss, expected.loss)
    found.loss.backward()
    assert model.lm_head.weight.grad.any()
    model.eval()
    library.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels=labels).loss, library(ids, labels=shifted).loss)


PENALTIES: dict[str, dict[str, Any]] = {
    "residual": {"gradient": {"kind": "last_loops", "loops": 2, "residual_weight": 3.0}},
    "residual and objective": {
        "gradient": {"kind": "last_loops", "loops": 3, "residual_weight": 3.0},
        "objective": OBJECTIVES["iterates"],
    },
    "jacobian": {"gradient": {"kind": "jacobian_penalty", "weight": 2.0}, "exit_gate": False},
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_loss_in_training_contains_the_penalty(penalty, family, tiny_spec, ids):
    model = looped(tiny_spec, family, **PENALTIES[penalty]).double()
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    library = to_library(model)
    torch.manual_seed(1)  # of the directions in which the Jacobian is penalized
    expected = library(ids, labels=shifted)
    total = expected.loss + expected.solution.penalty.mean()
    total.backward()
    torch.manual_seed(1)
    found = model(ids, labels=ids)
    found.loss.backward()
    assert total > expected.loss + 1e-3
    torch.testing.assert_close(found.loss, total)
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, library.embedding.weight.grad)
    torch.manual_seed(1)
    share = model(ids, labels=ids, num_items_in_batch=40).loss
    torch.testing.assert_close(share, total * (shifted != -100).sum() / 40)
