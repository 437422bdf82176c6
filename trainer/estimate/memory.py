"""Estimate of the device memory of a training step from the spec. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from implicit_blocks.models.counting import ParameterCounts, count_parameters
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec
from trainer.estimate.flops import differentiated_passes
from trainer.specs.distributed import ResolvedLayout
from trainer.specs.run import Phase, RunSpec

GPU_BYTES = 80e9
"""GPU memory assumed for `training.distributed.kind: auto` when no GPU is available."""
RANKS_PER_MACHINE = 8

_FLOAT32 = 4
_LOGIT_COPIES = 3
"""Number of float32 arrays of the size of a chunk's logits that exist simultaneously."""
_LOGIT_CHUNK = 1 << 27
"""Entries per chunk of logits, as in `implicit_blocks.ops.cross_entropy`."""
_VALUES_PER_WEIGHT_COLUMN = 2
"""Values per token that a layer stores for backward, per output of its matrices: the output and the result of
the next operation. Compared with measured peaks of the paper's models in bfloat16, this is accurate for
attention with a fused kernel and up to 40 % too high for Mamba2 with one; plain PyTorch kernels store
more."""
_GATHERED_COPIES = 3
"""Copies of the gathered parameters: weights, their gradients, and the gradients in transit."""
_POINTS = 5
"""Float32 points that captured graphs read and write, in the search and the differentiated call."""
_LAYERS_AT_ONCE = 2
"""Gathered layers when sharded layer by layer: the current one and the prefetched one."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a training step on one device, in bytes.

    ``gathered`` is the temporary full-model memory of a sharded layout, besides its own share; ``graphs``
    that of captured CUDA graphs: weights, their gradients, points.
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
        """Return the nonzero parts, in bytes."""
        every = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        return {name: size for name, size in every.items() if size}


def resolve_layout(spec: RunSpec, ranks: int) -> ResolvedLayout | None:
    """Resolve the run's layout for a number of GPUs; None if the model's size is unknown.

    Raises:
        ValueError: as `DistributedSpec.resolve`.

    """
    counts = count_parameters(spec.model)
    total = spec.model.parameter_total() if counts is None else counts.total
    if total is None:
        return None
    return spec.training.distributed.resolve(
        parameters=total, ranks=ranks, ranks_per_machine=min(ranks, RANKS_PER_MACHINE), memory=GPU_BYTES
    )


def estimate_memory(spec: RunSpec, phase: Phase, *, ranks: int = 1) -> Memory | None:
    """Return the memory of a step of ``phase`` per device; None if a size is unknown.

    Consists of float32 weights and gradients, two moments for AdamW, the activations of one micro-batch for
    all differentiated passes through the layers, and the logits.
    """
    model, counts, resolved = phase.model, count_parameters(phase.model), resolve_layout(spec, ranks)
    if counts is None or counts.total is None or not isinstance(model, LanguageModelSpec) or resolved is None:
        return None
    parts = [part for part in (model.mixer, model.mlp) if part is not None]
    sizes = [part.parameter_count(model.d_model) for part in parts]
    if None in sizes:
        return None
    columns = sum(size.weights / model.d_model for size in sizes if size is not None)
    training = phase.training
    tokens = min(training.sequences_at_once, training.share(ranks)) * phase.data.seq_len
    width = 2 if training.precision == "bfloat16" else _FLOAT32
    # Besides the outputs of the matrices: the residual stream, in float32, before each branch.
    layer = _VALUES_PER_WEIGHT_COLUMN * columns * width + len(parts) * model.d_model * _FLOAT32
    share = _FLOAT32 * counts.total / resolved.shards
    return Memory(
        weights=round(share),
        gradients=round(share),
        optimizer=round(2 * share),
        gathered=_gathered(spec, resolved, counts),
        graphs=0 if resolved.shards > 1 else _graphs(phase, model, counts, tokens=tokens, width=width),
        activations=round(tokens * _stored_per_token(phase, model, layer)),
        # One chunk at a time, plus the head's gradient, stored until backward.
        logits=_FLOAT32
        * (
            _LOGIT_COPIES * min(tokens * model.padded_vocab_size, _LOGIT_CHUNK)
            + model.padded_vocab_size * model.d_model
        ),
    )


def _gathered(spec: RunSpec, resolved: ResolvedLayout, counts: ParameterCounts) -> int:
    if resolved.shards == 1 or counts.total is None:
        return 0
    together = float(counts.total)
    if spec.training.distributed.unit == "layer" and isinstance(spec.model, LanguageModelSpec):
        of_layers = (counts.backbone or 0) + (counts.gains or 0)
        together -= of_layers * (1 - min(1.0, _LAYERS_AT_ONCE / spec.model.n_layers))
    return round(_GATHERED_COPIES * _FLOAT32 * together)


def _graphs(
    phase: Phase, model: LanguageModelSpec, counts: ParameterCounts, *, tokens: int, width: int
) -> int:
    """Return the extra memory of captured graphs in bytes, an upper estimate."""
    if not phase.training.cuda_graphs or not isinstance(model, ImplicitLMSpec):
        return 0
    recomputed = phase.training.checkpoint_activations != "none"  # then only searches are captured
    weights = (1 if recomputed else 2) * width * ((counts.backbone or 0) + (counts.gains or 0))
    masks = 2 * model.n_layers if model.dropout else 0
    return round(weights + tokens * model.d_model * (_POINTS + masks) * _FLOAT32)


def _stored_per_token(phase: Phase, model: LanguageModelSpec, layer: float) -> float:
    """Return the bytes stored per token for backward, given those of a layer without checkpointing."""
    passes, start = differentiated_passes(model), model.d_model * _FLOAT32
    match phase.training.checkpoint_activations:
        case "layers":
            return passes * model.n_layers * start + layer
        case "steps":
            return passes * start + model.n_layers * layer
    if getattr(getattr(model, "gradient", None), "checkpointing", False):
        return passes * start + model.n_layers * layer
    return passes * model.n_layers * layer
