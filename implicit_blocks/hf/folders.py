"""Checkpoints of every known kind, as one: a spec, and tensors by the names of the library's models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from implicit_blocks import registry
from implicit_blocks.checkpoints.find import CONFIG, read_json
from implicit_blocks.checkpoints.folder import check_tensors, read_config, read_tensors, write_pickle
from implicit_blocks.checkpoints.weights import empty_state
from implicit_blocks.hf import pretrained as ordinary
from implicit_blocks.hf import published
from implicit_blocks.models.implicit import LanguageModel
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.weight_norm import WeightNorm

if TYPE_CHECKING:
    from implicit_blocks.hf.modeling import ImplicitLlamaForCausalLM, ImplicitMamba2ForCausalLM

LMSpec = ImplicitLMSpec | ExplicitLMSpec
T = TypeVar("T")

OURS = ("implicit_blocks_llama", "implicit_blocks_mamba2")
_CORE, _HEAD = "model.lm.", "lm_head.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_NEOX_VOCABULARY = 50277  # GPT-NeoX-20B's, in which token 0 ends a text


@dataclass(frozen=True)
class PretrainedFolder:
    """A model: its spec, its state dict by the library's names, and what else its configuration says.

    ``fields`` are those of transformers' configurations that a spec doesn't know (tokens, length of texts);
    ``published`` is the published configuration that it came with.
    """

    spec: LMSpec
    state: dict[str, Tensor]
    fields: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] | None = None


# ------------------------------------------------------------------------------------ in


def read_pretrained(folder: Path, *, as_start: bool = False) -> PretrainedFolder:
    """Read a folder of the published implementation, of ours, or of a Llama or Mamba2 of transformers.

    Args:
        folder: with ``config.json`` and weights.
        as_start: make an explicit model the start of an implicit one (``ordinary.as_start``).

    Raises:
        ValueError: for a folder that is no checkpoint, an unknown model type, files that cannot be read,
            tensors that do not fit (all of them listed), or a tokenizer with more entries than the model.

    """
    config = read_config(folder)
    model_type = config.get("model_type")
    known = (*published.MODEL_TYPES, *ordinary.MODEL_TYPES, *OURS)
    if model_type not in known:
        raise ValueError(f"{folder / CONFIG}: model_type is {model_type!r}; known are {', '.join(known)}")
    if model_type in published.MODEL_TYPES:
        found = _of_published(folder, config)
    elif model_type in OURS:
        found = _of_ours(folder, config)
    else:
        found = _of_ordinary(folder, config)
    check_tokenizer(folder, found.spec)
    if not as_start:
        return found
    if not isinstance(found.spec, ExplicitLMSpec):
        raise ValueError(f"the model in {folder} is implicit already; only an explicit one can be a start")
    spec, state = ordinary.as_start(found.spec, found.state)
    return PretrainedFolder(spec, state, found.fields)


def _of_published(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    spec = _spec_from(folder, published.import_spec, config)
    tensors = read_tensors(folder)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    expected = published.export_tensors(empty_state(spec), spec)
    if spec.tie_embeddings:  # the published files have the tied head twice, once, or under either name
        tensors = _tie(tensors)
    check_tensors(tensors, expected, what=str(folder))
    state = published.import_tensors(tensors, tied=spec.tie_embeddings)
    return PretrainedFolder(spec, state, special_tokens(spec), config)


def _spec_from(folder: Path, read: Callable[[Mapping[str, Any]], T], config: Mapping[str, Any]) -> T:
    """Return what ``read`` makes of a configuration, whose values may be of other kinds than expected."""
    try:
        return read(config)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{folder / CONFIG} is not the configuration of such a model ({type(error).__name__}: {error}); "
            "take that which came with the weights"
        ) from None


def _tie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = ("word_emb.emb.weight", "criterion.decoder.weight")
    first, second = (tensors.get(name) for name in names)
    if (first is not None and second is not None) and not (
        first.dtype == second.dtype and torch.equal(first, second)
    ):
        raise ValueError(
            "the configuration ties the head to the embedding, but word_emb.emb.weight and "
            "criterion.decoder.weight differ; set tie_embeddings to false in it"
        )
    one = first if first is not None else second
    return tensors if one is None else {**tensors, **dict.fromkeys(names, one)}


def _of_ordinary(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    spec = _spec_from(folder, ordinary.import_spec, config)
    state = ordinary.import_tensors(read_tensors(folder), spec)
    check_tensors(state, empty_state(spec), what=str(folder))
    return PretrainedFolder(spec, state, {name: config[name] for name in _TOKEN_FIELDS if name in config})


def _of_ours(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    fields = config.get("spec")
    if not isinstance(fields, Mapping):
        raise ValueError(f"{folder / CONFIG} has no spec of a model")
    spec = _spec_from(
        folder,
        lambda fields: registry.entry("model", str(fields.get("kind"))).spec.model_validate(fields),
        fields,
    )
    if not isinstance(spec, LMSpec):
        raise ValueError(f"{folder / CONFIG} has the spec of a {spec.kind!r}, which is not a language model")
    state = library_state(read_tensors(folder))
    if spec.tie_embeddings:
        state.pop("head.weight", None)
    check_tensors(state, empty_state(spec), what=str(folder))
    kept = {name: config[name] for name in _TOKEN_FIELDS if name in config}
    return PretrainedFolder(spec, state, kept, config.get("published_config"))


def special_tokens(spec: LMSpec) -> dict[str, Any]:
    """Return the fields for the tokens that begin and end a text, known from the size of a vocabulary."""
    return {"bos_token_id": 0, "eos_token_id": 0} if spec.vocab_size == _NEOX_VOCABULARY else {}


def check_tokenizer(folder: Path, spec: LMSpec) -> None:
    """Compare the vocabulary of a folder's ``tokenizer.json``, if there is one, with the model's.

    Raises:
        ValueError: where the tokenizer has more entries.

    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        tokenizer = read_json(path)
        vocabulary = tokenizer["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else range(len(vocabulary))
        added = [token["id"] for token in tokenizer.get("added_tokens") or []]
        if not all(type(token) is int and token >= 0 for token in [*ids, *added]):
            raise TypeError("an ID is not a whole number from 0 up")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no tokenizer that can be read; repair it or take it away") from None
    entries = max([*ids, *added], default=-1) + 1
    if entries > spec.padded_vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {entries} entries and the model {spec.padded_vocab_size}; "
            "take the model's own tokenizer"
        )


