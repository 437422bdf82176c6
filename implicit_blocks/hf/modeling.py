"""The models as transformers classes: thin wrappers around ``ImplicitLM`` and ``ExplicitLM``.

This module implements what transformers requires of a model (caches, shifted labels, masks over all tokens
so far, tied weights); the computation is one call of the library's model.

Shape legend: B batch, L tokens of this call, T tokens so far, D model width, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_outputs import ModelOutput

from implicit_blocks.decoding.prompts import needed_ids
from implicit_blocks.hf.cache import ImplicitCache
from implicit_blocks.hf.configuration import ImplicitLlamaConfig, ImplicitMamba2Config
from implicit_blocks.hf.generation import ImplicitGenerationMixin
from implicit_blocks.hf.hidden_states import chosen_iterates, hidden_states
from implicit_blocks.hf.inputs import check_options, documents_of, mask_of_these, one_cache
from implicit_blocks.hf.objectives import WithHead, objective_loss
from implicit_blocks.hf.remote_code import write_shim
from implicit_blocks.layers import Linear, at_least_float32
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.outputs import Encoded, Iterate
from implicit_blocks.registry import build
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ImplicitLMSpec


@dataclass
class ImplicitModelOutput(ModelOutput):  # type: ignore[misc]  # transformers' classes are Any to the checker
    """``last_hidden_state`` (B, L, D), the input of a head; the family's cache; the search's ``solution``.

    ``hidden_states``, if requested: the embedded tokens, iterates of the core, and ``last_hidden_state``.
    ``iterates``, in training with an objective that reads them: by their number of loops.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: ImplicitCache | None = None
    cache_params: ImplicitCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None  # read by transformers' classes
    solution: Solution | None = None
    iterates: dict[int, Iterate] | None = None


