"""Fine-tuning by TRL and peft on exported classes: answers only, one adapter in every iteration, DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_blocks.hf.tokenizer import load_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from transformers import AutoModelForCausalLM  # noqa: E402  # after importorskip

# TRL and peft use deprecated names of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TARGETS = ["mixer.in_proj", "mixer.out_proj"]
PAIRS = [("sky", "blue"), ("grass", "green"), ("snow", "white"), ("coal", "black")]


@pytest.fixture
def folder(family: str, tiny_model: Any, tmp_path: Path) -> Path:
    """Return the folder of a tiny model on bytes, with a chat template."""
    from trainer.data.tokenizing.chat import CHATML

    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = CHATML
    tiny_model(family, vocab_size=257).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder.parent / "run"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
    }


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_loop_has_the_same_adapter_and_merging_keeps_the_outputs(
    family: str, tiny_model: Any, steps: int
) -> None:
    base = tiny_model(family)
    settings = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, settings).eval()
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    ids = torch.arange(12)[None] % 7
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.3)
        expected = model(ids, loops=steps).logits
        counts = {name: calls.count(name) for name in calls}
        merged = model.merge_and_unload()
        found = merged(ids, loops=steps).logits
    assert len(counts) == 2 * len(TARGETS)  # two layers
    assert len(set(counts.values())) == 1
    assert min(counts.values()) >= steps
    assert float((found - expected).abs().max()) <= 1e-5


@pytest.mark.slow
def test_trl_tunes_an_adapter_on_the_answers(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="TRL reads datasets")
    trl = pytest.importorskip("trl", reason="trl is not installed")
    rows = [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in PAIRS * 4]
    tokenizer = load_tokenizer(folder)
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=trl.SFTConfig(max_length=96, assistant_only_loss=True, **common(folder)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    answers = [f"{answer}<|im_end|>" for _, answer in PAIRS]
    for labels in batch["labels"]:
        assert tokenizer.decode(labels[labels != -100]) in answers
    trainer.train()
    model = trainer.model.eval()
    ids = batch["input_ids"][:1].to(model.device)
    with torch.no_grad():
        expected = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
    assert float((merged - expected).abs().max()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_trl_optimizes_preferences(folder: Path, adapter: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="TRL reads datasets")
    trl = pytest.importorskip("trl", reason="trl is not installed")
    rows = [
        {"prompt": [turn("user", q)], "chosen": [turn("assistant", a)], "rejected": [turn("assistant", "no")]}
        for q, a in PAIRS * 4
    ]
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=trl.DPOConfig(max_length=96, logging_steps=1, **(common(folder) | {"max_steps": 8})),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
        peft_config=peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM") if adapter else None,
    )
    trainer.train()
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=0.02)
    assert losses[-1] < losses[0]
    assert float(trainer.state.log_history[-2]["rewards/margins"]) > 0


def test_an_adapter_is_merged_while_gradients_are_enabled(family: str, tiny_model: Any) -> None:
    settings = peft.LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(family), settings).eval()
    ids = torch.arange(12)[None] % 7
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.3)
        expected = model(ids, loops=2).logits
    merged = model.merge_and_unload()
    with torch.no_grad():
        assert float((merged(ids, loops=2).logits - expected).abs().max()) <= 1e-5
