"""Classification heads on the models: transformers' own classes for sequences and tokens."""

from __future__ import annotations

from typing import Any, cast

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from implicit_blocks.hf.configuration import ImplicitLlamaConfig, ImplicitMamba2Config
from implicit_blocks.hf.modeling import ImplicitPreTrained
from implicit_blocks.layers import Linear


class _Head:
    """Puts a head of the library, of ``config.num_labels`` classes, in the place of transformers' own."""

    def __init__(self, config: ImplicitLlamaConfig | ImplicitMamba2Config) -> None:
        config.check_follows_spec()
        super().__init__(config)  # type: ignore[call-arg]  # of the classes that follow this one
        model = cast(Any, self)
        # transformers' head requires inputs of its weight's dtype.
        width = config.model_spec.d_model
        model.score = Linear(width, config.num_labels, bias=model.score.bias is not None)
        model.initialize_new_head(model.score)
        model.note_where_made(model.library_model)


class _OfSequences(_Head, GenericForSequenceClassification, ImplicitPreTrained):  # type: ignore[misc]  # transformers' classes are Any to the checker
    pass


class _OfTokens(_Head, GenericForTokenClassification, ImplicitPreTrained):  # type: ignore[misc]  # the same
    pass


class ImplicitLlamaForSequenceClassification(_OfSequences):
    """Attention layers with a head that classifies sequences, by the output at each row's last token.

    Maps ``input_ids`` (B, L), padded on either side, to ``logits`` (B, classes), and given ``labels`` (B,) to
    the ``loss`` (cross-entropy, or by ``config.problem_type``). The last token is the rightmost one that is
    not ``config.pad_token_id``; several rows without it raise ``ValueError``. Load the weights of a language
    model with ``AutoModelForSequenceClassification.from_pretrained(folder, num_labels=…)`` and train; not
    useful before training.
    """

    config_class = ImplicitLlamaConfig


class ImplicitLlamaForTokenClassification(_OfTokens):
    """Attention layers with a head that classifies each token.

    Maps ``input_ids`` (B, L) to ``logits`` (B, L, classes), and given ``labels`` (B, L), aligned with the
    tokens, −100 ignored, to the mean cross-entropy ``loss``. Dropout precedes the head
    (``config.classifier_dropout``, 0.1 by default). Causal layers see no later tokens.
    """

    config_class = ImplicitLlamaConfig


class ImplicitMamba2ForSequenceClassification(_OfSequences):
    """Mamba2 layers with a head that classifies sequences; see ``ImplicitLlamaForSequenceClassification``."""

    config_class = ImplicitMamba2Config


class ImplicitMamba2ForTokenClassification(_OfTokens):
    """Mamba2 layers with a head that classifies each token; see ``ImplicitLlamaForTokenClassification``."""

    config_class = ImplicitMamba2Config
