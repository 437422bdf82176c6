"""What implicit and explicit language models share outside their forward passes: parameters, state, head.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.layers import Linear, at_least_float32, reset_parameters_
from implicit_blocks.models.backbone import Backbone
from implicit_blocks.models.inputs import check_label_ids, check_token_ids
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.models.training import TrainingMethods
from implicit_blocks.ops.cross_entropy import linear_cross_entropy
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.weight_norm import assign_weight


class ModelParts(TrainingMethods, nn.Module):
    """Embedding, layers and head of a language model, and the state between its windows.

    ``ImplicitLM`` and ``ExplicitLM`` define the forward pass. Only one thread at a time may call a model,
    because the weights are cached on the layers during a call. A call from a second thread raises; make a
    copy for each thread beforehand (``copy.deepcopy``).
    """

    def __init__(self, spec: ImplicitLMSpec | ExplicitLMSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.padded_vocab_size, spec.d_model)
        self.backbone = Backbone(spec)
        self.head = None if spec.tie_embeddings else Linear(spec.d_model, spec.padded_vocab_size, bias=False)
        self.agree: Agreement | None = None
        """How ranks that must make equally many iterations agree to stop; None: each rank stops alone."""

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream: float32, or float64 in a float64 model."""
        return torch.promote_types(self.embedding.weight.dtype, torch.float32)

    @property
    def head_weight(self) -> Tensor:
        """``E``, (V, D): the head's weight, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def initial_state(self, batch_size: int, *, max_seq_len: int | None = None) -> SequenceState:
        """Return the state before the first token; caches reserve room for ``max_seq_len`` tokens."""
        weight = self.embedding.weight
        layers = self.backbone.initial_states(
            batch_size, device=weight.device, dtype=weight.dtype, max_seq_len=max_seq_len
        )
        position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return SequenceState(batch_size, 0, position, layers)

    def cache_weights(self) -> WeightCache:
        """Return the current weights of the map, prepared for any number of calls of ``encode``.

        For calls without gradients, in the autocast mode of this call. The head is not part of the map and
        casts its own weight.
        """
        return WeightCache(*(module for module in self.children() if module is not self.head))

    def predict(self, z_BLD: Tensor) -> Tensor:
        """Return the logits ``E z``, (…, V), in float32 or better, of the output of ``encode``, (…, D)."""
        weight = self.head_weight
        return at_least_float32(F.linear(z_BLD.to(weight.dtype), weight))

    def check_tokens(self, input_ids: Tensor) -> None:
        """Raise ValueError for tensors other than token IDs of this model, (B, L)."""
        check_token_ids(input_ids, vocab_size=self.embedding.weight.shape[0])

    def check_label_ids(self, labels: Tensor) -> None:
        """Raise ValueError for labels, (B, L), that are neither token IDs of this model nor -100."""
        check_label_ids(labels, vocab_size=self.embedding.weight.shape[0])

    def reset_parameters(self) -> None:
        """Initialize all parameters: embedding N(0, σ²), linear layers as in torch, mixers by their own rule.

        With ``scale_residual_init`` the projections that write into the residual stream are divided by the
        square root of their number, so that its variance does not grow with depth. The published code intends
        the same, but its weight norm undoes the scaling in implicit models.
        """
        reset_parameters_(self)
        nn.init.normal_(self.embedding.weight, std=self.spec.embedding_std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.spec.embedding_std)
        if self.spec.scale_residual_init:
            projections = [p for block in self.backbone.blocks() for p in block.output_projections()]
            for projection in projections:
                weight = projection.weight
                assert isinstance(weight, Tensor)
                assign_weight(projection, weight / math.sqrt(len(projections)))


def read_out(model: ModelParts, encoded: Encoded, *, labels: Tensor | None, return_logits: bool) -> LMOutput:
    """Return the logits ``E z`` of encoded tokens, and with labels the mean cross-entropy, in nats.

    ``return_logits=False`` computes the loss in chunks of tokens, so that (B, L, V) is never allocated.
    """
    labels = None if labels is None else labels.long()
    if labels is not None and not return_logits:
        hidden = encoded.hidden_BLD.flatten(0, 1)
        total, predictions = linear_cross_entropy(hidden, model.head_weight, labels.flatten())
        return LMOutput(
            logits=None,
            loss=total / (labels != -100).sum().clamp(min=1),
            solution=encoded.solution,
            state=encoded.state,
            predictions=predictions.view_as(labels),
        )
    logits = model.predict(encoded.hidden_BLD)
    return LMOutput(
        logits=logits,
        loss=None if labels is None else _loss(logits, labels),
        solution=encoded.solution,
        state=encoded.state,
    )


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)
