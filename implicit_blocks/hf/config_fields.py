"""Reading a ``config.json`` field by field, with one error that lists all unsupported and unknown fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

NEUTRAL = frozenset(
    {
        "model_type",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "tokenizer_class",
        "use_cache",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "unk_token_id",
        "max_position_embeddings",
        "initializer_range",
        "pretraining_tp",
        "chunk_size_feed_forward",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_scores",
        "return_dict_in_generate",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "cross_attention_hidden_size",
        "is_decoder",
        "tie_encoder_decoder",
        "pruned_heads",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "experts_implementation",
    }
)
"""Fields of any transformers configuration that do not change the logits."""

_SWITCHES = ("is_encoder_decoder", "add_cross_attention")


class ConfigFields:
    """The fields of a configuration, which remembers those that were read and collects complaints.

    Args:
        config: the contents of ``config.json``.

    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()
        self.complaints: list[str] = []

    def get(self, name: str, default: Any) -> Any:
        """Return a field's value, also null, or the default if it is missing."""
        self._read.add(name)
        return self._config.get(name, default)

    def require(self, name: str) -> Any:
        """Return a field's value; if it is missing or null, complain and return None."""
        value = self.get(name, None)
        if value is None:
            self.complain(f"the configuration has no {name!r}, which is required")
        return value

    def expect(self, name: str, *values: Any, default: Any, remedy: str = "") -> None:
        """Complain if a field has another value than these or its default; null is accepted."""
        value = self.get(name, default)
        if value is None or value == default or value in values:
            return
        accepted = " or ".join(repr(each) for each in dict.fromkeys((*values, default)))
        self.complain(f"{name} is {value!r}; {remedy or f'only {accepted} is supported'}")

    def complain(self, message: str) -> None:
        """Add a complaint, once."""
        if message not in self.complaints:
            self.complaints.append(message)

    def check(self, model_type: str) -> None:
        """Raise one error for all complaints and all unknown fields.

        Unknown fields that are null are switched off, and accepted.

        Raises:
            ValueError: there are complaints or unknown fields.

        """
        for name in _SWITCHES:
            self.expect(name, default=False)
        refuse_unread(
            f"this configuration of model type {model_type!r} cannot be converted",
            self._config,
            self._read | NEUTRAL,
            self.complaints,
        )


def refuse_unread(
    failure: str, config: Mapping[str, Any], known: Collection[str], complaints: Sequence[str]
) -> None:
    """Raise one error for all complaints and all fields of a configuration that are not known.

    Raises:
        ValueError: begins with ``failure``; there are complaints or unknown fields that are not null.

    """
    unknown = sorted(name for name, value in config.items() if name not in known and value is not None)
    remedy = "an unknown field; remove it if no output depends on it"
    lines = [*complaints, *(f"{name} is {config[name]!r}: {remedy}" for name in unknown)]
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        raise ValueError(f"{failure}:{listed}")
