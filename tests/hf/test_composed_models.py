"""Composed models as transformers classes: configuration, folders, generation, hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import implicit_blocks as ib

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM  # noqa: E402  # after the skip

from implicit_blocks.hf import from_library, to_library  # noqa: E402  # the same
from implicit_blocks.hf.configuration import config_class_for, portable  # noqa: E402  # the same

SANDWICH: dict[str, Any] = {
    "prelude": {"n_layers": 1},
    "coda": {"n_layers": 1, "norm_placement": "sandwich"},
    "injection": {"kind": "diagonal"},
    "residual_scaling": {"kind": "layer_scale", "init": 0.3},
    "logit_softcap": 5.0,
    "logit_scale": 2.0,
    "embedding_scale": 4.0,
}
FIXED = {"exit": {"kind": "fixed", "loops": 3}}


def sandwich(tiny_spec: Any, family: str, **changes: Any) -> Any:
    fields = {name: value for name, value in tiny_spec(family) if name in {"mixer", "mlp", "d_model"}}
    base = {"vocab_size": 19, "n_layers": 2, "at_evaluation": FIXED}
    return ib.ImplicitLMSpec(**(base | SANDWICH | fields | changes))


def exported(spec: Any) -> Any:
    torch.manual_seed(0)
    return from_library(ib.build(spec).eval())


def test_the_configuration_counts_the_layers_of_all_stacks(family, tiny_spec):
    spec = sandwich(tiny_spec, family)
    config = config_class_for(spec).from_spec(spec)
    assert config.num_hidden_layers == len(config.layer_types) == 4
    assert config.hidden_size == 16


def test_the_configuration_names_the_type_of_each_layer(tiny_spec):
    mamba2, attention = (tiny_spec(name).mixer.model_dump() for name in ("mamba2", "attention"))
    pattern = [{"mixer": mamba2}, {"mixer": attention}]
    ends = {"prelude": {"n_layers": 1, "mixer": mamba2}, "coda": {"n_layers": 2}}
    spec = sandwich(tiny_spec, "attention", layers=pattern, **ends)
    config = config_class_for(spec).from_spec(spec)
    full, linear = "full_attention", "linear_attention"
    assert config.layer_types == [linear, linear, full, linear, full]
    assert config.num_hidden_layers == 5


def test_saved_specs_have_no_backends_in_any_stack(tiny_spec, tmp_path):
    chosen = {"kind": "attention", "n_heads": 4, "backend": "torch"}
    stack = {"n_layers": 1, "mixer": chosen}
    patterned = {"n_layers": 1, "layers": [{"mixer": chosen}]}
    spec = sandwich(tiny_spec, "attention", layers=[{"mixer": chosen}], prelude=stack, coda=patterned)
    clean = portable(spec)
    mixers = [layer.mixer for one in clean.stacks.values() for layer in one.layers]
    assert {mixer.backend for mixer in mixers} == {"auto"}
    model = exported(spec)
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_spec == clean


@pytest.mark.parametrize("kind", ["implicit", "explicit", "untied"])
def test_a_sandwich_is_saved_loaded_and_converted_back(family, kind, tiny_spec, ids, tmp_path):
    spec = sandwich(tiny_spec, family, tie_embeddings=kind != "untied")
    if kind == "explicit":
        names = set(ib.ExplicitLMSpec.model_fields) - {"kind"}
        spec = ib.ExplicitLMSpec(**{name: value for name, value in spec if name in names})
    torch.manual_seed(0)
    library = ib.build(spec).eval()
    with torch.no_grad():
        expected = library(ids).logits
        exporting = from_library(library)
        torch.testing.assert_close(exporting(ids).logits, expected)
        exporting.save_pretrained(tmp_path)
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert loaded.config.model_spec == spec
        torch.testing.assert_close(loaded(ids).logits, expected)
        torch.testing.assert_close(to_library(loaded).eval()(ids).logits, expected)


@pytest.mark.parametrize("policy", ["converged", "per_loop"])
def test_generation_equals_the_librarys(family, policy, tiny_spec, ids):
    spec = sandwich(tiny_spec, family, state_policy=policy)
    model = exported(spec)
    found = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=18)
    expected = ib.generate(to_library(model).eval(), ids, max_new_tokens=5, temperature=0)
    assert torch.equal(found[:, ids.shape[1] :], expected.tokens)


def test_token_ids_reach_mixers_that_need_them(tiny_spec, ids):
    mixer = {"kind": "attention", "n_heads": 2, "value_embeddings": 19}
    spec = sandwich(tiny_spec, "attention", d_model=32, mixer=mixer)
    model = exported(spec)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, to_library(model).eval()(ids).logits)


def test_bfloat16_models_keep_scalings_in_float32(family, tiny_spec, ids, tmp_path):
    exported(sandwich(tiny_spec, family)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gammas = [p.dtype for name, p in model.named_parameters() if name.endswith("gamma")]
    assert gammas
    assert set(gammas) == {torch.float32}
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


# ------------------------------------------------------------------------------------ hidden states


@pytest.mark.parametrize("use_cache", [False, True])
def test_hidden_states_are_embedding_iterates_and_output(family, use_cache, tiny_spec, ids):
    model = exported(sandwich(tiny_spec, family))
    library = to_library(model).eval()
    with torch.no_grad():
        found = model(ids, output_hidden_states=True, use_cache=use_cache)
        expected = library(ids, trajectory=(1, 2, 3)).trajectory
        base = model.model(ids, use_cache=False)
        embedded = 4 * library.embedding(ids)
    assert len(found.hidden_states) == 1 + 3 + 1
    torch.testing.assert_close(found.hidden_states[0], embedded)
    for t in (1, 2, 3):
        torch.testing.assert_close(found.hidden_states[t], expected[t].z_BLC)
    torch.testing.assert_close(found.hidden_states[-1], base.last_hidden_state)
    assert base.hidden_states is None


def test_hidden_states_have_the_chosen_iterates_and_loops(family, tiny_spec, ids):
    model = exported(sandwich(tiny_spec, family, at_evaluation={}))
    with torch.no_grad():
        searched = model(ids, output_hidden_states=True).hidden_states
        assert len(searched) == 2  # a search has no fixed number of iterates
        looped = model(ids, output_hidden_states=True, loops=4).hidden_states
        chosen = model(ids, output_hidden_states=True, loops=4, trajectory=(2, 9)).hidden_states
    assert len(looped) == 1 + 4 + 1
    assert len(chosen) == 1 + 1 + 1  # iterates that were not reached are left out
    torch.testing.assert_close(chosen[1], looped[2])


def test_hidden_states_of_an_explicit_model_are_its_ends(family, tiny_spec, ids):
    spec = sandwich(tiny_spec, family)
    names = set(ib.ExplicitLMSpec.model_fields) - {"kind"}
    model = exported(ib.ExplicitLMSpec(**{name: value for name, value in spec if name in names}))
    with torch.no_grad():
        assert len(model(ids, output_hidden_states=True).hidden_states) == 2


def test_generate_returns_hidden_states_and_takes_loops(family, tiny_spec, ids):
    model = exported(sandwich(tiny_spec, family))
    asked = {"return_dict_in_generate": True, "output_hidden_states": True, "pad_token_id": 18}
    found = model.generate(ids, max_new_tokens=2, do_sample=False, loops=2, **asked)
    assert [len(step) for step in found.hidden_states] == [4, 4]


def test_a_model_with_one_state_per_loop_returns_its_iterates_with_a_cache(family, tiny_spec, ids):
    model = exported(sandwich(tiny_spec, family, state_policy="per_loop"))
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        first = model(ids[:, :4], output_hidden_states=True)
        cache = {model.config.cache_name: first[model.config.cache_name]}
        rest = model(ids[:, 4:], output_hidden_states=True, **cache)
    assert len(plain) == len(first.hidden_states) == len(rest.hidden_states) == 5
    for whole, *parts in zip(plain, first.hidden_states, rest.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_configurations_saved_before_composed_models_load(family, tiny_spec):
    spec = tiny_spec(family)
    config = config_class_for(spec).from_spec(spec).to_dict()
    before = (
        "mixer",
        "mlp",
        "vocab_size",
        "d_model",
        "n_layers",
        "weight_norm",
        "solver",
        "gradient",
        "stopping",
    )
    saved = {name: config["spec"][name] for name in (*before, "kind", "at_evaluation")}
    saved["at_evaluation"] = {name: v for name, v in saved["at_evaluation"].items() if name != "exit"}
    loaded = config_class_for(spec).from_dict({**config, "spec": saved | {"z_init": "zeros"}})
    assert loaded.model_spec == spec.model_copy(update={"z_init": "zeros"})
    assert loaded.model_spec.start.kind == "zeros"


@pytest.mark.parametrize("name", ["start", "exit"])
def test_options_of_the_library_are_refused_with_a_remedy(name, family, tiny_spec):
    model = exported(sandwich(tiny_spec, family))
    with pytest.raises(TypeError, match=rf"no argument '{name}'.*to_library"):
        model(torch.tensor([[1, 2]]), **{name: None})


@pytest.mark.parametrize("exit", [{"kind": "kl", "tolerance": 0.01}, {"kind": "argmax_stability"}], ids=str)
def test_an_exit_criterion_reads_the_predictions_of_an_untied_head(exit, family, tiny_spec, ids):
    at_evaluation = {"exit": exit, "stopping": {"max_iterations": 12}}
    spec = sandwich(tiny_spec, family, tie_embeddings=False, at_evaluation=at_evaluation)
    model = exported(spec)
    library = to_library(model)
    with torch.no_grad():
        library.head.weight.copy_(torch.randn_like(library.head.weight))
        expected, found = library(ids), model(ids)
        assert torch.equal(found.solution.token_iterations, expected.solution.token_iterations)
        torch.testing.assert_close(found.logits, expected.logits)
        with pytest.raises(ValueError, match=r"this class has no head.*at_evaluation\.exit"):
            model.model(ids)
        assert model.model(ids, loops=2).last_hidden_state.shape[:2] == ids.shape
