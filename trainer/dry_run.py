"""What a run would take, from its spec alone: sizes, operations, memory, phases, data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from implicit_blocks.specs.counting import (
    count_flops,
    count_parameters,
    training_flops_per_token,
)
from implicit_blocks.specs.model import LanguageModelSpec
from trainer.display import magnitude
from trainer.spec import Phase, RunSpec

_FLOAT32 = 4
_LOGIT_COPIES = 3
"""Float32 arrays of the size of a chunk's logits alive at once."""
_LOGIT_CHUNK = 1 << 27
"""Entries of a chunk's logits, as `implicit_blocks.ops.cross_entropy` cuts them."""
_VALUES_A_WEIGHT_COLUMN = 2
"""Values a layer keeps for backward, a token, for each output of its matrices: the output, and what the next
operation makes of it. Against measured peaks of the paper's models in bfloat16 this is right for attention
with a fused kernel and up to 40 % too much for Mamba2 with one; plain PyTorch kernels keep more."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a training step on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(spec: RunSpec, phase: Phase) -> Memory | None:
    """Return the bytes of a step of ``phase`` on one device; None where a size isn't known.

    Float32 weights and gradients, two moments for AdamW, the activations of one micro-batch for as many
    passes through the layers as are differentiated, and the logits.
    """
    model, counts = phase.model, count_parameters(phase.model)
    if counts is None or counts.total is None or not isinstance(model, LanguageModelSpec):
        return None
    parts = [part for part in (model.mixer, model.mlp) if part is not None]
    sizes = [part.parameter_count(model.d_model) for part in parts]
    if None in sizes:
        return None
    columns = sum(size.weights / model.d_model for size in sizes if size is not None)
    tokens = phase.training.sequences_at_once * spec.data.length
    width = 2 if phase.training.precision == "bfloat16" else _FLOAT32
    # Beside what the matrices make: the residual stream, in float32, before each branch.
    layer = _VALUES_A_WEIGHT_COLUMN * columns * width + len(parts) * model.d_model * _FLOAT32
    passes = _differentiated_passes(model)
    return Memory(
        weights=_FLOAT32 * counts.total,
        gradients=_FLOAT32 * counts.total,
        optimizer=2 * _FLOAT32 * counts.total,
        activations=round(tokens * passes * model.n_layers * layer),
        # A chunk of them at a time, and the head's own gradient, kept until backward.
        logits=_FLOAT32
        * (
            _LOGIT_COPIES * min(tokens * model.padded_vocab_size, _LOGIT_CHUNK)
            + model.padded_vocab_size * model.d_model
        ),
    )


def _differentiated_passes(model: ModelSpec) -> int:
    """Return how many passes through the layers are kept for backward."""
    if not isinstance(model, ImplicitLMSpec) or getattr(model.gradient, "checkpointing", False):
        return 1
    return int(getattr(model.gradient, "steps", 1))


def describe(spec: RunSpec, *, name: str) -> str:
    """Return what a run would take, for people to read.

    Raises:
        ValueError: the data are named but can't be read.

    """
    training, phases = spec.training, spec.phase_specs()
    tokens = training.batch_size * spec.data.length
    sequences, vocab_size = spec.total_steps * training.batch_size, getattr(spec.model, "vocab_size", None)
    lines = [
        f"{name} ({spec.model.kind})",
        *_section("parameters", _parameters(spec.model)),
        *_section("data", spec.data.describe(sequences=sequences, vocab_size=vocab_size)),
        *_section(
            "training",
            [
                f"{spec.total_steps:,} steps of {training.batch_size:,} x {spec.data.length:,} = "
                f"{tokens:,} tokens, {magnitude(spec.total_steps * tokens)} tokens in all",
                f"micro-batches of {training.sequences_at_once}, {training.precision}, "
                f"{training.optimizer.kind}, {training.schedule.kind}",
            ],
        ),
    ]
    total: float | None = 0.0
    for phase in phases:
        described, flops = _phase(spec, phase)
        lines += _section(f"phase {phase.name}", described)
        total = None if total is None or flops is None else total + flops
    lines += _section("whole run", ["not known" if total is None else f"at most {_scaled(total)}FLOP"])
    evaluated = f"lengths {', '.join(map(str, spec.evaluation.lengths or (spec.data.length,)))}"
    if spec.evaluation.identity_probabilities:
        evaluated += f"; p {', '.join(f'{p:g}' for p in spec.evaluation.identity_probabilities)}"
    lines += _section("evaluation", [f"{evaluated}; {spec.evaluation.sequences} sequences each"])
    return "\n".join(lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"  {title if number == 0 else '':<16}{line}" for number, line in enumerate(lines)]


def _parameters(model: ModelSpec) -> list[str]:
    counts = count_parameters(model)
    if counts is None:
        number = model.parameter_total()
        return ["not known: the model's spec does not tell" if number is None else f"{number:,}"]
    named = (
        ("embedding", counts.embedding),
        ("head", counts.head),
        ("layers", counts.backbone),
        ("injection", counts.injection),
        ("weight norm's gains", counts.gains),
    )
    parts = [f"{label} {'not known' if n is None else magnitude(n)}" for label, n in named if n != 0]
    total = "not known" if counts.total is None else f"{counts.total:,}"
    return [f"{total}: {', '.join(parts)}"]


def _phase(spec: RunSpec, phase: Phase) -> tuple[list[str], float | None]:
    steps = phase.last_step - phase.first_step
    lines = [f"steps {phase.first_step + 1:,} to {phase.last_step:,}, {_search(phase.model)}"]
    length = spec.data.length
    flops = training_flops_per_token(phase.model, length=length)
    forward = count_flops(phase.model, length=length)
    if flops is None or forward is None or forward.layers is None:
        lines.append("FLOP a token: not known, a component does not tell its cost")
        return lines, None
    least = training_flops_per_token(phase.model, length=length, iterations=1)
    whole = flops * steps * spec.training.batch_size * length
    if least is None or least == flops:
        cost = f"{_scaled(flops)}FLOP a token"
    else:
        cost = f"{_scaled(least)}FLOP a token where one iteration suffices, {_scaled(flops)}FLOP at most"
    lines.append(f"{cost} ({_scaled(forward.layers)}FLOP one pass through the layers)")
    lines.append(f"{'' if least == flops else 'at most '}{_scaled(whole)}FLOP in all")
    memory = estimate_memory(spec, phase)
    if memory is not None:
        lines.append(
            f"memory about {_bytes(memory.total)}: weights {_bytes(memory.weights)}, "
            f"gradients {_bytes(memory.gradients)}, optimizer {_bytes(memory.optimizer)}, "
            f"activations {_bytes(memory.activations)}, logits {_bytes(memory.logits)}"
        )
    return lines, whole


def _search(model: ModelSpec) -> str:
    """Return the search in words, in the paper's (s+k) where it applies."""
    if not isinstance(model, ImplicitLMSpec):
        return "one pass through the layers"
    gradient, stopping = model.gradient, model.stopping
    steps = getattr(gradient, "steps", None)
    if gradient.kind == "unrolled":
        return f"{steps} updates of {model.solver.kind}, unrolled"
    budget = f"({stopping.max_iterations}+{steps})" if steps is not None else f"({stopping.max_iterations})"
    return (
        f"{budget}: {model.solver.kind} to a residual of {stopping.tolerance:g} "
        f"({stopping.norm}), {gradient.kind} gradient"
    )


def _scaled(value: float) -> str:
    """Return a number with a metric suffix, ready for a unit: ``4.5 G``, ``950``."""
    for suffix in ("", " k", " M", " G", " T", " P", " E"):
        if value < 1000:
            return f"{value:.0f} " if suffix == "" else f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g} Z"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"
