"""Parameter and FLOP counts of a language model, from its spec alone: nothing is built.

Mixers and MLPs provide their numbers by `parameter_shapes`, `flops_per_token` and `injection_width`, gradient
estimators by `forward_equivalents`. A number that a spec does not provide is None, "not known", and so is
every sum that includes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from implicit_blocks.models.specs import ImplicitLMSpec, LanguageModelSpec
from implicit_blocks.specs.families import MixerSpec, MLPSpec, ModelSpec, Parameters, total


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters by part."""

    embedding: int
    """The embedding, shared with the head if they are tied."""
    head: int
    """The head; 0 with tied embeddings."""
    backbone: int | None
    """The layers and the final norm."""
    injection: int | None
    """Norm, weight and bias of the injection; 0 for explicit models."""
    gains: int | None
    """Gains of weight norm: one per row of each weight of the backbone and the injection."""

    @property
    def total(self) -> int | None:
        """Sum of all parts."""
        return total((self.embedding, self.head, self.backbone, self.injection, self.gains))


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """Floating-point operations of one forward pass per token.

    A multiply-add counts 2; element-wise operations are ignored. The backward pass of a part costs twice its
    forward pass.
    """

    layers: float | None
    """All layers once: one iteration of the map."""
    injection: float | None
    """Once per forward pass; 0 for explicit models."""
    head: float
    """Once per forward pass."""


def count_parameters(spec: ModelSpec) -> ParameterCounts | None:
    """Count the parameters of a language model; None for models of other classes."""
    if not isinstance(spec, LanguageModelSpec):
        return None
    parts = _parts(spec)
    counts = [part.parameter_count(spec.d_model) for part in parts]
    width = spec.mixer.injection_width(spec.d_model) if isinstance(spec, ImplicitLMSpec) else 0
    embedding = spec.padded_vocab_size * spec.d_model
    return ParameterCounts(
        embedding=embedding,
        head=0 if spec.tie_embeddings else embedding,
        backbone=_backbone(spec, counts),
        injection=width and (width + 1) * spec.d_model + width,
        gains=_gains(spec, counts, width) if spec.weight_norm else 0,
    )


def count_flops(spec: ModelSpec, *, length: int) -> FlopCounts | None:
    """Count the FLOPs of a forward pass per token, in sequences of ``length``; None for other models."""
    if not isinstance(spec, LanguageModelSpec):
        return None
    layer = total(part.flops_per_token(spec.d_model, length) for part in _parts(spec))
    width = spec.mixer.injection_width(spec.d_model) if isinstance(spec, ImplicitLMSpec) else 0
    return FlopCounts(
        layers=None if layer is None else spec.n_layers * layer,
        injection=None if width is None else 2.0 * spec.d_model * width,
        head=2.0 * spec.d_model * spec.padded_vocab_size,
    )


def training_flops_per_token(
    spec: ModelSpec, *, length: int, iterations: float | None = None
) -> float | None:
    """Return the FLOPs of one training step per token: forward and backward.

    Args:
        spec: the model.
        length: tokens per sequence.
        iterations: of the search; None: the maximum of its stopping rule. Ignored for explicit models.

    Returns:
        None if the cost of a component is not known.

    """
    flops = count_flops(spec, length=length)
    if flops is None or flops.layers is None or flops.injection is None:
        return None
    passes: float | None = 3
    if isinstance(spec, ImplicitLMSpec):
        searched = spec.stopping.max_iterations if iterations is None else iterations
        passes = spec.gradient.forward_equivalents(searched)
    return None if passes is None else passes * flops.layers + 3 * (flops.injection + flops.head)


def _parts(spec: LanguageModelSpec) -> list[MixerSpec | MLPSpec]:
    return [spec.mixer, *([] if spec.mlp is None else [spec.mlp])]


def _backbone(spec: LanguageModelSpec, counts: Sequence[Parameters | None]) -> int | None:
    layer = total(count and count.weights for count in counts)
    norms = len(counts) * spec.d_model
    return None if layer is None else spec.n_layers * (layer + norms) + spec.d_model


def _gains(spec: LanguageModelSpec, counts: Sequence[Parameters | None], injected: int | None) -> int | None:
    rows = total(count and count.weight_normed_rows for count in counts)
    return None if rows is None or injected is None else spec.n_layers * rows + injected
