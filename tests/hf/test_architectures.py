"""Folders of Attractor, Parcae, Huginn and Ouro are read and written back; what does not fit is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import implicit_blocks as ib
from implicit_blocks.__main__ import main
from implicit_blocks.checkpoints.weights import empty_state
from implicit_blocks.hf.architectures import ARCHITECTURES, architecture_for, export_config, find
from implicit_blocks.hf.architectures.parcae import ValueSlots
from implicit_blocks.hf.architectures.tensor_map import halves_of_pairs, pairs_of_halves
from implicit_blocks.hf.folders import read_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")

BLOCKS: dict[str, Any] = {
    "n_embd": 32,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "vocab_size": 11,
    "padding_multiple": 8,
    "block_size": 8,
    "norm_class_name": "RMSNorm",
    "nonlin_name": "ReLU2",
    "qk_norm": True,
    "tie_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "attractor": {
        "model_class_name": "Attractor",
        **BLOCKS,
        "n_backbone_layers": 1,
        "adjoint_grad_clip": None,
    },
    "parcae": {
        "model_class_name": "Parcae",
        **BLOCKS,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 2,
        "n_layers_in_coda": 2,
        "recurrent_embedding_dimension": 32,
        "recurrent_intermediation_embedding_dimension": 16,
        "mean_recurrence": 4,
        "mean_backprop_depth": 2,
    },
    "huginn": {
        "model_type": "huginn_raven",
        "n_embd": 16,
        "n_heads": 2,
        "intermediate_size": 12,
        "vocab_size": 11,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 1,
        "n_layers_in_coda": 1,
        "mean_recurrence": 4,
        "block_size": 8,
    },
    "ouro": {
        "model_type": "ouro",
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "total_ut_steps": 3,
    },
}


def reading_of(name: str, **changes: Any) -> Any:
    return ARCHITECTURES[name].read(CONFIGS[name] | changes)


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    """Write a published folder with random weights."""
    reading = reading_of(name, **changes)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    tensors = reading.tensors.write(ib.build(reading.spec).state_dict())
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_back_unchanged_through_our_format(name, tmp_path):
    source = folder_of(name, tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    back = ["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "published"]
    assert main([*back, "--max-shard-size", "8KB"]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIGS[name]
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 1
    found = {key: tensor for shard in shards for key, tensor in load_file(shard).items()}
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    dead = {unused.name for unused in reading_of(name).tensors.unused}
    assert all(torch.equal(found[key], expected[key]) for key in expected.keys() - dead)


@pytest.mark.parametrize("name", CONFIGS)
def test_load_model_computes_the_same_as_the_converted_folder(name, tmp_path):
    source = folder_of(name, tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    tokens = torch.randint(11, (2, 6))
    published, ours = ib.load_model(source), ib.load_model(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(published(tokens, loops=2).logits, ours(tokens, loops=2).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrapped_configuration_with_its_weights_is_a_folder_too(name, tmp_path):
    source = folder_of(name, tmp_path / "source")
    (source / "config.json").write_text(json.dumps({"architecture": name, "config": CONFIGS[name]}))
    (source / "model.safetensors").rename(source / "weights.safetensors")
    assert read_pretrained(source).spec == reading_of(name).spec


@pytest.mark.parametrize("name", CONFIGS)
def test_a_spec_without_its_configuration_is_written_and_read(name):
    spec = reading_of(name).spec
    architecture = architecture_for(spec)
    assert architecture is ARCHITECTURES[name]
    config = export_config(architecture, spec)
    assert find(config) is architecture
    again = architecture.read(config)
    names = set(again.tensors.write(empty_state(again.spec)))
    assert names == set(reading_of(name).tensors.write(empty_state(spec)))
    assert again.spec.core == spec.core


@pytest.mark.parametrize("name", CONFIGS)
def test_a_spec_that_the_format_cannot_express_is_refused_by_name(name):
    spec = reading_of(name).spec
    with pytest.raises(ValueError, match="embedding_scale"):
        export_config(ARCHITECTURES[name], spec.model_copy(update={"embedding_scale": 3.0}))
    mixed = spec.model_copy(
        update={"mixer": ib.Mamba2Spec(d_state=4, head_dim=8), "layers": (), "prelude": None}
    )
    with pytest.raises(ValueError, match=ARCHITECTURES[name].name):
        export_config(ARCHITECTURES[name], mixed)


def test_an_explicit_model_has_no_looped_format():
    spec = ib.ExplicitLMSpec(vocab_size=5, d_model=8, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    assert architecture_for(spec) is None
    with pytest.raises(ValueError, match="explicit_lm"):
        export_config(ARCHITECTURES["ouro"], spec)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_unknown_fields_are_listed_together(name):
    with pytest.raises(ValueError, match=r"(?s)first_mystery.*second_mystery") as raised:
        reading_of(name, first_mystery=1, second_mystery=[2], switched_off=None)
    assert "switched_off" not in str(raised.value)


# Values that are refused, and those that they are refused with.
UNSUPPORTED: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "attractor": [
        ({"norm_class_name": "LayerNorm", "nonlin_name": "Mish", "bias": "yes"}, {}),
        ({"rope_settings": {"use_rope": False}, "use_abacus": True, "mup_model_scaling_factor": 2}, {}),
        ({"num_attention_heads": 5, "num_key_value_heads": 2, "vocab_size": 0}, {}),
        ({"qk_bias": True}, {"num_key_value_heads": 2}),
        ({"qk_bias": True}, {"bias": True, "clip_qkv": 1.0}),
        ({"init_strategy": "unheard-of", "solver": "newton", "backward_type": "none"}, {}),
        ({"use_fused_head": "hhe", "clip_qkv": -1, "recurrent_embedding_dimension": 8}, {}),
        ({"use_fused_head": "full-triton"}, {"tie_embeddings": False}),
        ({"rope_settings": {"rope_condense_ratio": 0.5, "mystery": 1}, "n_fp_blocks": 0}, {}),
        ({"rope_settings": [1], "name": "Gemma", "attn_impl": "debug-skip", "anderson_beta": 2}, {}),
    ],
    "parcae": [
        ({"injection_type": "multiply", "state_init": "unit", "sampling_scheme": "sometimes"}, {}),
        ({"recurrent_embedding_dimension": 24, "recurrent_iteration_method": "per-word"}, {}),
        (
            {"injection_type": "add"},
            {"recurrent_embedding_dimension": 16, "recurrent_num_attention_heads": 2},
        ),
        ({"randomize_positions_from": 64, "mean_recurrence": 0}, {}),
    ],
    "huginn": [
        ({"n_heads": 3, "injection_type": "add", "num_key_value_heads": 1}, {}),
        ({"test_time_noise": 0.1, "padded_vocab_size": 16, "init_values": {"std": -1, "mystery": 2}}, {}),
        ({"init_values": 3, "nonlin_name": "GELU"}, {}),
    ],
    "ouro": [
        ({"layer_types": ["sliding_attention", "full_attention"], "attention_dropout": 0.1}, {}),
        ({"hidden_act": "tanh", "rope_scaling": {"rope_type": "dynamic"}, "num_key_value_heads": 3}, {}),
        ({"early_exit_step": 7, "head_dim": 3, "attention_bias": True}, {}),
        ({"rope_scaling": 3}, {}),
    ],
}


@pytest.mark.parametrize(
    ("architecture", "refused", "beside"),
    [(name, *given) for name, cases in UNSUPPORTED.items() for given in cases],
)
def test_all_unsupported_values_are_listed_together(architecture, refused, beside):
    config = CONFIGS[architecture] | beside | refused
    with pytest.raises(ValueError, match="cannot be read") as raised:
        ARCHITECTURES[architecture].read(config)
    lines = str(raised.value).splitlines()
    assert [field for field in refused if not any(line.strip().startswith(field) for line in lines)] == []


HOSTILE = (None, True, -1, 0, 3, 3.5, "x", [], [1], {}, {"kind": 1}, 10**30, float("nan"), float("inf"))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_of_any_field_is_read_or_refused(name):
    outcomes = set()
    fields = {
        *CONFIGS[name],
        "rope_settings",
        "rope_scaling",
        "rope_parameters",
        "init_values",
        "layer_types",
    }
    fields |= {"num_key_value_heads", "clip_qkv", "model_class_name", "state_init", "early_exit_threshold"}
    for field in sorted(fields):
        for value in HOSTILE:
            try:
                reading_of(name, **{field: value}).spec  # noqa: B018  # the property validates
                outcomes.add("read")
            except ValueError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("name", ["parcae", "huginn", "ouro"])
def test_cached_decoding_continues_as_the_full_pass(name):
    model = ib.build(reading_of(name).spec).eval()
    prompt = torch.randint(11, (2, 3))
    made = ib.generate(model, prompt.tolist(), max_new_tokens=4)
    tokens = prompt
    with torch.no_grad():
        for _ in range(4):
            following = model(tokens).logits[:, -1, :11].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), dim=1)
    assert torch.equal(made.tokens, tokens[:, 3:])


def test_a_configuration_of_ouro_without_sizes_is_refused():
    with pytest.raises(ValueError, match=r"(?s)hidden_size is missing.*vocab_size is missing"):
        ARCHITECTURES["ouro"].read({"model_type": "ouro"})


def test_a_layer_of_the_core_cannot_read_value_embeddings_of_another_width():
    narrow = {"recurrent_embedding_dimension": 16, "recurrent_num_attention_heads": 2}
    with pytest.raises(ValueError, match="value embeddings of another width"):
        reading_of("parcae", **narrow, n_layers_in_prelude=2)
    assert reading_of("parcae", **narrow).spec.core_d_model == 16


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    source = folder_of("ouro", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)model.norm.bias is unknown.*model.norm.weight is missing"):
        ib.load_model(source)


def test_a_tied_head_may_be_missing_but_not_differ(tmp_path):
    source = folder_of("huginn", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, source / "model.safetensors")
    embedding = ib.load_model(source).embedding.weight
    assert torch.equal(embedding, head)
    save_file(tensors | {"lm_head.weight": head + 1}, source / "model.safetensors")
    with pytest.raises(ValueError, match="ties lm_head"):
        ib.load_model(source)


def test_a_table_of_rotations_of_another_length_is_not_an_error(tmp_path):
    source = folder_of("huginn", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["freqs_cis"] = tensors["freqs_cis"][:, :3].clone()
    save_file(tensors, source / "model.safetensors")
    assert ib.load_model(source).spec == reading_of("huginn").spec


def test_tensors_that_nothing_reads_are_named_and_written_back_as_zeros(tmp_path, capsys, caplog):
    source = folder_of("parcae", tmp_path / "source")
    dead = {unused.name for unused in reading_of("parcae").tensors.unused if unused.reason}
    assert dead
    with caplog.at_level(logging.WARNING):
        ib.load_model(source)
    assert main(["convert", str(source), str(tmp_path / "back"), "--to", "published"]) == 0
    said = capsys.readouterr().err
    back = load_file(tmp_path / "back" / "model.safetensors")
    published = load_file(source / "model.safetensors")
    for name in dead:
        assert name in said
        assert name in caplog.text
        assert not back[name].any()
        assert back[name].shape == published[name].shape


def test_value_embeddings_are_read_where_both_parities_agree():
    slots = ValueSlots(2, 2, 2, mean_recurrence=8, mean_backprop_depth=4)
    assert {part: slots.live(part) for part in ("prelude", "core", "coda")} == {
        "prelude": [False, True],
        "core": [False, True],
        "coda": [False, True],
    }
    odd = ValueSlots(
        1, 2, 2, mean_recurrence=4, mean_backprop_depth=2
    )  # tables on even places, gates on odd numbers
    assert not any(odd.live("prelude") + odd.live("core") + odd.live("coda"))
    assert odd.has_table(0)
    assert odd.has_gate("core", 0)
    shifted = ValueSlots(
        1, 1, 2, mean_recurrence=2, mean_backprop_depth=2
    )  # the loops shift the coda's parity
    assert shifted.live("core") == [True]
    assert shifted.live("coda") == [False, False]


@pytest.mark.parametrize(
    "scheme", ["poisson-fill", "fixed", "poisson-full", "poisson-truncated-full-curriculum-100"]
)
@pytest.mark.parametrize("method", ["per-batch", "per-sequence", "per-token"])
def test_every_way_of_drawing_depths_is_read(scheme, method):
    reading = reading_of("parcae", sampling_scheme=scheme, recurrent_iteration_method=method)
    spec = reading.spec
    assert spec.depth.kind == ("fixed" if scheme == "fixed" else "poisson")
    assert getattr(spec.depth, "per", "batch" if method == "per-batch" else "sequence") == (
        "batch" if method == "per-batch" else "sequence"
    )
    assert spec.at_evaluation.exit.loops == 4
    approximate = method == "per-token" or scheme in ("poisson-fill", "poisson-truncated-full-curriculum-100")
    assert any("depths" in remark or "sampling_scheme" in remark for remark in reading.remarks) == approximate


def test_attractor_is_read_with_a_causal_search_and_its_gradient():
    clipped = reading_of("attractor", adjoint_grad_clip=0.5).spec
    assert (clipped.gradient.kind, clipped.gradient.max_norm_ratio) == ("one_step_adjoint", 0.5)
    assert clipped.evaluation_stopping.scope == "prefix"
    exact = reading_of("attractor", backward_type="picard", backward_tol=1e-5, solver="fpi").spec
    assert (exact.solver.kind, exact.gradient.kind) == ("picard", "implicit_function")
    assert exact.gradient.stopping.tolerance == 1e-5
    assert any("attractor_anderson" in remark for remark in reading_of("attractor").remarks)


@pytest.mark.parametrize(
    ("changes", "exit_"),
    [
        ({}, ib.FixedExitSpec(loops=3)),
        ({"early_exit_threshold": 1.0}, ib.FixedExitSpec(loops=3)),
        ({"early_exit_threshold": 0.7, "early_exit_step": 1}, ib.FixedExitSpec(loops=2)),
    ],
)
def test_the_exit_of_ouro_is_that_of_its_configuration(changes, exit_):
    assert reading_of("ouro", **changes).spec.at_evaluation.exit == exit_


def test_a_threshold_of_ouro_is_remarked_since_published_decoding_takes_all_loops():
    reading = reading_of("ouro", early_exit_threshold=0.7)
    assert reading.spec.at_evaluation.exit == ib.FixedExitSpec(loops=3)
    assert "threshold: 0.7" in reading.remarks[0]


def test_rows_of_adjacent_pairs_become_halves_and_back():
    rows = torch.arange(12)
    assert halves_of_pairs(rows, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(pairs_of_halves(halves_of_pairs(rows, 6), 6), rows)


@pytest.mark.parametrize("name", ["attractor", "parcae", "huginn", "ouro"])
def test_published_tensors_are_reproduced_bit_by_bit(name, reference):
    config = json.loads((reference / f"{name}_tiny" / "config.json").read_text())
    published = load_file(reference / f"{name}_tiny" / "weights.safetensors")
    reading = ARCHITECTURES[name].read(config["config"])
    back = reading.tensors.write(reading.tensors.read(published, empty_state(reading.spec), what=name))
    assert back.keys() == published.keys()
    assert all(torch.equal(back[key], published[key]) for key in back)
    derived = config.get("derived", {})
    assert derived.get("emb_scale", reading.spec.embedding_scale) == reading.spec.embedding_scale
    assert derived.get("logit_scale", reading.spec.logit_scale) == reading.spec.logit_scale
