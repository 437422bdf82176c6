"""Pretrained folders of every known format, read as a spec and tensors with the library's names."""

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
from implicit_blocks.hf.architectures import ARCHITECTURES, find
from implicit_blocks.hf.architectures.files import is_published, read_folder, write_folder
from implicit_blocks.hf.pretrained_export import export_config
from implicit_blocks.layers import WeightNorm
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec

if TYPE_CHECKING:
    from implicit_blocks.hf.modeling import ImplicitLlamaForCausalLM, ImplicitMamba2ForCausalLM

LMSpec = ImplicitLMSpec | ExplicitLMSpec
T = TypeVar("T")

OURS = ("implicit_blocks_llama", "implicit_blocks_mamba2")
_KNOWN = (*published.MODEL_TYPES, *ordinary.MODEL_TYPES, *OURS)
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
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "training_length")
_NEOX_VOCABULARY = 50277  # of GPT-NeoX-20B, where token 0 ends a text


@dataclass(frozen=True)
class PretrainedFolder:
    """A model: its spec, its state dict with the library's names, and further configuration.

    ``fields`` are fields of transformers configurations that a spec does not have (special tokens, maximum
    length); ``published`` is the published configuration that the model was read with; ``remarks`` say what
    of it the spec cannot express, and which tensors are not read.
    """

    spec: LMSpec
    state: dict[str, Tensor]
    fields: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] | None = None
    remarks: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------ reading


def read_pretrained(folder: Path, *, as_start: bool = False) -> PretrainedFolder:
    """Read a folder of a published implementation, of this library, or of transformers.

    Of transformers, the types of ``pretrained.MODEL_TYPES`` are read, as explicit models.

    Args:
        folder: contains ``config.json`` and weights.
        as_start: initialize an implicit model from an explicit one (``pretrained.as_start``).

    Raises:
        ValueError: the folder is not a pretrained folder, the model type is unknown, files cannot be read,
            tensors do not fit (all are listed), or the tokenizer has more entries than the model.

    """
    config = read_config(folder)
    model_type = config.get("model_type")
    if not is_known(config):
        raise ValueError(
            f"{folder / CONFIG}: unknown model_type {model_type!r}; known: {', '.join(_KNOWN)}, and the "
            f"configurations of {', '.join(ARCHITECTURES)}"
        )
    if model_type not in _KNOWN:
        found = _of_architecture(folder, config)
    elif model_type in published.MODEL_TYPES:
        found = _of_published(folder, config)
    elif model_type in OURS:
        found = _read_exported(folder, config)
    else:
        found = _convert_pretrained(folder, config)
    check_tokenizer(folder, found.spec)
    if not as_start:
        return found
    if not isinstance(found.spec, ExplicitLMSpec):
        raise ValueError(f"the model in {folder} is already implicit; use an explicit one")
    spec, state = ordinary.as_start(found.spec, found.state)
    return PretrainedFolder(spec, state, found.fields)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether ``read_pretrained`` reads folders with this ``config.json``."""
    return config.get("model_type") in _KNOWN or find(config) is not None


def _of_published(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    spec = _spec_from(folder, published.import_spec, config)
    tensors = read_tensors(folder)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    expected = published.export_tensors(empty_state(spec), spec)
    if spec.tie_embeddings:  # published files store the tied head twice, or once under either name
        tensors = _tie(tensors)
    check_tensors(tensors, expected, what=str(folder))
    state = published.import_tensors(tensors, tied=spec.tie_embeddings)
    return PretrainedFolder(spec, state, special_tokens(spec), config)


def _of_architecture(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    read = _spec_from(folder, lambda config: read_folder(folder, config), config)
    return PretrainedFolder(read.spec, read.state, read.extra, read.config, read.remarks)


def _spec_from(folder: Path, read: Callable[[Mapping[str, Any]], T], config: Mapping[str, Any]) -> T:
    """Return ``read(config)``; values of unexpected types raise a ValueError that names the file."""
    try:
        return read(config)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{folder / CONFIG} is not a valid configuration ({type(error).__name__}: {error}); "
            "use the file that belongs to the weights"
        ) from None


def _tie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = ("word_emb.emb.weight", "criterion.decoder.weight")
    first, second = (tensors.get(name) for name in names)
    if (first is not None and second is not None) and not (
        first.dtype == second.dtype and torch.equal(first, second)
    ):
        raise ValueError(
            "the configuration ties the head to the embedding, but word_emb.emb.weight and "
            "criterion.decoder.weight differ; set tie_embeddings to false in the configuration"
        )
    one = first if first is not None else second
    return tensors if one is None else {**tensors, **dict.fromkeys(names, one)}


def _convert_pretrained(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    spec = _spec_from(folder, ordinary.import_spec, config)
    state = ordinary.import_tensors(read_tensors(folder), spec)
    check_tensors(state, empty_state(spec), what=str(folder))
    return PretrainedFolder(spec, state, {name: config[name] for name in _TOKEN_FIELDS if name in config})


def _read_exported(folder: Path, config: dict[str, Any]) -> PretrainedFolder:
    fields = config.get("spec")
    if not isinstance(fields, Mapping):
        raise ValueError(f"{folder / CONFIG} has no model spec")
    spec = _spec_from(
        folder,
        lambda fields: registry.entry("model", str(fields.get("kind"))).spec.model_validate(fields),
        fields,
    )
    if not isinstance(spec, LMSpec):
        raise ValueError(f"{folder / CONFIG} has a spec of kind {spec.kind!r}, which is not a language model")
    state = library_state(read_tensors(folder))
    if spec.tie_embeddings:
        state.pop("head.weight", None)
    check_tensors(state, empty_state(spec), what=str(folder))
    kept = {name: config[name] for name in _TOKEN_FIELDS if name in config}
    return PretrainedFolder(spec, state, kept, config.get("published_config"))


def special_tokens(spec: LMSpec) -> dict[str, Any]:
    """Return the configuration fields of the special tokens, inferred from the vocabulary size."""
    return {"bos_token_id": 0, "eos_token_id": 0} if spec.vocab_size == _NEOX_VOCABULARY else {}


DEFAULT_LENGTH = 2048
"""The length that lm-eval assumes of models without a limit."""


def length_fields(training_length: int | None) -> dict[str, Any]:
    """Return the configuration fields of the sequence length in training, in tokens; None: unknown.

    The models accept sequences of any length, but tools of transformers, such as lm-eval, truncate to
    ``max_position_embeddings``. It is therefore not the training length where that is short.
    """
    if training_length is None:
        return {}
    longest = max(training_length, DEFAULT_LENGTH)
    return {"training_length": training_length, "max_position_embeddings": longest}


def check_tokenizer(folder: Path, spec: LMSpec) -> None:
    """Check that a folder's ``tokenizer.json``, if present, fits the model's vocabulary.

    Raises:
        ValueError: the tokenizer has more entries, or cannot be read.

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
            raise TypeError("an ID is not a non-negative integer")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a readable tokenizer; repair or remove it") from None
    entries = max([*ids, *added], default=-1) + 1
    if entries > spec.padded_vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {entries} entries, but the model has {spec.padded_vocab_size}; "
            "use the model's own tokenizer"
        )


