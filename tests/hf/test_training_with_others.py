"""transformers' Trainer and peft's LoRA train both families without changes."""

from __future__ import annotations

import pytest
import torch

from implicit_blocks.__main__ import main

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # after importorskip


class Cycles(torch.utils.data.Dataset):
    """Counting modulo 7 from a random start, which is learned quickly."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + index) % 7
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trainer_of(model, folder, **arguments):
    common = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0, "logging_steps": 5}
    settings = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 64,
        "learning_rate": 1e-2,
        "max_steps": 15,
        "save_strategy": "no",
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **(common | settings | arguments)),
        train_dataset=Cycles(),
        eval_dataset=Cycles(),
    )


@pytest.mark.parametrize("kind", ["implicit", "accumulating"])
def test_transformers_trainer_trains(family, kind, tiny_model, tmp_path):
    more = {"gradient_accumulation_steps": 2, "max_steps": 8} if kind == "accumulating" else {}
    trainer = trainer_of(tiny_model(family).train(), tmp_path / "run", **more)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.85 * before
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    batch = {name: tensor[None] for name, tensor in Cycles()[3].items()}
    with torch.no_grad():
        expected = trainer.model.eval()(**batch)
        assert torch.equal(loaded(**batch).logits, expected.logits)


# peft uses a deprecated name of transformers
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_and_saves(family, tiny_model, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = tiny_model(family)
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    targets = ["mixer.in_proj", "mixer.out_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * 2 * 2
    assert all("lora_" in name for name in trainable)
    trainer = trainer_of(model.train(), tmp_path / "run", max_steps=10)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    model.eval().save_pretrained(tmp_path / "adapter")
    ids = Cycles()[2]["input_ids"][None]
    with torch.no_grad():
        expected = model(ids).logits
        again = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(ids).logits, expected)
        assert not torch.allclose(tiny_model(family)(ids).logits, expected, atol=1e-3)
    state = again.get_base_model().state_dict()
    for name, tensor in frozen.items():
        kept = name if name in state else name.replace("_proj.", "_proj.base_layer.")
        assert torch.equal(state[kept], tensor), name
    tokens = again.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=18)
    assert tokens.shape == (1, 15)


def adapted(base):
    """Add random adapters to a model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["mixer.in_proj", "mixer.out_proj"]
    settings = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.3)
    return model


# peft uses a deprecated name of transformers
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("safe", [False, True], ids=["in-place", "safe"])
def test_lora_merges_into_normed_weights(family, tiny_model, tmp_path, safe):
    base = tiny_model(family)
    ids = Cycles()[2]["input_ids"][None]
    with torch.no_grad():
        plain = base(ids).logits
        model = adapted(base)
        expected = model(ids).logits
        assert (plain - expected).abs().max() > 5e-3
        model.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
        model.unmerge_adapter()
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
        merged = model.merge_and_unload(safe_merge=safe)
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not any("lora" in name for name in merged.state_dict())
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-5, rtol=1e-4)


# peft uses a deprecated name of transformers
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_merges_into_folded_weights(family, tiny_model, tmp_path):
    normed = tiny_model(family)
    normed.save_pretrained(tmp_path / "normed")
    assert main(["convert", str(tmp_path / "normed"), str(tmp_path / "folded"), "--fold-weight-norm"]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    ids = Cycles()[2]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(base(ids).logits, normed(ids).logits, atol=1e-5, rtol=1e-4)
        model = adapted(base)
        expected = model(ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-4)
