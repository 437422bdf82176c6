"""Causal language models of transformers with the interface of the library's models: baselines for runs.

Shape legend: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks._utils.hints import nearest
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.checkpoints.folder import read_config
from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.outputs import LMOutput
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.specs.transformers_model import TransformersSpec

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_NOT_DECAYED = ("A_log", "dt_bias", "D")
_PROBE = 8
"""Tokens of the sequences that test whether a model is causal and keeps documents apart."""


class TransformersLM(nn.Module):
    """A causal language model of transformers that the trainer can train.

    ``model(input_ids, labels=…)`` returns an :class:`~implicit_blocks.models.implicit.LMOutput` whose
    ``solution`` is None. Labels are aligned with the inputs, not shifted. The names of the parameters are
    those of transformers with the prefix ``model.``.

    Args:
        spec: architecture or folder, and the changes to its configuration.

    Raises:
        ValueError: transformers is not installed; the architecture, the configuration or the folder cannot be
            used; weights do not fit the model (all are listed); the model is not causal.

    """

    def __init__(self, spec: TransformersSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model: Any = _build(spec)
        config = self.model.config
        # RWKV halves weights in place for evaluation, which would change the checkpoints.
        self._rescale_every = getattr(config, "rescale_every", None)
        if self._rescale_every is not None:
            config.rescale_every = 0
        self._documents_apart: bool | None = None
        self.longest = _longest(self.model)
        """Size of the model's table of positions, in tokens; None: any length."""
        if not next(self.model.parameters()).is_meta:
            _require_causal(self.model, vocabulary=config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        window_length: int | None = None,
        return_logits: bool = True,
        **ignored: Any,
    ) -> LMOutput:
        """Predict from tokens (B, L).

        Args:
            input_ids: (B, L) int64.
            labels: (B, L) int64, aligned with the inputs; −100 is ignored. The loss is the mean cross-entropy
                over the others, in nats.
            attention_mask: (B, L), 0 at padding; interpreted by the architecture.
            documents: (B, L) int64, non-decreasing: no token sees another document. Models with attention
                support it; most recurrent models of transformers do not.
            window_length: has no effect: the outputs of a causal model are the same for any windows.
            return_logits: False: return the most likely tokens instead of the logits; needs labels.
            **ignored: options of a fixed-point search, which these models do not have.

        Raises:
            DataError: a row holds several documents and the model does not keep them apart; or there are
                more tokens than positions.
            ValueError: a state is passed or requested, which these models do not support.

        """
        if ignored.get("state") is not None or ignored.get("return_state"):
            raise ValueError("a model of transformers returns no state; use its own generate")
        self.require_length(input_ids.shape[1])
        inputs: dict[str, Any] = {}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.long()
        if documents is not None:
            self.require_documents_apart()
            inputs["position_ids"] = _positions(documents)
        logits = at_least_float32(self.model(input_ids=input_ids, use_cache=False, **inputs).logits)
        loss = None
        if labels is not None:
            total = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            loss = total / (labels != -100).sum().clamp(min=1)
        if return_logits or labels is None:
            return LMOutput(logits=logits, loss=loss)
        return LMOutput(logits=None, loss=loss, predictions=logits.argmax(-1))

    def require_documents_apart(self) -> None:
        """Test whether tokens see other documents of their row.

        Raises:
            DataError: they do.

        """
        if self._documents_apart is None:
            self._documents_apart = _keeps_documents_apart(self.model)
        if not self._documents_apart:
            raise DataError(
                f"{self.model.config.model_type!r} of transformers carries its state from one document into "
                "the next, but the data pack several documents into a row; choose data that are not packed "
                "(data.documents=ignore), or a model with attention only"
            )

    def require_length(self, length: int) -> None:
        """Refuse sequences that are longer than the model's table of positions, if it has one.

        Raises:
            DataError: the sequences are longer.

        """
        if self.longest is not None and length > self.longest:
            raise DataError(
                f"{self.model.config.model_type!r} of transformers is configured with positions for "
                f"{self.longest} tokens, got sequences of {length}; raise "
                "model.config.max_position_embeddings (of fresh weights), or choose shorter sequences"
            )

    @property
    def rescales_weights(self) -> bool:
        """Whether transformers changes the weights in place when the model is evaluated, as those of RWKV."""
        return self._rescale_every is not None

    def reconfigure(self, spec: TransformersSpec) -> None:
        """Accept an unchanged spec only: nothing can change while the weights stay.

        Raises:
            ValueError: the spec differs.

        """
        if spec != self.spec:
            raise ValueError("a model of transformers cannot be reconfigured; use one spec in all phases")

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``.

        Raises:
            ValueError: the layers of the architecture are unknown.

        """
        for layer in self._layers("training.compile_layers=false"):
            layer.compile(dynamic=False)

    def checkpoint_activations(self, what: Literal["none", "steps", "layers"]) -> None:
        """Choose whether backward recomputes the activations of the layers instead of keeping them.

        ``steps`` and ``layers`` have the same effect, because there is one pass through the layers.

        Raises:
            ValueError: the architecture does not support it.

        """
        if what != "none":
            self._layers("training.checkpoint_activations=none")
        # Older versions of transformers name it gradient checkpointing.
        stem = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        if what == "none":
            getattr(self.model, f"{stem}_checkpointing_disable")()
        else:
            getattr(self.model, f"{stem}_checkpointing_enable")({"use_reentrant": False})

    def sharding_units(self) -> list[nn.Module]:
        """Return the layers, which FSDP may shard one by one.

        Raises:
            ValueError: the layers of the architecture are unknown.

        """
        return self._layers("training.distributed.unit=model")

    def _layers(self, remedy: str) -> list[nn.Module]:
        """Return the layers: the modules for which transformers supports activation checkpointing."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"the layers of {self.model.config.model_type!r} of transformers are unknown; set {remedy}"
            )
        return layers

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with weight decay (matrices, embedding) and those without, each once.

        Without weight decay: norms, biases, vectors of any shape, and an SSM's A_log, dt_bias and D.
        """
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            matrix = sum(size > 1 for size in parameter.shape) >= 2
            keeps = name.rpartition(".")[2] in _NOT_DECAYED or getattr(parameter, "_no_weight_decay", False)
            (decayed if matrix and not keeps else others).append(parameter)
        return decayed, others

    @staticmethod
    def count_parameters(spec: TransformersSpec) -> int:
        """Count the parameters of the model that ``spec`` describes, tied ones once, without memory for them.

        Raises:
            ValueError: as the constructor, except for the weights of a folder.

        """
        config = _configuration(spec)
        with torch.device("meta"):
            model = _fresh(spec, config)
        return sum(parameter.numel() for parameter in model.parameters())

    def to_transformers(self) -> Any:
        """Return the model as a transformers model that shares its storage, to generate or to save it."""
        if self._rescale_every is not None:
            self.model.config.rescale_every = self._rescale_every
        return self.model.eval()


# ------------------------------------------------------------------------------------ building


def _build(spec: TransformersSpec) -> Any:
    config = _configuration(spec)
    if spec.folder is None or not spec.weights:
        return _fresh(spec, config)
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            spec.folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed below with the other mismatches
            **_attention(spec),
        )
    except Exception as error:  # transformers and file readers raise any exception
        raise ValueError(f"the weights in {spec.folder} can't be read: {_first_line(error)}") from error
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} has shape {tuple(found)}, expected {tuple(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(
            f"the weights in {spec.folder} do not fit its configuration; use the matching config.json, or "
            f"remove model.config:{listed}"
        )
    return model


def _fresh(spec: TransformersSpec, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **_attention(spec))
    except Exception as error:  # of all architectures there are
        raise ValueError(
            f"transformers can't build {config.model_type!r} from this model.config: {_first_line(error)}; "
            "change the sizes or layers in it, or choose another architecture"
        ) from error


def _attention(spec: TransformersSpec) -> dict[str, Any]:
    return {} if spec.attention is None else {"attn_implementation": spec.attention}


def _configuration(spec: TransformersSpec) -> Any:
    """Return the transformers configuration that a spec describes."""
    found = {} if spec.folder is None else read_config(Path(spec.folder))
    where = "model.architecture" if spec.folder is None else f"{spec.folder}/config.json: model_type"
    config_class = _config_class(str(spec.architecture or found.get("model_type")), where=where)
    _check_keys(spec.config, config_class)
    if spec.folder is not None:
        found, _ = config_class.get_config_dict(spec.folder, local_files_only=True)  # decodes infinities
    fields: dict[str, Any] = {**found, **spec.config}
    if spec.folder is None:
        # Every token is an ordinary token: the embedding of a padding token would not be trained.
        fields = dict.fromkeys(_SPECIAL_TOKENS) | fields
    rows = found.get("vocab_size")
    if spec.folder is not None and spec.weights:
        if isinstance(rows, int) and spec.vocab_size is not None and rows < spec.vocab_size:
            raise ValueError(
                f"the model in {spec.folder} has {rows} tokens, but {spec.vocab_size} are needed; choose "
                "another folder, or use its configuration with fresh weights by model.weights=false"
            )
    elif spec.vocab_size is not None:
        fields["vocab_size"] = spec.vocab_size
    try:
        return config_class.from_dict(fields)
    except Exception as error:  # of all architectures there are
        raise ValueError(
            f"transformers refuses this model.config of {config_class.model_type!r}: {_first_line(error)}"
        ) from error


def _config_class(architecture: str, *, where: str) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ValueError(
            f"model kind 'transformers' needs the package transformers ({error}); {install_extra('hf')}"
        ) from error
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = "is not a causal language model of" if architecture in CONFIG_MAPPING else "is unknown to"
        near = nearest(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        remedy = f"did you mean {near!r}?" if near else "choose one such as llama, mamba, mamba2 or rwkv"
        raise ValueError(f"{where}: {architecture!r} {what} the installed transformers; {remedy}")
    return CONFIG_MAPPING[architecture]


def _check_keys(config: Mapping[str, Any], config_class: Any) -> None:
    """Refuse keys that the configuration would store and never read."""
    known = _fields(config_class)
    unknown = [key for key in config if key not in known]
    if unknown:
        near = {key: nearest(key, known) for key in unknown}
        listed = ", ".join(f"{key!r}" + (f" (did you mean {n!r}?)" if n else "") for key, n in near.items())
        raise ValueError(
            f"model.config has fields that {config_class.model_type!r} does not know: {listed}; remove them. "
            "If they come from a spec that this one extends, extend a spec without them. "
            f"Known fields: {', '.join(sorted(known))}"
        )


def _fields(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def config_fields(architecture: str) -> set[str]:
    """Return the field names of an architecture's configuration, including those of every configuration.

    Raises:
        ValueError: there is no such causal language model, or transformers is not installed.

    """
    return _fields(_config_class(architecture, where="model.architecture"))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


# ------------------------------------------------------------------------------------ properties of a model


def _positions(documents_BL: Tensor) -> Tensor:
    """Return positions that start at 0 in each document, by which transformers separates documents."""
    index = torch.arange(documents_BL.shape[1], device=documents_BL.device).expand_as(documents_BL)
    begins = torch.ones_like(documents_BL, dtype=torch.bool)
    begins[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def _longest(model: Any) -> int | None:
    """Return the size of a model's table of positions; None: it computes positions of any size."""
    most = getattr(model.config, "max_position_embeddings", None)
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    tables += [table for name, table in model.named_buffers() if name.endswith("embed_positions")]
    tokens = model.get_input_embeddings().weight
    # Some tables have one or two rows for padding.
    rows = [len(table) for table in tables if table is not tokens]
    return most if most is not None and any(most <= count <= most + 2 for count in rows) else None


