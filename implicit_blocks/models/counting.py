"""Parameter and FLOP counts of a language model, from its spec alone: nothing is built.

Mixers and MLPs provide their numbers by `parameter_shapes` and `flops_per_token`, injections by methods of
the same names, gradient estimators by `forward_equivalents`, depths by `expected_loops`. A number that a spec
does not provide is None, "not known", and so is every sum that includes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from implicit_blocks.depths import LogNormalPoissonDepthSpec, PoissonDepthSpec, UniformDepthSpec
from implicit_blocks.gradients import LastLoopsSpec
from implicit_blocks.models.implicit_spec import ImplicitLMSpec
from implicit_blocks.models.objective_specs import IteratesObjectiveSpec
from implicit_blocks.models.specs import LanguageModelSpec, Stack
from implicit_blocks.specs.families import DepthSpec, ModelSpec, is_weight_normed, total


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters by part."""

    embedding: int
    """The embedding, shared with the head if they are tied."""
    head: int
    """The head; 0 with tied embeddings."""
    prelude: int | None = 0
    """The layers of the prelude and the norm after it."""
    backbone: int | None
    """The layers of the core and the norm that ends it."""
    coda: int | None = 0
    """The layers of the coda and the norm after it."""
    projection: int = 0
    """The linear map between the core and the coda."""
    injection: int | None
    """The injection, such as its norm, weight and bias; 0 for explicit models."""
    start: int = 0
    """A learned initial point."""
    exit_gate: int = 0
    """The gate that reads when a token may leave the loop."""
    gains: int | None
    """Gains of weight norm: one per row of each weight of the layers and the injection."""

    @property
    def total(self) -> int | None:
        """Sum of all parts."""
        return total(getattr(self, part.name) for part in fields(self))

    @property
    def layers(self) -> int | None:
        """The layers of all stacks, with their norms."""
        return total((self.prelude, self.backbone, self.coda))


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """Floating-point operations of one forward pass per token.

    A multiply-add counts 2; element-wise operations are ignored. The backward pass of a part costs twice its
    forward pass.
    """

    prelude: float | None = 0.0
    """Once per forward pass."""
    layers: float | None
    """The layers of the core once, with the part of the injection in each call: one iteration of the map."""
    injection: float | None
    """The part of the injection outside the loop, once per forward pass; 0 for explicit models."""
    coda: float | None = 0.0
    """The linear map after the core, and the coda: once per forward pass, and for each iterate read."""
    head: float
    """Once per forward pass, and for each iterate that the objective reads."""
    exit_gate: float = 0.0
    """Once for each iterate that the objective reads with the gate."""


def count_parameters(spec: ModelSpec) -> ParameterCounts | None:
    """Count the parameters of a language model; None for models of other classes."""
    if not isinstance(spec, LanguageModelSpec):
        return None
    stacks, d, width = spec.stacks, spec.d_model, spec.core_width
    norms = {"prelude": d * spec.prelude_norm, "core": width * spec.norm_in_core, "coda": d * spec.final_norm}
    counts = {name: _of_stack(stacks.get(name), spec.weight_norm) for name in norms}
    weights = {name: total((counts[name][0], norm)) for name, norm in norms.items()}
    injection, rows = _of_injection(spec)
    embedding = spec.padded_vocab_size * d
    start = gate = 0
    if isinstance(spec, ImplicitLMSpec):
        start = spec.start.parameter_count(width)
        gate = width + 1 if spec.exit_gate else 0
    return ParameterCounts(
        embedding=embedding,
        head=0 if spec.tie_embeddings else embedding,
        prelude=weights["prelude"],
        backbone=weights["core"],
        coda=weights["coda"],
        projection=(width + spec.core_projection_bias) * d if spec.core_projection else 0,
        injection=injection,
        start=start,
        exit_gate=gate,
        gains=total([gains for _, gains in counts.values()] + [rows if spec.weight_norm else 0]),
    )


def _of_stack(stack: Stack | None, weight_norm: bool) -> tuple[int | None, int | None]:
    return (0, 0) if stack is None else stack.parameter_count(weight_norm=weight_norm)


def _of_injection(spec: LanguageModelSpec) -> tuple[int | None, int | None]:
    """Return the numbers of parameters, and of rows that weight norm applies to. None: not known."""
    if not isinstance(spec, ImplicitLMSpec):
        return 0, 0
    shapes = spec.injection.parameter_shapes(spec.d_model, spec.core_width, spec.injection_table_width)
    if shapes is None:
        return None, None
    rows = sum(shape[0] for name, shape in shapes.items() if is_weight_normed(name, shape))
    return sum(map(math.prod, shapes.values())), rows