@dataclass
class ImplicitCausalLMOutput(ModelOutput):  # type: ignore[misc]  # the same
    """``loss`` if labels are given, ``logits`` (B, L or fewer, V), the cache, the search's ``solution``.

    ``hidden_states``: as in ``ImplicitModelOutput``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: ImplicitCache | None = None
    cache_params: ImplicitCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None  # read by transformers' classes
    solution: Solution | None = None


class ImplicitPreTrained(PreTrainedModel):  # type: ignore[misc]  # the same
    """What all transformers classes share: saving, initialization, the embedding, gradient checkpointing."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ("ImplicitLM", "ExplicitLM")  # the loop runs on one device
    # Vectors of rates and scales, which bfloat16 would change. Matched as regular expressions.
    _keep_in_fp32_modules_strict = (
        r"A_log$",
        r"dt_bias$",
        r"mixer\.D$",
        r"norm\.weight$",
        r"gamma$",  # residual scalings
        r"injection\.gate$",
        r"weight\.original0$",  # weight norm's gains
    )
    _supports_sdpa = True  # attention is torch's own operator; no other implementation can be chosen

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: every saved folder contains the files that ``trust_remote_code`` needs."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the file that ``trust_remote_code`` needs."""
        if not os.path.isfile(save_directory) and kwargs.get("is_main_process", True):
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_shim(Path(save_directory), self.config.class_stem)
        super().save_pretrained(save_directory, *args, **kwargs)

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Upload the file that ``trust_remote_code`` needs too: it counts as modified once written again."""
        write_shim(Path(working_dir), self.config.class_stem)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    @torch.no_grad()
    @guard_torch_init_functions()  # type: ignore[untyped-decorator]  # transformers' are Any to the checker
    def initialize_weights(self) -> None:
        """Initialize parameters missing in a checkpoint; the constructor initializes new models."""
        parameters = list(self.parameters())
        if not getattr(self, "_made_on_meta", False) or all(p.is_meta for p in parameters):
            return
        loaded = [p for p in parameters if getattr(p, "_is_hf_initialized", False)]
        if len(loaded) == len(parameters):
            return
        kept = [(p, p.detach().clone()) for p in loaded]
        for module in self.modules():
            if isinstance(module, LanguageModel):
                module.reset_parameters()
            elif isinstance(module, Linear) and module in (self.get_output_embeddings(), self.score_head):
                self.initialize_new_head(module)
        for parameter, value in kept:
            parameter.copy_(value)

    def initialize_new_head(self, head: Linear) -> None:
        """Initialize the weight of a head N(0, σ²) with ``config.initializer_range``, and its bias 0."""
        nn.init.normal_(head.weight, std=self.config.initializer_range)
        if head.bias is not None:
            nn.init.zeros_(head.bias)

    def _set_gradient_checkpointing(
        self, enable: bool = True, *args: Any, every_n_layers: int = 1, **kwargs: Any
    ) -> None:
        """Recompute each layer of each differentiated call of the map in backward, or no longer.

        ``gradient_checkpointing_kwargs`` have no effect: the recomputation is torch's non-reentrant one.

        Raises:
            ValueError: ``every_n_layers`` is not 1.

        """
        if enable and every_n_layers != 1:
            raise ValueError(
                f"every_n_layers is {every_n_layers}; these models recompute all layers: choose 1"
            )
        for module in self.modules():
            if isinstance(module, ImplicitPreTrained):
                module.gradient_checkpointing = enable
            elif isinstance(module, LanguageModel):
                module.checkpoint_activations("layers" if enable else "none")

    @property
    def library_model(self) -> LanguageModel:
        """The library's model, which computes everything but the head."""
        return cast(LanguageModel, self.base_model.lm)

    @property
    def score_head(self) -> nn.Module | None:
        """The classification head, or None."""
        return getattr(self, "score", None)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.library_model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding."""
        self.library_model.embedding = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize embedding and head as transformers does, and update the spec."""
        resized: nn.Module = super().resize_token_embeddings(*args, **kwargs)
        lm, spec = self.library_model, self.config.model_spec
        rows = lm.embedding.weight.shape[0]
        changes = {"vocab_size": rows, "pad_vocab_to": 1}
        wanted = args[0] if args else kwargs.get("new_num_tokens")
        # Padding rows may become tokens without a change in the number of rows.
        if rows != spec.padded_vocab_size or (wanted is not None and wanted > spec.vocab_size):
            self.config.set_model_spec(spec.model_copy(update=changes))
            lm.spec = lm.spec.model_copy(update=changes)
        return resized

    def note_where_made(self, lm: LanguageModel) -> None:
        """Remember whether the parameters are on the meta device, so that loading initializes them."""
        self._made_on_meta = lm.embedding.weight.is_meta

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head, or None."""
        return getattr(self, "lm_head", None)


class _ImplicitModel(ImplicitPreTrained):
    """Tokens to hidden states."""

    def __init__(self, config: ImplicitLlamaConfig | ImplicitMamba2Config) -> None:
        super().__init__(config)
        config.check_follows_spec()  # fields can be set after construction
        # The causal model owns the head, so the library's model is built without one, as if tied.
        spec = config.model_spec.model_copy(update={"tie_embeddings": True})
        self.lm = cast(LanguageModel, build(spec))
        self.note_where_made(self.lm)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ImplicitCache | None = None,
        cache_params: ImplicitCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        window_length: int | None = None,
        # as in ``_ImplicitForCausalLM``
        tolerance: float | None = None,
        max_iterations: int | None = None,
        damping: float | None = None,
        warm_start: bool = False,
        moving_average: float | None = None,
        loops: int | None = None,
        trajectory: Sequence[int] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        with_head: Callable[[ImplicitLM], WithHead] | None = None,
        **options: Any,
    ) -> ImplicitModelOutput | tuple[Any, ...]:
        """Compute the hidden states; arguments as for ``ImplicitLlamaForCausalLM``.

        ``with_head`` adds the head of the causal model, whose predictions an exit criterion may read.
        """
        check_options(type(self).__name__, options)
        lm: Any = self.lm
        if isinstance(self.lm, ImplicitLM) and with_head is not None:
            lm = with_head(self.lm)
        elif loops is None and not self.training and self._lacks_predictions():
            raise ValueError(
                "the exit criterion reads predictions, and this class has no head; use the class for causal "
                "language modeling, or set at_evaluation.exit of the model's spec to residual"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if input_ids is not None:
            self.lm.check_tokens(input_ids)
        name = self.config.cache_name
        cache = one_cache(name, {"past_key_values": past_key_values, "cache_params": cache_params})
        x_BLD = self.lm.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if x_BLD.ndim != 3 or 0 in x_BLD.shape:
            raise ValueError(
                f"the tokens have shape {tuple(x_BLD.shape[:-1])}; expected (batch, tokens), both positive"
            )
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training
        if use_cache and cache is None:
            cache = ImplicitCache()
        state = None if cache is None else cache.state
        if state is None and cache is not None and cache.max_seq_len is not None:
            state = self.lm.initial_state(len(x_BLD), max_seq_len=cache.max_seq_len)
        past = 0 if state is None else state.length
        mask = mask_of_these(attention_mask, x_BLD, past=past)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        chosen = chosen_iterates(self.lm, loops=loops, trajectory=trajectory) if output_hidden_states else ()
        encoded = type(self.lm).encode(
            lm,
            x_BLD,
            ids_BL=None if input_ids is None else needed_ids(self.lm, input_ids),
            attention_mask=mask,
            documents=documents_of(position_ids, mask, x_BLD, state),
            state=state,
            return_state=bool(use_cache),
            window_length=window_length,
            search=SearchOptions(
                tolerance=tolerance,
                max_iterations=max_iterations,
                damping=damping,
                warm_start=warm_start,
                moving_average=moving_average,
                loops=loops,
                trajectory=chosen,
            ),
        )
        found = ImplicitModelOutput(encoded.hidden_BLD, solution=encoded.solution)
        if output_hidden_states:
            found["hidden_states"] = hidden_states(self.lm, x_BLD, encoded, chosen)
        if self.training and encoded.iterates:
            found["iterates"] = encoded.iterates
        if use_cache:
            assert encoded.state is not None
            assert cache is not None
            cache.commit(encoded.state, self.lm.state_blocks())
            found[name] = cache
        return found.to_tuple() if return_dict is False else found

    def _lacks_predictions(self) -> bool:
        spec = self.config.model_spec
        read = isinstance(spec, ImplicitLMSpec) and spec.at_evaluation.exit.reads == "predict"
        return read and not spec.tie_embeddings


class _ImplicitForCausalLM(ImplicitGenerationMixin, ImplicitPreTrained):
    """Tokens to logits: the model and the head, which may be tied to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.lm.embedding.weight"}  # noqa: RUF012  # read by transformers
    model: Any
    _model_class: type[_ImplicitModel]

    def __init__(self, config: ImplicitLlamaConfig | ImplicitMamba2Config) -> None:
        super().__init__(config)
        config.check_follows_spec()
        self.model = self._model_class(config)
        spec = config.model_spec
        self.lm_head = Linear(spec.d_model, spec.padded_vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=spec.embedding_std)
        self.note_where_made(self.model.lm)
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        with torch.device("meta"):
            head = Linear(new_embeddings.in_features, new_embeddings.out_features, bias=False)
        head.weight = new_embeddings.weight
        self.lm_head = head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ImplicitCache | None = None,
        cache_params: ImplicitCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        window_length: int | None = None,
        # SearchKwargs one by one: transformers validates the arguments of ``generate`` by this signature
        tolerance: float | None = None,
        max_iterations: int | None = None,
        damping: float | None = None,
        warm_start: bool = False,
        moving_average: float | None = None,
        loops: int | None = None,
        trajectory: Sequence[int] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> ImplicitCausalLMOutput | tuple[Any, ...]:
        """Predict the next tokens.

        Args:
            input_ids: (B, L) tokens that follow those in the cache.
            attention_mask: (B, L) or (B, T), 0 at padding on either side.
            position_ids: optional: positions are derived from the mask. In an unpadded row, restarts from 0
                separate documents, which are independent; other positions raise an error.
            past_key_values: the cache of an earlier call; it is modified and returned. For models with
                attention layers.
            cache_params: the same for models with Mamba2 layers, as in transformers.
            inputs_embeds: (B, L, D) embedded tokens instead of ``input_ids``.
            labels: (B, L), **shifted here** as everywhere in transformers: pass ``input_ids``; −100 is
                ignored. In training the loss is the spec's objective plus the penalty of its gradient.
            use_cache: return a cache; by default the configuration's value, and False in training.
            logits_to_keep: compute the logits of this many last tokens, or of the tokens with these indices;
                0: all tokens.
            window_length: solve this many tokens at a time; 1 is the paper's sequential mode, None solves all
                tokens together.
            tolerance: overrides the spec's tolerance. Explicit models ignore this and the next four
                arguments.
            max_iterations: maximum number of calls of the map.
            damping: share of f(z) in a step of the solver.
            warm_start: start the search of each token at the solution of the last token before its window.
            moving_average: α of an average over the iterates, for noisy maps (``SearchOptions``).
            loops: take this many loops of the core instead of searching.
            trajectory: the iterates in ``hidden_states``, by their number of loops, from 1. By default all
                of a fixed number of loops, and none of a search, whose number differs by token.
            output_hidden_states: return ``hidden_states``: the embedded tokens, the iterates of the core,
                which have its width, and the input of the head.
            return_dict: False returns a tuple.
            options: further arguments of transformers; ``num_items_in_batch`` is the number of tokens that
                the loss is averaged over.

        Raises:
            ValueError: shapes do not fit, tokens or labels are unknown (checked on a CPU only, to avoid
                waiting for a GPU), or an option is not supported.
            TypeError: an argument is unknown.

        """
        if labels is not None:
            self.model.lm.check_label_ids(labels)
        found = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache_params=cache_params,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            window_length=window_length,
            tolerance=tolerance,
            max_iterations=max_iterations,
            damping=damping,
            warm_start=warm_start,
            moving_average=moving_average,
            loops=loops,
            trajectory=trajectory,
            output_hidden_states=output_hidden_states,
            with_head=partial(WithHead, head=self.lm_head),
            **options,
        )
        hidden = found.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.model.lm.scale_logits(at_least_float32(self.lm_head(hidden)))
        loss = None
        if labels is not None:
            items = options.get("num_items_in_batch")
            encoded = Encoded(found.last_hidden_state, found.solution, iterates=found.iterates or {})
            loss = objective_loss(self.model.lm, self.lm_head, encoded, labels, items=items)
            if loss is None:
                kept = {"labels": labels, "vocab_size": logits.shape[-1], "num_items_in_batch": items}
                loss = self.loss_function(logits=logits, **kept)
        output = ImplicitCausalLMOutput(
            loss,
            logits,
            found.past_key_values,
            found.cache_params,
            found.hidden_states,
            solution=found.solution,
        )
        return output.to_tuple() if return_dict is False else output