# ------------------------------------------------------------------------------------ transformers' classes


def hf_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of the classes for transformers."""
    return {_HEAD if name == "head.weight" else _CORE + name: tensor for name, tensor in state.items()}


def library_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names of the library's models; unknown names stay as they are."""
    return {
        "head.weight" if name == _HEAD else name.removeprefix(_CORE): tensor for name, tensor in state.items()
    }


def from_library(model: LanguageModel, **fields: Any) -> ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM:
    """Return a model of the library as one of transformers, of the same storage.

    ``fields`` are its configuration's, such as ``max_position_embeddings`` or ``eos_token_id``.
    """
    converted = hf_model(PretrainedFolder(model.spec, dict(model.state_dict()), fields))
    converted.train(model.training)
    return converted


def to_library(model: ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM) -> LanguageModel:
    """Return the library's model of one of transformers, with the same storage."""
    with torch.device("meta"):
        library: LanguageModel = build(model.config.model_spec)
    state = library_state(model.state_dict())
    if library.head is None:
        state.pop("head.weight")
    library.load_state_dict(state, assign=True)
    return library.train(model.training)


def hf_model(pretrained: PretrainedFolder) -> ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM:
    """Return the checkpoint as a model of transformers, in evaluation mode, with the same storage."""
    from implicit_blocks.hf import register

    register()
    from transformers import AutoModelForCausalLM

    from implicit_blocks.hf.configuration import config_class_for

    extra = {} if pretrained.published is None else {"published_config": pretrained.published}
    config = config_class_for(pretrained.spec).from_spec(pretrained.spec, **pretrained.fields, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = hf_state(pretrained.state)
    if pretrained.spec.tie_embeddings:
        tensors[_HEAD] = tensors[_CORE + "embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return cast("ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM", model.eval())


# ------------------------------------------------------------------------------------ out


def write_transformers(pretrained: PretrainedFolder, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Write a folder that ``from_pretrained`` reads, ready to be published."""
    hf_model(pretrained).save_pretrained(folder, max_shard_size=max_shard_size)


def write_published(pretrained: PretrainedFolder, folder: Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write a folder that the published implementation reads.

    Raises:
        ValueError: where it has no way to say the spec.

    """
    config = published.export_config(pretrained.spec, pretrained.published)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = published.export_tensors(pretrained.state, pretrained.spec)
    write_pickle(folder, tensors, max_shard_bytes=max_shard_bytes)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, those that there are."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def fold_weight_norm(pretrained: PretrainedFolder) -> PretrainedFolder:
    """Return the same function without weight norm: every ``g · v / ‖v‖`` becomes the weight itself.

    For tools that write into weights in place, which weight norm computes anew. Training goes on otherwise
    than it would have.
    """
    stem = ".parametrizations.weight.original"
    state = {name: tensor for name, tensor in pretrained.state.items() if stem not in name}
    for name, g in pretrained.state.items():
        if name.endswith(f"{stem}0"):
            layer = name.removesuffix(f"{stem}0")
            state[f"{layer}.weight"] = WeightNorm.compute(g, pretrained.state[f"{layer}{stem}1"])
    spec = pretrained.spec.model_copy(update={"weight_norm": False})
    return PretrainedFolder(spec, state, pretrained.fields, pretrained.published)