@torch.no_grad()
def _logits(model: Any, tokens_BL: Tensor, **given: Any) -> Tensor:
    """Return the logits in evaluation mode and full precision, independent of mode and autocast."""
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(tokens_BL.device.type, enabled=False):
            logits: Tensor = model(input_ids=tokens_BL, use_cache=False, **given).logits
    finally:
        model.train(was_training)
    return logits.float()


def _same(first: Tensor, second: Tensor, *, tolerance: float) -> bool:
    return bool((first - second).abs().max() <= tolerance * second.abs().max().clamp(min=1e-3))


def _require_causal(model: Any, *, vocabulary: int) -> None:
    """Refuse a model that cannot be called, or whose outputs depend on later tokens."""
    first = torch.arange(_PROBE)[None] % vocabulary
    second = first.clone()
    second[0, -1] = (second[0, -1] + 1) % vocabulary
    try:
        found, other = _logits(model, first), _logits(model, second)
    except Exception as error:  # some architectures detect mismatched sizes only here
        raise ValueError(
            f"{model.config.model_type!r} of transformers, as configured, fails on {_PROBE} tokens: "
            f"{_first_line(error)}; change the sizes in model.config, or choose another architecture"
        ) from error
    if not _same(found[:, :-1], other[:, :-1], tolerance=1e-6):
        raise ValueError(
            f"{model.config.model_type!r} of transformers, as configured, is not causal; "
            "set model.config.is_decoder=true if it has that field, or choose another architecture"
        )


def _keeps_documents_apart(model: Any) -> bool:
    """Return whether the outputs of a second document are the same without the first document."""
    device = next(model.parameters()).device
    tokens = torch.arange(_PROBE, device=device)[None] % model.config.vocab_size
    half = _PROBE // 2
    positions = torch.arange(half, device=device).repeat(2)[None]
    try:
        together = _logits(model, tokens, position_ids=positions)
    except TypeError:  # the model has no position_ids
        return False
    alone = _logits(model, tokens[:, half:], position_ids=positions[:, :half])
    return _same(together[:, half:], alone, tolerance=1e-4)
