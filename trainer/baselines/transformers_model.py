"""Causal language models of transformers under the contract of our own: baselines for the same runs.

Shape legend: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks._utils.hints import nearest
from implicit_blocks._utils.own_parts import install_extra
from implicit_blocks.checkpoints.folder import read_config
from implicit_blocks.layers import at_least_float32
from implicit_blocks.models.outputs import LMOutput
from trainer.errors import DataError
from trainer.specs.transformers_model import TransformersSpec

_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_NOT_DECAYED = ("A_log", "dt_bias", "D")
_PROBE = 8
"""Tokens of the sequences with which a model is asked whether it is causal, and keeps documents apart."""


class TransformersLM(nn.Module):
    """A causal language model of transformers, called as the trainer calls our own.

    ``model(input_ids, labels=…)`` gives an :class:`~implicit_blocks.models.implicit.LMOutput` whose
    ``solution`` is None; labels are aligned with the inputs and are not shifted. The parameters' names are
    transformers' own behind ``model.``.

    Args:
        spec: architecture or folder, and what differs from its configuration.

    Raises:
        ValueError: transformers is not installed; the architecture, the configuration or the folder can't be
            used; weights that do not fit, all of them listed; a model that sees later tokens.

    """

    def __init__(self, spec: TransformersSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model: Any = _build(spec)
        config = self.model.config
        # RWKV halves weights in place for evaluation; a checkpoint written then would be of other weights.
        self._rescale_every = getattr(config, "rescale_every", None)
        if self._rescale_every is not None:
            config.rescale_every = 0
        self._documents_apart: bool | None = None
        self._longest = _longest(self.model)
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
            attention_mask: (B, L), 0 at padding; what it does is the architecture's affair.
            documents: (B, L) int64, non-decreasing: no token sees those of another document. Attention can
                do that; most recurrent models of transformers can't.
            window_length: changes nothing: a causal model's answers are the same for any windows.
            return_logits: False leaves the logits away and gives the likeliest tokens instead; needs labels.
            **ignored: options of a search for fixed points; there is none.

        Raises:
            DataError: several documents in a row, for a model that doesn't keep them apart; more tokens than
                it has positions for.
            ValueError: a state, of which these models have none that we know.

        """
        if ignored.get("state") is not None or ignored.get("return_state"):
            raise ValueError("a model of transformers has no state to hand on; use its own generate")
        self.require_length(input_ids.shape[1])
        given: dict[str, Any] = {}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask.long()
        if documents is not None:
            self.require_documents_apart()
            given["position_ids"] = _positions(documents)
        logits = at_least_float32(self.model(input_ids=input_ids, use_cache=False, **given).logits)
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
        """Refuse to go on where tokens would see those of another document in their row; the model is asked.

        Raises:
            DataError: they would.

        """
        if self._documents_apart is None:
            self._documents_apart = _keeps_documents_apart(self.model)
        if not self._documents_apart:
            raise DataError(
                f"several documents are packed into a row, and {self.model.config.model_type!r} of "
                "transformers carries its state from one into the next; choose data that are not packed "
                "(data.documents=ignore), or a model with attention only"
            )

    def require_length(self, length: int) -> None:
        """Refuse sequences of more tokens than the model has positions for, where it has a table of them.

        Raises:
            DataError: they are longer.

        """
        if self._longest is not None and length > self._longest:
            raise DataError(
                f"{self.model.config.model_type!r} of transformers has positions for {self._longest} tokens "
                f"as it is configured, and sequences of {length} are asked for; raise "
                "model.config.max_position_embeddings (of fresh weights), or choose shorter ones"
            )

    @property
    def longest(self) -> int | None:
        """For how many tokens the model has a table of positions; None: for any number."""
        return self._longest

    def reconfigure(self, spec: TransformersSpec) -> None:
        """Refuse: there is nothing that could change with the weights staying as they are.

        Raises:
            ValueError: if the spec is another one.

        """
        if spec != self.spec:
            raise ValueError("a model of transformers can't change while it trains; keep its spec as it is")

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``.

        Raises:
            ValueError: the architecture doesn't say what its layers are.

        """
        for layer in self._layers("training.compile_layers=false"):
            layer.compile(dynamic=False)

    def checkpoint_activations(self, what: Literal["none", "steps", "layers"]) -> None:
        """Choose whether backward computes the layers' activations again instead of keeping them.

        ``steps`` and ``layers`` are the same: there is one pass through the layers.

        Raises:
            ValueError: the architecture doesn't offer it.

        """
        if what != "none":
            self._layers("training.checkpoint_activations=none")
        # Older versions of transformers call it gradient checkpointing.
        stem = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        if what == "none":
            getattr(self.model, f"{stem}_checkpointing_disable")()
        else:
            getattr(self.model, f"{stem}_checkpointing_enable")({"use_reentrant": False})

    def sharding_units(self) -> list[nn.Module]:
        """Return the layers, which may be sharded over processes one by one.

        Raises:
            ValueError: the architecture doesn't say what its layers are.

        """
        return self._layers("training.distributed.unit=model")

    def _layers(self, instead: str) -> list[nn.Module]:
        """Return the layers: what transformers knows to checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"{self.model.config.model_type!r} of transformers does not say what its layers are; "
                f"set {instead}"
            )
        return layers

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that weight decay applies to (matrices, embedding) and the others, each once.

        Not decayed: norms, biases, vectors in whatever shape, and an SSM's A_log, dt_bias and D.
        """
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            matrix = sum(size > 1 for size in parameter.shape) >= 2
            keeps = name.rpartition(".")[2] in _NOT_DECAYED or getattr(parameter, "_no_weight_decay", False)
            (decayed if matrix and not keeps else others).append(parameter)
        return decayed, others

    def to_transformers(self) -> Any:
        """Hand the model over to transformers, with the same storage: to generate, to save as a folder."""
        if self._rescale_every is not None:
            self.model.config.rescale_every = self._rescale_every
        return self.model.eval()


def count_parameters(spec: TransformersSpec) -> int:
    """Count the parameters of what ``spec`` describes, tied ones once; nothing is allocated.

    Raises:
        ValueError: as :class:`TransformersLM`, the weights of a folder apart.

    """
    config = _configuration(spec)
    with torch.device("meta"):
        model = _fresh(spec, config)
    return sum(parameter.numel() for parameter in model.parameters())


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
            ignore_mismatched_sizes=True,  # listed below, with everything else that doesn't fit
            **_attention(spec),
        )
    except Exception as error:  # transformers and the readers of files raise what they like
        raise ValueError(f"the weights in {spec.folder} can't be read: {_first_line(error)}") from error
    complaints = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    complaints += [f"{name} is unknown" for name in sorted(report["unexpected_keys"])]
    complaints += [
        f"{name} has shape {tuple(found)} and should have {tuple(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in complaints)
        raise ValueError(
            f"the weights in {spec.folder} do not fit its configuration; take the matching config.json, or "
            f"leave out model.config:{listed}"
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
    """Return transformers' configuration of what a spec describes."""
    found = {} if spec.folder is None else read_config(Path(spec.folder))
    where = "model.architecture" if spec.folder is None else f"{spec.folder}/config.json: model_type"
    config_class = _config_class(str(spec.architecture or found.get("model_type")), where=where)
    _check_keys(spec.config, config_class)
    if spec.folder is not None:
        found, _ = config_class.get_config_dict(spec.folder, local_files_only=True)  # decodes infinities
    fields: dict[str, Any] = {**found, **spec.config}
    if spec.folder is None:
        # Token 1 is a token like others here: an embedding of padding would never be trained.
        fields = dict.fromkeys(_SPECIAL_TOKENS) | fields
    rows = found.get("vocab_size")
    if spec.folder is not None and spec.weights:
        if isinstance(rows, int) and spec.vocab_size is not None and rows < spec.vocab_size:
            raise ValueError(
                f"the model in {spec.folder} has {rows} tokens and {spec.vocab_size} are needed; take "
                "another folder, or its configuration alone by model.weights=false"
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
        what = "is no causal language model of" if architecture in CONFIG_MAPPING else "is unknown to"
        near = nearest(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        remedy = f"did you mean {near!r}?" if near else "take one such as llama, mamba, mamba2 or rwkv"
        raise ValueError(f"{where}: {architecture!r} {what} the transformers installed; {remedy}")
    return CONFIG_MAPPING[architecture]


def _check_keys(config: Mapping[str, Any], config_class: Any) -> None:
    """Refuse keys that the configuration would carry along and never read."""
    known = _fields(config_class)
    unknown = [key for key in config if key not in known]
    if unknown:
        near = {key: nearest(key, known) for key in unknown}
        listed = ", ".join(f"{key!r}" + (f" (did you mean {n!r}?)" if n else "") for key, n in near.items())
        raise ValueError(
            f"model.config has fields that {config_class.model_type!r} does not know: {listed}; leave them "
            "out, and if they are another architecture's, from what the spec extends, extend one without, "
            f"such as an explicit model's; known: {', '.join(sorted(known))}"
        )


def _fields(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def config_fields(architecture: str) -> set[str]:
    """Return the names that an architecture's configuration knows, transformers' common ones included.

    Raises:
        ValueError: no causal language model of that name, or transformers is not installed.

    """
    return _fields(_config_class(architecture, where="model.architecture"))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


# ------------------------------------------------------------------------------------ what a model does


def _positions(documents_BL: Tensor) -> Tensor:
    """Count each document's tokens from 0: from such positions transformers tells documents apart."""
    index = torch.arange(documents_BL.shape[1], device=documents_BL.device).expand_as(documents_BL)
    begins = torch.ones_like(documents_BL, dtype=torch.bool)
    begins[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def _longest(model: Any) -> int | None:
    """Return for how many tokens a model has a table of positions; None: it works them out."""
    most = getattr(model.config, "max_position_embeddings", None)
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    tables += [table for name, table in model.named_buffers() if name.endswith("embed_positions")]
    tokens = model.get_input_embeddings().weight
    # Some keep a row or two for padding.
    rows = [len(table) for table in tables if table is not tokens]
    return most if most is not None and any(most <= count <= most + 2 for count in rows) else None


@torch.no_grad()
def _logits(model: Any, tokens_BL: Tensor, **given: Any) -> Tensor:
    """Return the logits in evaluation mode and full precision, whatever is set."""
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
    """Refuse a model that can't be called, or whose answers depend on the later tokens that it predicts."""
    first = torch.arange(_PROBE)[None] % vocabulary
    second = first.clone()
    second[0, -1] = (second[0, -1] + 1) % vocabulary
    try:
        found, other = _logits(model, first), _logits(model, second)
    except Exception as error:  # some architectures notice sizes that don't fit as late as here
        raise ValueError(
            f"{model.config.model_type!r} of transformers fails on {_PROBE} tokens as it is configured: "
            f"{_first_line(error)}; change the sizes in model.config, or choose another architecture"
        ) from error
    if not _same(found[:, :-1], other[:, :-1], tolerance=1e-6):
        raise ValueError(
            f"{model.config.model_type!r} of transformers sees later tokens as it is configured; "
            "set model.config.is_decoder=true where it has that, or choose another architecture"
        )


def _keeps_documents_apart(model: Any) -> bool:
    """Tell whether a second document's answers are the same without the first."""
    device = next(model.parameters()).device
    tokens = torch.arange(_PROBE, device=device)[None] % model.config.vocab_size
    half = _PROBE // 2
    positions = torch.arange(half, device=device).repeat(2)[None]
    try:
        together = _logits(model, tokens, position_ids=positions)
    except TypeError:  # no such argument
        return False
    alone = _logits(model, tokens[:, half:], position_ids=positions[:, :half])
    return _same(together[:, half:], alone, tolerance=1e-4)
