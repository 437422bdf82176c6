"""transformers configurations, each a wrapper around one model spec.

The spec defines the model. The other fields are those that transformers and its tools read; they are
derived from the spec and must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from implicit_blocks import registry
from implicit_blocks.hf.remote_code import auto_map
from implicit_blocks.models.specs import LayerSpec
from implicit_blocks.specs import (
    AttentionSpec,
    ImplicitLMSpec,
    LanguageModelSpec,
    Mamba2Spec,
    ModelSpec,
    SwiGLUSpec,
)

_FOLLOWING = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_types",
    "tie_word_embeddings",
    "initializer_range",
)


_FULL, _LINEAR = "full_attention", "linear_attention"
"""Types of layers that transformers knows; all mixers but Mamba2 count as the first."""


def portable(spec: LanguageModelSpec) -> LanguageModelSpec:
    """Return a copy in which the backend fields of every mixer, of all stacks, have their defaults."""

    def changed(part: Any) -> Any:
        if part is None:
            return None
        layers = None if part.layers is None else tuple(map(_portable_layer, part.layers))
        mixer = None if part.mixer is None else part.mixer.portable()
        return part.model_copy(update={"mixer": mixer, "layers": layers})

    ends = {"prelude": changed(spec.prelude), "coda": changed(spec.coda)}
    whole: LanguageModelSpec = changed(spec).model_copy(update=ends)
    return whole


def _portable_layer(layer: LayerSpec) -> LayerSpec:
    return layer if layer.mixer is None else layer.model_copy(update={"mixer": layer.mixer.portable()})


class _ImplicitConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers' classes are Any to the checker
    """Shared part of both families; see ``from_spec``."""

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache_params", "solution"]
    class_stem: ClassVar[str]
    cache_name: ClassVar[str]
    """The argument by which transformers passes the family its cache."""

    spec: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int = 2048  # no limit of the models: tools read it
    training_length: int | None = None  # tokens of a sequence in training
    layer_types: list[str] | None = None
    tie_word_embeddings: bool | None = None
    initializer_range: float | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Validate the spec, derive the other fields from it, and reject fields that contradict it."""
        values = {name: kwargs.pop(name, None) for name in self._derived()}
        values |= {name: getattr(self, name) for name in _FOLLOWING}
        kwargs.pop("auto_map", None)
        self.set_model_spec(self._default_spec() if self.spec is None else self._checked(self.spec))
        self._refuse_others(values)
        self.auto_map = auto_map(self.class_stem)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration as transformers does; overridden fields must agree with the spec.

        Raises:
            ValueError: a field contradicts the spec.

        """
        found = super().from_dict(config_dict, **kwargs)
        (found[0] if isinstance(found, tuple) else found).check_follows_spec()
        return found

    def check_follows_spec(self) -> None:
        """Check the derived fields against the spec, since transformers and users can set each of them.

        Raises:
            ValueError: a field contradicts the spec; the message names the first.

        """
        self._refuse_others({name: getattr(self, name) for name in self._following(self.model_spec)})

    def _refuse_others(self, values: Mapping[str, Any]) -> None:
        decided = self._following(self.model_spec)
        for name, value in values.items():
            if value is not None and value != decided[name]:
                resize = "resize_token_embeddings of the loaded model changes it, or " * (
                    name == "vocab_size"
                )
                raise ValueError(
                    f"{name} is {value!r}, but the spec makes it {decided[name]!r}; {resize}pass a spec "
                    f"({type(self).__name__}.from_spec) and omit {name}"
                )

    @classmethod
    def from_spec(cls, spec: ModelSpec, **fields: Any) -> Self:
        """Return the configuration of an implicit or explicit spec; ``fields`` are fields of transformers."""
        return cls(spec=spec.model_dump(mode="json"), **fields)

    @property
    def model_spec(self) -> LanguageModelSpec:
        """The model spec."""
        return self._checked(self.spec)

    def set_model_spec(self, spec: LanguageModelSpec) -> None:
        """Replace the spec and derive the other fields from it."""
        self.spec = spec.model_dump(mode="json")
        for name, value in self._following(spec).items():
            setattr(self, name, value)

    def _following(self, spec: LanguageModelSpec) -> dict[str, Any]:
        """Return the fields derived from the spec."""
        return {
            "vocab_size": spec.padded_vocab_size,  # transformers means the width of the logits
            "hidden_size": spec.d_model,
            "num_hidden_layers": spec.total_layers,  # of prelude, core and coda; each layer of the core once
            "layer_types": [
                _LINEAR if isinstance(layer.mixer, Mamba2Spec) else _FULL
                for stack in spec.stacks.values()
                for layer in stack.layers
            ],
            "tie_word_embeddings": spec.tie_embeddings,
            "initializer_range": spec.embedding_std,
            **self._of_layers(spec),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields to save: always the whole spec, since the defaults may change later.

        Backend choices are not saved: another machine may load the folder.
        """
        saved: dict[str, Any] = super().to_diff_dict()
        spec = self.model_spec
        # Read from the spec, because fields may have been set since: every saved folder stays loadable.
        saved |= {**self._following(spec), "max_position_embeddings": self.max_position_embeddings}
        return saved | {"spec": portable(spec).model_dump(mode="json")}

    def _checked(self, fields: Mapping[str, Any] | ModelSpec | None) -> LanguageModelSpec:
        if isinstance(fields, Mapping):
            kind = fields.get("kind")
            if not isinstance(kind, str):
                raise ValueError(
                    "the spec of the configuration has no 'kind'; it must be a complete model spec"
                )
            fields = registry.entry("model", kind).spec.model_validate(fields)
        if not isinstance(fields, LanguageModelSpec):
            raise ValueError(
                f"no transformers class exists for models of kind {getattr(fields, 'kind', None)!r}; "
                "choose implicit_lm or explicit_lm"
            )
        self._check_mixer(fields)
        return fields

    def _default_spec(self) -> LanguageModelSpec:
        raise NotImplementedError

    def _check_mixer(self, spec: LanguageModelSpec) -> None:
        raise NotImplementedError

    @classmethod
    def _derived(cls) -> tuple[str, ...]:
        return ()

    def _of_layers(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: every saved folder contains the files that ``trust_remote_code`` needs."""


class ImplicitLlamaConfig(_ImplicitConfig):
    """Configuration of models with attention layers: implicit Llama models and their explicit twins.

    Create it with ``ImplicitLlamaConfig.from_spec(spec)``; the default spec is that of the 130M model.
    """

    model_type = "implicit_blocks_llama"
    class_stem: ClassVar[str] = "ImplicitLlama"
    cache_name: ClassVar[str] = "past_key_values"

    def _default_spec(self) -> LanguageModelSpec:
        mixer, mlp = AttentionSpec(n_heads=12), SwiGLUSpec(d_ff=2048)
        return ImplicitLMSpec(vocab_size=50277, d_model=768, n_layers=12, mixer=mixer, mlp=mlp)

    def _check_mixer(self, spec: LanguageModelSpec) -> None:
        if isinstance(spec.mixer, Mamba2Spec):
            raise ValueError(
                f"{type(self).__name__} is for attention models, but the mixer is 'mamba2'; "
                "use ImplicitMamba2Config"
            )

    @classmethod
    def _derived(cls) -> tuple[str, ...]:
        return ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")

    def _of_layers(self, spec: LanguageModelSpec) -> dict[str, Any]:
        heads = getattr(spec.mixer, "n_heads", 1)
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(spec.mixer, "n_kv_heads", None) or heads,
            "head_dim": getattr(spec.mixer, "head_dim", None) or spec.core_width // heads,
            "intermediate_size": getattr(spec.mlp, "d_ff", None),
        }


class ImplicitMamba2Config(_ImplicitConfig):
    """Configuration of models with Mamba2 layers: implicit models and their explicit twins.

    Create it with ``ImplicitMamba2Config.from_spec(spec)``; the default spec is that of the 130M model.
    """

    model_type = "implicit_blocks_mamba2"
    class_stem: ClassVar[str] = "ImplicitMamba2"
    cache_name: ClassVar[str] = "cache_params"

    def _default_spec(self) -> LanguageModelSpec:
        return ImplicitLMSpec(vocab_size=50277, pad_vocab_to=16, d_model=768, n_layers=24, mixer=Mamba2Spec())

    def _check_mixer(self, spec: LanguageModelSpec) -> None:
        if not isinstance(spec.mixer, Mamba2Spec):
            raise ValueError(
                f"{type(self).__name__} is for Mamba2 models, but the mixer is {spec.mixer.kind!r}; "
                "use ImplicitLlamaConfig"
            )

    @classmethod
    def _derived(cls) -> tuple[str, ...]:
        return ("state_size", "expand", "head_dim", "num_heads", "n_groups", "conv_kernel")

    def _of_layers(self, spec: LanguageModelSpec) -> dict[str, Any]:
        mixer = spec.mixer
        assert isinstance(mixer, Mamba2Spec)
        return {
            "state_size": mixer.d_state,
            "expand": mixer.expand,
            "head_dim": mixer.head_dim,
            "num_heads": mixer.expand * spec.core_width // mixer.head_dim,
            "n_groups": mixer.n_groups,
            "conv_kernel": mixer.d_conv,
        }


def config_class_for(spec: ModelSpec) -> type[ImplicitLlamaConfig] | type[ImplicitMamba2Config]:
    """Return the configuration class for a spec: Mamba2 mixers have their own, all others share one."""
    return (
        ImplicitMamba2Config if isinstance(getattr(spec, "mixer", None), Mamba2Spec) else ImplicitLlamaConfig
    )
