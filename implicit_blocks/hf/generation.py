"""Support for ``generate`` of transformers: cache, length limits, prompt checks.

Shape legend: B batch, L tokens of a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from implicit_blocks.decoding.prompts import check_prompts
from implicit_blocks.hf.cache import ImplicitCache
from implicit_blocks.search.options import SearchOptions

_FOR_GENERATE = ("tokenizer", "assistant_tokenizer")
"""Arguments of ``generate`` that transformers also passes to the model."""


class ImplicitGenerationMixin(GenerationMixin):  # type: ignore[misc]  # transformers' classes are Any to the checker
    """Generation with transformers: greedy, sampling, beams, streamers; assisted for attention layers.

    ``tolerance``, ``max_iterations``, ``damping``, ``warm_start``, ``moving_average`` and ``window_length``
    are arguments of ``generate`` as of ``forward``; ``window_length`` cuts the prompt into windows.

    Caches may be dynamic or static. A static cache allocates the keys and values of attention layers in
    advance; a Mamba2 state has constant size. transformers supports no static cache in assisted
    generation. Mamba2 models support neither assisted generation, because rejected tokens cannot be
    removed, nor ``prefill_chunk_size``, which requires ``past_key_values`` (use ``window_length``).
    Quantized and offloaded caches are not supported: they store what layers pass them, and these layers
    pass nothing.
    """

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Check the prompts, then generate as transformers does.

        Raises:
            ValueError: a prompt has no token, contains unknown token IDs, or is padded on the right.

        """
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        embedded = kwargs.get("inputs_embeds")
        shaped = embedded[:, :, 0] if embedded is not None and ids is None else ids
        if shaped is not None:
            mask = kwargs.get("attention_mask")
            if mask is not None and mask.ndim == 2 and mask.shape[1] > shaped.shape[1]:
                mask = mask[:, -shaped.shape[1] :]  # it includes the tokens in a cache
            valid = check_prompts(
                shaped, mask, vocab_size=self.model.lm.spec.vocab_size if shaped is ids else None
            )
            if valid is not None and not bool(valid[:, -1].all()):
                row = int((~valid[:, -1]).nonzero()[0])
                raise ValueError(
                    f"prompt {row} is padded on the right, where generation continues; pad on the left "
                    "(tokenizer.padding_side = 'left')"
                )
        return super().generate(inputs, *args, **kwargs)

    @property
    def _is_stateful(self) -> bool:
        """Whether tokens cannot be removed; transformers then rejects assisted generation."""
        return not self.model.lm.truncates

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Create the cache of ``generate``; a static cache allocates all its memory in advance."""
        name = self.config.cache_name
        value = model_kwargs.get(name)
        if value is not None:
            if generation_config.cache_implementation is not None:
                raise ValueError(f"both cache_implementation and {name} are given; omit one")
            value._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation {implementation!r} is not supported;  choose 'dynamic' or 'static'"
            )
        model_kwargs[name] = ImplicitCache(max_cache_length + 1 if implementation == "static" else None)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """Exclude the entries that only pad the vocabulary: no tokenizer knows them."""
        processors = super()._get_logits_processor(*args, **kwargs)
        first = 0
        for place, processor in enumerate(processors):
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                beams = (kwargs.get("generation_config") or args[0]).num_beams
                if beams is not None and beams > 1:
                    raise ValueError(
                        f"guidance_scale with num_beams={beams} is not supported: transformers does not "
                        "reorder the unconditional branch with its beams; omit one of them"
                    )
                processor.model = _Unconditional(self, kwargs.get("model_kwargs") or {})
                first = place + 1  # guidance scales logits, and 0 · (−inf) is NaN
        spec = self.model.lm.spec
        padding = list(range(spec.vocab_size, spec.padded_vocab_size))
        if padding:
            suppressed = SuppressTokensLogitsProcessor(padding, device=self.lm_head.weight.device)
            processors.insert(first, suppressed)
        return processors

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Drop the tokens that ``cache_params`` already holds, as transformers does for ``past_key_values``.

        Otherwise they would be committed a second time.
        """
        cache = model_kwargs.get("cache_params")
        past = 0 if cache is None else cache.get_seq_length()
        embedded = model_kwargs.get("inputs_embeds")
        if past and embedded is not None:
            model_kwargs = model_kwargs | {"inputs_embeds": embedded[:, past:]}
        elif past:
            mask = model_kwargs.get("attention_mask")
            whole = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
            input_ids = input_ids[:, past:] if whole == input_ids.shape[1] else input_ids
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Drop positions, which are derived from the mask, and arguments that only ``generate`` uses."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        for name in ("position_ids", *_FOR_GENERATE):
            inputs.pop(name, None)
        return inputs


class _Unconditional:
    """The model as called by classifier-free guidance, with the search options of ``generate``.

    transformers passes the unconditional branch its cache as ``past_key_values`` for every family.
    """

    def __init__(self, model: Any, model_kwargs: dict[str, Any]) -> None:
        self.model = model
        names = (*SearchOptions.names(), "window_length")
        self.options = {name: model_kwargs[name] for name in names if model_kwargs.get(name) is not None}

    def __call__(self, input_ids: Tensor, *, past_key_values: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        name = self.model.config.cache_name
        found = self.model(input_ids, **{name: past_key_values}, **kwargs, **self.options)
        return CausalLMOutputWithPast(logits=found.logits, past_key_values=getattr(found, name))
