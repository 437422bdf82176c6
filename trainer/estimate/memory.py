"""What a training step holds in the memory of one device, estimated from the spec. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from implicit_blocks.models.counting import ParameterCounts, count_parameters
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec
from trainer.estimate.flops import differentiated_passes
from trainer.specs.distributed import Spread
from trainer.specs.run import Phase, RunSpec

GPU_BYTES = 80e9
"""Of the GPU that `training.distributed.kind: auto` is worked out for, where there is none to ask."""
RANKS_A_MACHINE = 8

_FLOAT32 = 4
_LOGIT_COPIES = 3
"""Float32 arrays of the size of a chunk's logits alive at once."""
_LOGIT_CHUNK = 1 << 27
"""Entries of a chunk's logits, as `implicit_blocks.ops.cross_entropy` cuts them."""
_VALUES_A_WEIGHT_COLUMN = 2
"""Values a layer keeps for backward, a token, for each output of its matrices: the output, and what the next
operation makes of it. Against measured peaks of the paper's models in bfloat16 this is right for attention
with a fused kernel and up to 40 % too much for Mamba2 with one; plain PyTorch kernels keep more."""
_GATHERED_COPIES = 3
"""Of what is gathered together: weights, their gradients, and the gradients as they are sent."""
_POINTS = 5
"""Of a search and of the differentiated call, float32, that graphs read and write."""
_LAYERS_AT_ONCE = 2
"""Sharded layer by layer: the one at work and the one fetched ahead."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a training step on one device.

    ``gathered`` is what a sharded layout holds of the whole model for a time, beside its own share;
    ``graphs`` what captured CUDA graphs keep: weights, their gradients, points.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    graphs: int = 0
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by part, those of which there are any."""
        every = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        return {name: size for name, size in every.items() if size}


def work_out(spec: RunSpec, ranks: int) -> Spread | None:
    """Work out the run's layout on so many GPUs; None where the model's size isn't known.

    Raises:
        ValueError: as `ParallelSpec.spread`.

    """
    counts = count_parameters(spec.model)
    total = spec.model.parameter_total() if counts is None else counts.total
    if total is None:
        return None
    return spec.training.distributed.spread(
        parameters=total, ranks=ranks, ranks_a_machine=min(ranks, RANKS_A_MACHINE), memory=GPU_BYTES
    )


def estimate_memory(spec: RunSpec, phase: Phase, *, ranks: int = 1) -> Memory | None:
    """Return the bytes of a step of ``phase`` on each of so many devices; None where a size isn't known.

    Float32 weights and gradients, two moments for AdamW, the activations of one micro-batch for as many
    passes through the layers as are differentiated, and the logits.
    """
    model, counts, spread = phase.model, count_parameters(phase.model), work_out(spec, ranks)
    if counts is None or counts.total is None or not isinstance(model, LanguageModelSpec) or spread is None:
        return None
    parts = [part for part in (model.mixer, model.mlp) if part is not None]
    sizes = [part.parameter_count(model.d_model) for part in parts]
    if None in sizes:
        return None
    columns = sum(size.weights / model.d_model for size in sizes if size is not None)
    training = phase.training
    tokens = min(training.sequences_at_once, training.share(ranks)) * phase.data.seq_len
    width = 2 if training.precision == "bfloat16" else _FLOAT32
    # Beside what the matrices make: the residual stream, in float32, before each branch.
    layer = _VALUES_A_WEIGHT_COLUMN * columns * width + len(parts) * model.d_model * _FLOAT32
    share = _FLOAT32 * counts.total / spread.shards
    return Memory(
        weights=round(share),
        gradients=round(share),
        optimizer=round(2 * share),
        gathered=_gathered(spec, spread, counts),
        graphs=0 if spread.shards > 1 else _graphs(phase, model, counts, tokens=tokens, width=width),
        activations=round(tokens * _kept_a_token(phase, model, layer)),
        # A chunk of them at a time, and the head's own gradient, kept until backward.
        logits=_FLOAT32
        * (
            _LOGIT_COPIES * min(tokens * model.padded_vocab_size, _LOGIT_CHUNK)
            + model.padded_vocab_size * model.d_model
        ),
    )


def _gathered(spec: RunSpec, spread: Spread, counts: ParameterCounts) -> int:
    if spread.shards == 1 or counts.total is None:
        return 0
    together = float(counts.total)
    if spec.training.distributed.unit == "layer" and isinstance(spec.model, LanguageModelSpec):
        of_layers = (counts.backbone or 0) + (counts.gains or 0)
        together -= of_layers * (1 - min(1.0, _LAYERS_AT_ONCE / spec.model.n_layers))
    return round(_GATHERED_COPIES * _FLOAT32 * together)


def _graphs(
    phase: Phase, model: LanguageModelSpec, counts: ParameterCounts, *, tokens: int, width: int
) -> int:
    """Bytes that captured graphs keep beside what the same calls would, rather more than less."""
    if not phase.training.cuda_graphs or not isinstance(model, ImplicitLMSpec):
        return 0
    recomputed = phase.training.checkpoint_activations != "none"  # then searches alone are recorded
    weights = (1 if recomputed else 2) * width * ((counts.backbone or 0) + (counts.gains or 0))
    masks = 2 * model.n_layers if model.dropout else 0
    return round(weights + tokens * model.d_model * (_POINTS + masks) * _FLOAT32)


def _kept_a_token(phase: Phase, model: LanguageModelSpec, layer: float) -> float:
    """Bytes kept for backward, a token, given those of a layer whose activations are all kept."""
    passes, start = differentiated_passes(model), model.d_model * _FLOAT32
    match phase.training.checkpoint_activations:
        case "layers":
            return passes * model.n_layers * start + layer
        case "steps":
            return passes * start + model.n_layers * layer
    if getattr(getattr(model, "gradient", None), "checkpointing", False):
        return passes * start + model.n_layers * layer
    return passes * model.n_layers * layer