def count_flops(spec: ModelSpec, *, length: int) -> FlopCounts | None:
    """Count the FLOPs of a forward pass per token, in sequences of ``length``; None for other models."""
    if not isinstance(spec, LanguageModelSpec):
        return None
    stacks, d, width = spec.stacks, spec.d_model, spec.core_width
    flops = {name: stack.flops_per_token(length) for name, stack in stacks.items()}
    once: float | None = 0.0
    each = gate = 0.0
    if isinstance(spec, ImplicitLMSpec):
        once, each = spec.injection.flops_per_token(d, width, spec.injection_table_width)
        gate = 2.0 * width if spec.exit_gate else 0.0
    projection = 2.0 * width * d if spec.core_projection else 0.0
    return FlopCounts(
        prelude=flops.get("prelude", 0.0),
        layers=total((flops["core"], each)),
        injection=once,
        coda=total((flops.get("coda", 0.0), projection)),
        head=2.0 * d * spec.padded_vocab_size,
        exit_gate=gate,
    )


class Reads(NamedTuple):
    """How often a training step computes the coda and the head, forward and backward, of one token."""

    forward: float = 1
    backward: float = 1
    gates: float = 0
    """Calls of the exit gate, forward and backward."""
    unread: float = 0
    """Loops after the last iterate that the loss depends on: they are not differentiated."""


def reads_of_objective(spec: ModelSpec, loops: float) -> Reads:
    """Return how often the objective reads coda and head, in a step with this number of loops.

    The output of the last loop is always computed; backward passes through it if the loss depends on it.
    """
    if not isinstance(spec, ImplicitLMSpec) or not spec.objective.reads_iterates:
        return Reads()
    if isinstance(spec.objective, IteratesObjectiveSpec):
        chosen = spec.objective.at
        reached = {t for t in chosen if t != "last" and t <= loops}
        if "last" in chosen or not reached:
            return Reads(1 + len(reached), 1 + len(reached))
        return Reads(1 + len(reached), len(reached), unread=loops - max(reached))
    return Reads(loops + 1, loops, loops if spec.objective.needs_gate else 0)


def expected_loops(spec: ImplicitLMSpec) -> float:
    """Return the mean number of loops of a training step; the maximum of the stopping rule if it decides."""
    mean = spec.depth.expected_loops()
    return spec.stopping.max_iterations if mean is None else mean


def training_flops_per_token(
    spec: ModelSpec, *, length: int, iterations: float | None = None
) -> float | None:
    """Return the FLOPs of one training step per token: forward and backward.

    Loops without gradients cost a forward pass. An objective that reads several iterates calls the coda and
    the head for each of them.

    Args:
        spec: the model.
        length: tokens per sequence.
        iterations: of the search, or loops; None: the mean of the spec's depth, or else the maximum of its
            stopping rule. Ignored for explicit models.

    Returns:
        None if the cost of a component is not known.

    """
    flops = count_flops(spec, length=length)
    return None if flops is None else step_flops(spec, flops, iterations=iterations)


def step_flops(spec: ModelSpec, flops: FlopCounts, *, iterations: float | None = None) -> float | None:
    """Return the FLOPs of a training step per token, given those of a forward pass.

    ``iterations`` and the result are those of ``training_flops_per_token``.
    """
    passes, reads = _passes(spec, iterations)
    if flops.prelude is None or flops.injection is None or flops.layers is None or flops.coda is None:
        return None
    if passes is None:
        return None
    once, output = flops.prelude + flops.injection, flops.coda + flops.head
    ends = 3 * once + (reads.forward + 2 * reads.backward) * output + 3 * reads.gates * flops.exit_gate
    return passes * flops.layers + ends


def _passes(spec: ModelSpec, iterations: float | None) -> tuple[float | None, Reads]:
    """Return the cost of the core in forward passes, and the reads of its output."""
    if not isinstance(spec, ImplicitLMSpec):
        return 3, Reads()
    loops = expected_loops(spec) if iterations is None else iterations
    reads = reads_of_objective(spec, loops)
    if not isinstance(spec.gradient, LastLoopsSpec):
        return spec.gradient.forward_equivalents(loops), reads
    limit = spec.gradient.loops
    if limit is None:
        differentiated = loops
    elif iterations is None:
        differentiated = mean_at_most(spec.depth, limit, otherwise=loops)
    else:
        differentiated = min(limit, loops)
    return loops + 2 * max(0, differentiated - reads.unread), reads


def mean_at_most(depth: DepthSpec, limit: int, *, otherwise: float) -> float:
    """Return the mean of the smaller of the loops of a depth and a limit: the differentiated loops.

    For kinds without a known distribution it is the smaller of the limit and ``otherwise``.
    """
    if isinstance(depth, UniformDepthSpec):
        numbers = range(depth.low, depth.high + 1)
        return sum(min(number, limit) for number in numbers) / len(numbers)
    if isinstance(depth, PoissonDepthSpec | LogNormalPoissonDepthSpec):
        if limit <= getattr(depth, "minimum", 1):
            return float(limit)
        maximum = limit if depth.maximum is None else min(limit, depth.maximum)
        return depth.model_copy(update={"maximum": maximum}).expected_loops()
    return min(float(limit), otherwise)
