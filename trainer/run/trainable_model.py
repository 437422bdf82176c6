"""What the trainer requires of a model, and what a model may offer beyond that.

A model is an ``nn.Module`` that implements :class:`TrainableModel`. Every other protocol here is one optional
capability. The trainer checks for it with ``isinstance`` when the spec asks for it, and refuses the run
before anything is written if it is missing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from implicit_blocks.interfaces import GradientEstimator
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping

if TYPE_CHECKING:
    from implicit_blocks.models.explicit import ExplicitLM
    from implicit_blocks.models.implicit import ImplicitLM
    from trainer.baselines.transformers_model import TransformersLM


class TrainingOutput(Protocol):
    """What a model returns for tokens and labels. Shape legend: B batch, L tokens."""

    @property
    def loss(self) -> Tensor | None:
        """Mean cross-entropy over the labels that are not −100, in nats."""

    @property
    def predictions(self) -> Tensor | None:
        """Most likely token at each position, int64 (B, L)."""

    @property
    def solution(self) -> Solution | None:
        """What the search for the fixed point returned; None for a model without one."""


@runtime_checkable
class TrainableModel(Protocol):
    """What every model offers to the trainer."""

    def __call__(
        self, input_ids: Tensor, *, labels: Tensor, return_logits: bool, documents: Tensor = ...
    ) -> TrainingOutput:
        """Predict from tokens (B, L).

        Args:
            input_ids: token IDs, int64 (B, L).
            labels: int64 (B, L), aligned with the inputs, not shifted; −100 is ignored.
            return_logits: False: ``predictions`` in place of logits.
            documents: document of each token, int64 (B, L), non-decreasing along a row; passed only if a row
                holds several documents.

        """

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with weight decay and those without, each parameter once."""


@runtime_checkable
class Reconfigures(Protocol):
    """Supports phases with another solver, gradient or stopping rule."""

    def reconfigure(self, spec: Any) -> None:
        """Apply another phase's model spec and keep the weights."""


@runtime_checkable
class MatchesCounters(Protocol):
    """Has counters in its state dict in some phases of a run only."""

    def match_counters(self, names: Collection[str]) -> set[str]:
        """Add the counters among the tensors of a checkpoint; return the names of counters that it lacks."""


@runtime_checkable
class CompilesLayers(Protocol):
    """Supports ``training.compile_layers``."""

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """Supports ``training.cuda_graphs``."""

    def capture_graphs(self, enabled: bool = True) -> None:
        """Capture the map as CUDA graphs from the next call on, or no longer."""


@runtime_checkable
class SearchesFixedPoints(Protocol):
    """Searches for fixed points in training, so that the trainer warns if they do not converge."""

    gradient: GradientEstimator
    stopping: Stopping


@runtime_checkable
class QuantizesSearch(SearchesFixedPoints, Protocol):
    """Supports ``training.search_dtype``."""

    def quantize_search(self, dtype: torch.dtype | None) -> None:
        """Begin searches in training with products in this dtype."""


@runtime_checkable
class CheckpointsActivations(Protocol):
    """Supports ``training.checkpoint_activations``."""

    def checkpoint_activations(self, what: Literal["none", "steps", "layers"]) -> None:
        """Choose which activations backward recomputes instead of keeping them."""


@runtime_checkable
class ShardsLayers(Protocol):
    """Supports ``training.distributed.unit=layer``."""

    def sharding_units(self) -> list[nn.Module]:
        """Return the modules that FSDP shards one by one."""


@runtime_checkable
class AgreesOnStopping(Protocol):
    """Iterates in a loop whose end the ranks can agree on."""

    agree: Agreement | None
    """How ranks that must iterate equally often agree to stop; None: each rank stops on its own."""


@runtime_checkable
class ChecksInputs(Protocol):
    """Cannot process every batch, and is checked before the run starts."""

    def require_documents_apart(self) -> None:
        """Raise a ValueError if tokens see other documents of their row."""

    def require_length(self, length: int) -> None:
        """Raise a ValueError if sequences of ``length`` tokens are too long."""


@runtime_checkable
class LimitsLength(Protocol):
    """May have positions for a limited number of tokens."""

    @property
    def longest(self) -> int | None:
        """The largest number of tokens; None: unlimited."""


@runtime_checkable
class ConvertsToTransformers(Protocol):
    """Can be exported as a folder for transformers' ``from_pretrained``."""

    def to_transformers(self) -> Any:
        """Return the model as a transformers model that shares its storage."""


if TYPE_CHECKING:  # the type checker verifies that each model implements its protocols

    def _every_model(
        model: ImplicitLM | ExplicitLM | TransformersLM,
    ) -> tuple[TrainableModel, ShardsLayers, CompilesLayers, CheckpointsActivations]:
        return model, model, model, model

    def _implicit_model(
        model: ImplicitLM,
    ) -> tuple[Reconfigures, CapturesGraphs, QuantizesSearch, AgreesOnStopping, SearchesFixedPoints]:
        return model, model, model, model, model

    def _transformers_model(
        model: TransformersLM,
    ) -> tuple[ChecksInputs, ConvertsToTransformers, LimitsLength]:
        return model, model, model
