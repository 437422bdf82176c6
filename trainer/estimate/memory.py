"""Estimate of the device memory of a training step from the spec. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from implicit_blocks.models.counting import ParameterCounts, count_parameters, reads_of_objective
from implicit_blocks.models.specs import Layer
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, MixerSpec, MLPSpec, ModelSpec
from implicit_blocks.specs.families import total
from trainer.estimate.division import Parts, passed_per_token, saved_parameters, saved_weights
from trainer.estimate.flops import most_loops
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
class Memory(Parts):
    """Memory of a training step on one device, in bytes.

    ``gathered`` is the temporary full-model memory of a sharded layout, besides its own share; ``graphs``
    that of captured CUDA graphs: weights, their gradients, points; ``average`` the moving average of the
    weights; ``quantized`` the weights of searches in 8-bit floats.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int = 0
    gathered: int = 0
    graphs: int = 0
    quantized: int = 0
    activations: int
    logits: int


def resolve_layout(spec: RunSpec, ranks: int) -> ResolvedLayout | None:
    """Resolve the run's layout for a number of GPUs; None if the model's size is unknown.

    Raises:
        ValueError: as `DistributedSpec.resolve`.

    """
    counts = count_parameters(spec.model)
    parameters = spec.model.parameter_total() if counts is None else counts.total
    if parameters is None:
        return None
    return spec.training.distributed.resolve(
        parameters=parameters, ranks=ranks, ranks_per_machine=min(ranks, RANKS_PER_MACHINE), memory=GPU_BYTES
    )


def estimate_memory(spec: RunSpec, phase: Phase, *, ranks: int = 1) -> Memory | None:
    """Return the memory of a step of ``phase`` per device; None if a size is unknown.

    Consists of float32 weights and gradients, two moments for AdamW, the activations of one micro-batch for
    all differentiated passes through the layers (the prelude once, the core for each differentiated loop, the
    coda for each iterate that the objective reads), and the logits.
    """
    model, counts, resolved = phase.model, count_parameters(phase.model), resolve_layout(spec, ranks)
    if counts is None or counts.total is None or not isinstance(model, LanguageModelSpec) or resolved is None:
        return None
    training = phase.training
    own = min(training.sequences_at_once, training.share(training.distributed.batch_shares(ranks)))
    tokens = own * phase.data.seq_len // resolved.context
    width = 2 if training.precision == "bfloat16" else _FLOAT32
    saved = saved_parameters(model, resolved.tensor)
    share = _FLOAT32 * (counts.total - saved) / resolved.shards
    return Memory(
        weights=round(share),
        gradients=round(share),
        optimizer=round(2 * share),
        average=0 if training.ema is None else round(share),
        gathered=_gathered(spec, resolved, counts, saved=saved),
        graphs=0 if resolved.shards > 1 else _graphs(phase, model, counts, tokens=tokens, width=width),
        quantized=0 if training.search_dtype is None else counts.layers or 0,
        activations=round(tokens * _stored_per_token(phase, model, width, resolved)),
        logits=_FLOAT32 * _logits(model, tokens),
    )


def decoding_state(model: ModelSpec, *, tokens: int) -> int | None:
    """Return the bytes of the state of one sequence after ``tokens`` tokens, in float32; None: not known.

    Prelude and coda have one state per layer, and the core one or, with `state_policy: per_loop`, one per
    loop.
    """
    if not isinstance(model, LanguageModelSpec):
        return None
    loops = {"core": model.state_loops} if isinstance(model, ImplicitLMSpec) else {}
    sizes = [
        None if size is None else loops.get(name, 1) * size
        for name, stack in model.stacks.items()
        for layer in stack.layers
        for size in [layer.mixer.state_bytes(stack.d_model, tokens=tokens, itemsize=_FLOAT32)]
    ]
    return total(sizes)


def _gathered(spec: RunSpec, resolved: ResolvedLayout, counts: ParameterCounts, *, saved: int) -> int:
    if resolved.shards == 1 or counts.total is None:
        return 0
    together = float(counts.total - saved)
    if spec.training.distributed.unit == "layer" and isinstance(spec.model, LanguageModelSpec):
        of_layers = (counts.layers or 0) + (counts.gains or 0)
        together -= of_layers * (1 - min(1.0, _LAYERS_AT_ONCE / spec.model.total_layers))
    return round(_GATHERED_COPIES * _FLOAT32 * together)