class ImplicitLlamaModel(_ImplicitModel):
    """Attention layers iterated to a fixed point, or applied once, without a head.

    Maps ``input_ids`` (B, L) to ``last_hidden_state`` (B, L, D). M. Schöne et al., "Implicit Language Models
    are RNNs", ICML 2025. Without transformers' tools, use ``implicit_blocks.build`` instead.
    """

    config_class = ImplicitLlamaConfig


class ImplicitMamba2Model(_ImplicitModel):
    """Mamba2 layers iterated to a fixed point, or applied once, without a head.

    As ``ImplicitLlamaModel``, with layers of T. Dao and A. Gu, "Transformers are SSMs", ICML 2024.
    """

    config_class = ImplicitMamba2Config


class ImplicitLlamaForCausalLM(_ImplicitForCausalLM):
    """A language model with attention layers, implicit or explicit.

    Maps ``input_ids`` (B, L) to ``logits`` (B, L, V) and, given ``labels`` (B, L), which are shifted here as
    in transformers, the mean ``loss`` in nats per token. Raises ``ValueError`` for masks and caches that do
    not fit. M. Schöne et al., "Implicit Language Models are RNNs", ICML 2025. Without transformers, use
    ``implicit_blocks.build`` instead: it returns the wrapped model.
    """

    config_class = ImplicitLlamaConfig
    _model_class = ImplicitLlamaModel


class ImplicitMamba2ForCausalLM(_ImplicitForCausalLM):
    """A language model with Mamba2 layers, implicit or explicit.

    As ``ImplicitLlamaForCausalLM``, with layers of T. Dao and A. Gu, "Transformers are SSMs", ICML 2024; the
    cache argument is ``cache_params``.
    """

    config_class = ImplicitMamba2Config
    _model_class = ImplicitMamba2Model