# ------------------------------------------------------------------------------------ transformers classes


def hf_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from the library's names to those of the transformers classes."""
    return {_HEAD if name == "head.weight" else _CORE + name: tensor for name, tensor in state.items()}


def library_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors to the library's names; unknown names are unchanged."""
    return {
        "head.weight" if name == _HEAD else name.removeprefix(_CORE): tensor for name, tensor in state.items()
    }


def from_library(model: LanguageModel, **fields: Any) -> ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM:
    """Convert a library model to a transformers model that shares its storage.

    ``fields`` are configuration fields such as ``max_position_embeddings`` or ``eos_token_id``.
    """
    converted = hf_model(PretrainedFolder(model.spec, dict(model.state_dict()), fields))
    converted.train(model.training)
    return converted


def to_library(model: ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM) -> LanguageModel:
    """Convert a transformers model to a library model that shares its storage."""
    with torch.device("meta"):
        library: LanguageModel = build(model.config.model_spec)
    state = library_state(model.state_dict())
    if library.head is None:
        state.pop("head.weight")
    library.load_state_dict(state, assign=True)
    return library.train(model.training)


def hf_model(pretrained: PretrainedFolder) -> ImplicitLlamaForCausalLM | ImplicitMamba2ForCausalLM:
    """Return a transformers model in evaluation mode that shares the tensors' storage."""
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


# ------------------------------------------------------------------------------------ writing


def write_transformers(pretrained: PretrainedFolder, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Write a folder that ``from_pretrained`` reads."""
    hf_model(pretrained).save_pretrained(folder, max_shard_size=max_shard_size)


def write_original(pretrained: PretrainedFolder, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Write an explicit model as a folder of transformers' own class, such as ``LlamaForCausalLM``.

    Raises:
        ValueError: no class of transformers can express the spec.

    """
    config = export_config(pretrained.spec) | pretrained.fields
    config.pop("training_length", None)  # a field of this library's configurations only
    from transformers import AutoConfig, AutoModelForCausalLM

    assert isinstance(pretrained.spec, ExplicitLMSpec)
    tensors = ordinary.export_tensors(pretrained.state, pretrained.spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    if pretrained.spec.tie_embeddings:
        embedding = next(name for name in tensors if "embed" in name)
        tensors[_HEAD] = tensors[embedding]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    model.config.dtype = next(iter(tensors.values())).dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def write_published(pretrained: PretrainedFolder, folder: Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write a folder that the published implementation reads.

    Raises:
        ValueError: the published implementation cannot express the spec.

    """
    if is_published(pretrained.published, pretrained.spec):
        original = pretrained.published
        write_folder(folder, pretrained.spec, pretrained.state, original, max_shard_bytes=max_shard_bytes)
        return
    config = published.export_config(pretrained.spec, pretrained.published)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = published.export_tensors(pretrained.state, pretrained.spec)
    write_pickle(folder, tensors, max_shard_bytes=max_shard_bytes)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files that exist."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def fold_weight_norm(pretrained: PretrainedFolder) -> PretrainedFolder:
    """Return the same function without weight norm: every weight is replaced by ``g · v / ‖v‖``.

    Use it for tools that modify weights in place, which weight norm would recompute. Further training then
    takes a different course than with weight norm.
    """
    stem = ".parametrizations.weight.original"
    state = {name: tensor for name, tensor in pretrained.state.items() if stem not in name}
    for name, g in pretrained.state.items():
        if name.endswith(f"{stem}0"):
            layer = name.removesuffix(f"{stem}0")
            state[f"{layer}.weight"] = WeightNorm.compute(g, pretrained.state[f"{layer}{stem}1"])
    spec = pretrained.spec.model_copy(update={"weight_norm": False})
    return PretrainedFolder(spec, state, pretrained.fields, pretrained.published, pretrained.remarks)