def _graphs(
    phase: Phase, model: LanguageModelSpec, counts: ParameterCounts, *, tokens: int, width: int
) -> int:
    """Return the extra memory of captured graphs in bytes, an upper estimate."""
    if not phase.training.cuda_graphs or not isinstance(model, ImplicitLMSpec):
        return 0
    recomputed = phase.training.checkpoint_activations != "none"  # then only searches are captured
    weights = (1 if recomputed else 2) * width * ((counts.layers or 0) + (counts.gains or 0))
    values = 0
    for stack in model.stacks.values():  # each has graphs of its own
        masks = 2 * len(stack.layers) if model.dropout else 0
        values += stack.d_model * (_POINTS + masks)
    return round(weights + tokens * values * _FLOAT32)


class _Stored(NamedTuple):
    """What a stack stores per token for backward, in bytes."""

    calls: int
    """Differentiated calls of the stack in a step."""
    start: float
    """The residual stream before a call, or before a layer."""
    layers: tuple[float, ...]
    """Each layer's activations in a call, without checkpointing."""


def _stored_per_token(phase: Phase, model: LanguageModelSpec, width: int, resolved: ResolvedLayout) -> float:
    """Return the bytes stored per token for backward: the prelude once, the core for differentiated loops.

    The coda is stored for each iterate that the objective reads. ``width``: bytes per value of a matrix
    product.
    """
    implicit = isinstance(model, ImplicitLMSpec)
    loops = most_loops(model) if isinstance(model, ImplicitLMSpec) else 1
    passes = model.gradient.differentiated_calls_of(loops) if isinstance(model, ImplicitLMSpec) else 1
    calls = {"core": passes, "coda": math.ceil(reads_of_objective(model, loops).forward)}
    stored = [
        _Stored(
            calls.get(name, 1),
            stack.d_model * _FLOAT32,
            tuple(_layer_bytes(layer, stack.d_model, width, resolved) for layer in stack.layers),
        )
        for name, stack in model.stacks.items()
    ]
    match phase.training.checkpoint_activations:
        case "layers":
            starts = sum(one.calls * len(one.layers) * one.start for one in stored)
            return starts + max(max(one.layers) for one in stored)
        case "steps":
            return sum(one.calls * one.start for one in stored) + max(sum(one.layers) for one in stored)
    again = implicit and getattr(getattr(model, "gradient", None), "checkpointing", False)
    found = 0.0
    for (name, _), one in zip(model.stacks.items(), stored, strict=True):
        whole = sum(one.layers)
        found += one.calls * one.start + whole if again and name == "core" else one.calls * whole
    return found


def _layer_bytes(layer: Layer, d_model: int, width: int, resolved: ResolvedLayout) -> float:
    """Return the bytes that a layer stores per token: outputs of its matrices, the stream in float32.

    The last rank of those that divide sequences also stores what earlier tokens pass to it.
    """
    columns = sum(_columns(part, d_model, resolved.tensor) for part in layer.parts)
    passed = sum(passed_per_token(part, d_model, resolved, width) for part in layer.parts)
    stored = _VALUES_PER_WEIGHT_COLUMN * columns * width + len(layer.parts) * d_model * _FLOAT32
    return stored + resolved.context * passed


def _columns(part: MixerSpec | MLPSpec, d_model: int, tensor: int) -> float:
    """Return the outputs per token of a part's matrices, and of its tables of token embeddings."""
    shapes, counts = part.parameter_shapes(d_model), part.parameter_count(d_model)
    tables = [shape for name, shape in (shapes or {}).items() if name.endswith("embedding.weight")]
    weights = 0 if counts is None else counts.weights - sum(map(math.prod, tables))
    return (weights - saved_weights(part, d_model, tensor)) / d_model + sum(shape[1] for shape in tables)


def _logits(model: LanguageModelSpec, tokens: int) -> int:
    """Return the number of float32 values of the logits in a step, and of the head's gradients."""
    loops = most_loops(model) if isinstance(model, ImplicitLMSpec) else 1
    reads = reads_of_objective(model, loops)
    rows, heads = model.padded_vocab_size, math.ceil(reads.forward)
    chunk = min(tokens * rows, _LOGIT_CHUNK)
    if reads.gates:  # the logits of all loops exist together
        return _LOGIT_COPIES * (math.ceil(reads.gates) * tokens * rows + chunk) + rows * model.d_model
    if model.logit_softcap is not None:  # not computed in chunks
        return _LOGIT_COPIES * heads * tokens * rows + rows * model.d_model
    # One chunk at a time, plus the head's gradients, stored until backward.
    return _LOGIT_COPIES * chunk + heads * rows * model.d_model
