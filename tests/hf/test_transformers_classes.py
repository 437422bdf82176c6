"""The transformers classes: saving, loading, caches, generation, arguments."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

import implicit_blocks as ib

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402  # after the skip

from implicit_blocks.hf import ImplicitCache, from_library, register, to_library  # noqa: E402  # the same
from implicit_blocks.hf.configuration import ImplicitLlamaConfig, ImplicitMamba2Config  # noqa: E402  # the same

NAMES = {"mamba2": "ImplicitMamba2", "attention": "ImplicitLlama"}
CACHES = {"mamba2": "cache_params", "attention": "past_key_values"}
FEW = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=1e-6, max_iterations=12))
"""For comparisons of equal computations, which need not converge."""


def test_the_auto_classes_are_registered(family, tiny_spec):
    register()
    register()  # repeated registration has no effect
    config_class = {"mamba2": ImplicitMamba2Config, "attention": ImplicitLlamaConfig}[family]
    config = config_class.from_spec(tiny_spec(family))
    assert type(AutoModelForCausalLM.from_config(config)).__name__ == f"{NAMES[family]}ForCausalLM"
    assert type(AutoModel.from_config(config)).__name__ == f"{NAMES[family]}Model"
    assert ("mamba" in f"{NAMES[family]}ForCausalLM".lower()) == (family == "mamba2")
    assert config.layer_types == [{"mamba2": "linear_attention", "attention": "full_attention"}[family]] * 2
    assert (
        config_class().model_spec.d_model == 768
    )  # transformers builds a default configuration to compare with


def test_logits_and_initialization_equal_the_librarys(family, tiny_spec, ids):
    spec = tiny_spec(family, at_evaluation=FEW)
    config = {"mamba2": ImplicitMamba2Config, "attention": ImplicitLlamaConfig}[family].from_spec(spec)
    torch.manual_seed(3)
    library = ib.build(spec).eval()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, library(ids).logits)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in library.parameters())


@pytest.mark.parametrize("kind", ["implicit", "explicit", "untied"])
def test_a_saved_folder_loads_unchanged(family, kind, tiny_spec, ids, tmp_path):
    spec = tiny_spec(family, tie_embeddings=kind != "untied", at_evaluation=FEW)
    if kind == "explicit":
        fields = {
            n: v for n, v in spec if n in ib.ExplicitLMSpec.model_fields and n not in ("kind", "weight_norm")
        }
        spec = ib.ExplicitLMSpec(**fields)
    model = from_library(ib.build(spec).eval(), eos_token_id=3)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.model_spec == spec
    assert loaded.config.eos_token_id == 3
    with torch.no_grad():
        expected = model(ids)
        assert torch.equal(loaded(ids).logits, expected.logits)
        base = AutoModel.from_pretrained(tmp_path)
        torch.testing.assert_close(model.lm_head(base(ids).last_hidden_state), expected.logits)
    library = to_library(loaded)
    assert next(library.parameters()).data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    with torch.no_grad():
        torch.testing.assert_close(library.eval()(ids).logits, expected.logits)


def test_missing_weights_are_initialized_and_others_loaded(family, tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.lm.injection.proj.parametrizations.weight.original1"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {lost}
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    fresh = state[lost]
    assert fresh.isfinite().all()
    assert fresh.abs().max().item() == pytest.approx(1 / 4, rel=0.05)  # uniform within 1/√16


def test_bfloat16_keeps_rates_and_norms_in_float32(family, tiny_model, ids, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    vectors = ("A_log", "dt_bias", ".D", "norm.weight", "original0")
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if name.endswith(vectors) else torch.bfloat16
        assert parameter.dtype == wanted, name
    with torch.no_grad():
        assert model(ids, max_iterations=8).logits.isfinite().all()


def test_labels_are_shifted_and_masks_cover_all_tokens(family, tiny_model, ids):
    model = tiny_model(family)
    with torch.no_grad():
        out = model(ids, labels=ids)
        by_hand = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(out.loss, by_hand)
        padded = torch.cat((torch.full((3, 2), 7), ids), 1)
        mask = torch.cat((torch.zeros(3, 2), torch.ones(3, 9)), 1).long()
        first = model(padded[:, :6], attention_mask=mask[:, :6], use_cache=True)
        second = model(padded[:, 6:], attention_mask=mask, **{CACHES[family]: first[CACHES[family]]})
        found = torch.cat((first.logits[:, 2:], second.logits), 1)
        torch.testing.assert_close(found, out.logits, atol=2e-5, rtol=1e-4)
        kept = model(ids, logits_to_keep=2).logits
        torch.testing.assert_close(kept, out.logits[:, -2:])
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        assert torch.equal(embedded, out.logits)


def test_positions_separate_documents(family, tiny_model, ids):
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(model(ids, position_ids=torch.arange(9)[None]).logits, expected)
        restarts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, 9)
        packed = model(ids, position_ids=restarts).logits
        torch.testing.assert_close(packed[:, 4:], model(ids[:, 4:]).logits, atol=2e-5, rtol=1e-4)
        with pytest.raises(ValueError, match="omit them"):
            model(ids, position_ids=torch.arange(9)[None] + 1)


def test_generation_is_equal_with_and_without_a_cache(family, tiny_model, ids):
    model = tiny_model(family)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    common = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 18}
    plain = model.generate(ids, use_cache=False, **common)
    assert plain.shape == (3, 15)
    assert torch.equal(model.generate(ids, **common), plain)
    assert torch.equal(model.generate(ids, cache_implementation="static", **common), plain)
    alone = model.generate(ids[1:2, 4:], max_new_tokens=6, do_sample=False, pad_token_id=18)
    assert torch.equal(alone[0, 5:], plain[1, 9:])


def test_the_cache_follows_the_beams(family, tiny_model, ids):
    model = tiny_model(family)
    common = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 18}
    assert torch.equal(model.generate(ids, **common), model.generate(ids, use_cache=False, **common))


def test_search_options_are_arguments_of_forward_and_generate(family, tiny_model, ids):
    model = tiny_model(family)
    with torch.no_grad():
        assert int(model(ids, max_iterations=3).solution.iterations.max()) == 3
        loose, tight = (model(ids, tolerance=t).solution.iterations.sum() for t in (0.1, 1e-6))
        assert loose < tight
        undamped = model(ids, damping=1.0)
        assert undamped.solution.iterations.sum() < tight
        torch.testing.assert_close(undamped.logits, model(ids).logits, atol=2e-5, rtol=1e-4)
        stepwise = model(ids, window_length=1)
        torch.testing.assert_close(stepwise.logits, undamped.logits, atol=2e-5, rtol=1e-4)
    calls = []
    library = model.model.lm
    library.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=18, tolerance=0.0, max_iterations=2)
    assert len(calls) == 4 * 3  # four calls of the model, two iterations and the last call each


def test_the_cache_holds_the_sequence_state(family, tiny_model, ids):
    model = tiny_model(family)
    name = CACHES[family]
    with torch.no_grad():
        cache = model(ids, use_cache=True)[name]
        assert isinstance(cache, ImplicitCache)
        assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (9, 3, -1)
        more = ids[:, :2]
        expected = model(more, **{name: copy.deepcopy(cache)}).logits
        chosen = copy.deepcopy(cache)
        chosen.batch_select_indices(torch.tensor([2, 0]))
        torch.testing.assert_close(model(more[[2, 0]], **{name: chosen}).logits, expected[[2, 0]])
        twice = copy.deepcopy(cache)
        twice.batch_repeat_interleave(2)
        torch.testing.assert_close(
            model(more.repeat_interleave(2, 0), **{name: twice}).logits, expected.repeat_interleave(2, 0)
        )
        assert cache.get_seq_length() == 9  # copies are independent
        with pytest.raises(ValueError, match="negative"):
            cache.crop(1)
        with pytest.raises(ValueError, match="commits once per window"):
            cache.update(None, None, 0)
        small = ImplicitCache(max_seq_len=4)
        with pytest.raises(ValueError, match="created for 4 tokens"):
            model(ids, use_cache=True, **{name: small})
        cache.reset()
        torch.testing.assert_close(model(ids, **{name: cache}).logits, model(ids).logits)


def test_resizing_the_vocabulary_changes_the_spec(family, tiny_model, ids, tmp_path):
    model = tiny_model(family)
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(24, mean_resizing=False)
    assert (model.config.vocab_size, model.config.model_spec.vocab_size) == (24, 24)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(model(ids).logits[..., :19], before)
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape[0] == 24


def test_padding_entries_of_the_vocabulary_become_tokens(family, tiny_model, ids, tmp_path):
    model = tiny_model(family, pad_vocab_to=8)
    model.resize_token_embeddings(model.config.vocab_size)
    assert (model.config.vocab_size, model.config.model_spec.vocab_size) == (24, 24)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.generate(ids + 5, max_new_tokens=1, do_sample=False, pad_token_id=18).shape == (3, 10)


def test_unsupported_arguments_are_refused(family, tiny_model, tiny_spec, ids):
    model = tiny_model(family)
    with pytest.raises(TypeError, match=r"no argument 'tolerence'.*tolerance"):
        model(ids, tolerence=0.1)
    with pytest.raises(ValueError, match="cannot output attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"\(batch, tokens\)"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="one flag per token"):
        model(ids, attention_mask=torch.ones(3, 4))
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, **{CACHES[family]: transformers.DynamicCache()})
    with pytest.raises(ValueError, match="choose 'dynamic' or 'static'"):
        model.generate(ids, max_new_tokens=2, cache_implementation="quantized", pad_token_id=18)
    with pytest.raises(ValueError, match="damping"):
        model(ids, damping=1.5)
    config = type(model.config)
    with pytest.raises(ValueError, match=r"hidden_size is 64.*from_spec"):
        config(hidden_size=64)
    other = {"mamba2": "attention", "attention": "mamba2"}[family]
    with pytest.raises(ValueError, match="mixer"):
        config.from_spec(tiny_spec(other))


OVERRIDES = [  # both families check them alike
    ("mamba2", "tie_word_embeddings", False),
    ("attention", "vocab_size", 300),
    ("mamba2", "hidden_size", 32),
    ("attention", "initializer_range", 0.5),
]


@pytest.mark.parametrize(("family", "name", "value"), OVERRIDES, indirect=["family"])
def test_overrides_that_contradict_the_spec_are_refused(name, value, family, tiny_model, ids, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "saved")
    for load in (AutoConfig, AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=f"{name} is {value}, but the spec makes it"):
            load.from_pretrained(tmp_path / "saved", **{name: value})
        load.from_pretrained(tmp_path / "saved", **{name: getattr(model.config, name)})
    setattr(model.config, name, value)
    for build in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=f"{name} is {value}, but the spec makes it"):
            build.from_config(model.config)
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_spec_can_be_overridden_without_changing_the_weights(family, tiny_model, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loose = ib.AtEvaluation(stopping=ib.StoppingOverrides(tolerance=0.5))
    spec = model.config.model_spec.model_copy(update={"at_evaluation": loose})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, spec=spec.model_dump(mode="json"))
    assert loaded.model.lm.spec.at_evaluation == loose
    wider = model.config.spec | {"vocab_size": 300}
    with pytest.raises(ValueError, match="vocab_size is 19, but the spec makes it 300"):
        AutoModelForCausalLM.from_pretrained(tmp_path, spec=wider)


@pytest.mark.parametrize("token", [19, -1, 2**40])
def test_unknown_tokens_and_labels_are_refused(family, token, tiny_model, ids):
    model = tiny_model(family)
    unknown = ids.clone()
    unknown[1, 2] = token
    for part in (model, model.model):
        with pytest.raises(ValueError, match=f"input_ids have token {token}, and the model knows 0 to 18"):
            part(unknown)
    with pytest.raises(ValueError, match=f"labels have {token}, and the model knows 0 to 18"):
        model(ids, labels=unknown)
    unknown[1, 2] = -100
    assert model(ids, labels=unknown).loss.isfinite()


@pytest.mark.parametrize("installed", [True, False])
def test_trust_remote_code_imports_the_package_or_names_the_remedy(installed, tiny_model, tmp_path, python):
    """Runs in a separate process that has not imported the package."""
    tiny_model("mamba2").save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"].keys() == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
    }
    program = (
        "import sys\n"
        + ("" if installed else "sys.modules['implicit_blocks'] = None\n")
        + "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True)\n"
        "print(type(model).__module__, type(model).__name__)\n"
        f"model.save_pretrained({str(tmp_path / 'again')!r})\n"
    )
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = python.run(["-c", program], cwd=tmp_path, environment=environment)
    if installed:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "implicit_blocks.hf.modeling ImplicitMamba2ForCausalLM"
        assert sorted(p.name for p in Path(tmp_path / "again").glob("*.py")) == ["implicit_blocks_shim.py"]
    else:
        assert done.returncode == 1
        assert "pip install -c" in done.stderr


def test_the_error_without_transformers_names_the_remedy(python):
    program = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "import implicit_blocks.hf.published, implicit_blocks.hf as hf\n"
        "hf.ImplicitLlamaForCausalLM\n"
    )
    done = python.run(["-c", program], cwd=Path.cwd())
    assert "ImportError: implicit_blocks.hf needs transformers" in done.stderr


def test_reading_the_configuration_needs_no_weights(tiny_model, tmp_path):
    tiny_model("attention").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_attention_heads, config.head_dim, config.intermediate_size) == (4, 4, 24)
    assert config.max_position_embeddings == 2048
