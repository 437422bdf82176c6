"""Checks that ranks can divide the model (tensor) and the sequences (context) of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from implicit_blocks.mixers import HybridSpec
from implicit_blocks.specs import (
    ImplicitLMSpec,
    LanguageModelSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    field_error,
)
from implicit_blocks.specs.families import SolverSpec

if TYPE_CHECKING:
    from trainer.specs.run import RunSpec
    from trainer.specs.training import TrainingSpec

ELEMENTWISE_OPTIMIZERS = frozenset(
    f"torch.optim.{name}"
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
"""Classes of torch whose update of a weight depends on that weight's gradients alone."""


def check_divided(spec: RunSpec) -> None:
    """Check a run whose `training.distributed` divides heads or sequences.

    Raises:
        ValueError: names the number of ranks, what it does not divide or support, and the remedy.

    """
    training, own = spec.training, (spec.model, spec.training, spec.data)
    sections = spec.changed_sections() or [own]
    for name, ranks in (("tensor", training.distributed.tensor), ("context", training.distributed.context)):
        if ranks == 1:
            continue
        reason = _captured(training) or _quantized(training) or _unsupported(spec.model)
        if reason is None and name == "tensor":
            reason = _heads(spec.model, ranks) or _optimizer(training)
        elif reason is None:
            found = (_sequences(model, data.seq_len, ranks) for model, _, data in sections)
            reason = next(filter(None, found), None)
        if reason is not None:
            raise _refused(name, ranks, reason)


def _refused(name: str, ranks: int, reason: str) -> ValidationError:
    return field_error(f"{reason}, or set {name} to 1", "training", "distributed", name, value=ranks)


def _captured(training: TrainingSpec) -> str | None:
    for name in ("cuda_graphs", "compile_layers"):
        if getattr(training, name):
            return f"layers that communicate are neither captured nor compiled; set training.{name} to false"
    return None


def _quantized(training: TrainingSpec) -> str | None:
    if training.search_dtype is None:
        return None
    return f"such ranks search in {training.precision}; set training.search_dtype to null"


def _unsupported(model: ModelSpec) -> str | None:
    if isinstance(model, LanguageModelSpec):
        return None
    return f"ranks cannot divide a model of kind {model.kind!r}; choose an implicit_lm or explicit_lm"


# ------------------------------------------------------------------------------------ tensor


def _heads(model: ModelSpec, ranks: int) -> str | None:
    """Return why ranks cannot divide the layers; None: they can."""
    for width, part in _parts(model):
        plan = part.tensor_plan(width)
        if plan is None:
            return f"{part.family} {part.kind!r} has no tensor plan; choose another {part.family}"
        for name, units in plan.units().items():
            if units % ranks:
                return (
                    f"{ranks} ranks do not divide {name} {units} of {part.family} {part.kind!r}; choose a "
                    f"divisor of {units}"
                )
    if not isinstance(model, ImplicitLMSpec) or not model.injection.adds_to_projections:
        return None
    plans = [layer.mixer.tensor_plan(model.core_width) for layer in model.core.layers]
    different = len({plan.injected for plan in plans if plan is not None}) > 1
    if model.injection.kind != "projection" or different:
        return (
            f"injection {model.injection.kind!r} adds to the projections of mixers that are divided in "
            "different ways; choose injection 'residual', 'add' or 'concat'"
        )
    return None


def _parts(model: ModelSpec) -> Iterator[tuple[int, MixerSpec | MLPSpec]]:
    """Yield every mixer and MLP with the width of its stack; those of a hybrid one by one."""
    assert isinstance(model, LanguageModelSpec)
    for stack in model.stacks.values():
        for layer in stack.layers:
            for part in layer.parts:
                inner = part.mixers if isinstance(part, HybridSpec) else (part,)
                yield from ((stack.d_model, each) for each in inner)


def _optimizer(training: TrainingSpec) -> str | None:
    optimizer = training.optimizer
    name = getattr(optimizer, "path", optimizer.kind)
    if name == "adamw" or name in ELEMENTWISE_OPTIMIZERS:
        return None
    return f"optimizer {name!r} needs whole matrices, of which ranks have parts; choose adamw"


# ------------------------------------------------------------------------------------ context


def _sequences(model: ModelSpec, length: int, ranks: int) -> str | None:
    """Return why ranks cannot divide sequences of ``length`` tokens in a phase; None: they can."""
    if length % ranks:
        return (
            f"{ranks} ranks do not divide sequences of data.seq_len {length} tokens; choose a multiple of "
            f"{ranks} for it"
        )
    for _, part in _parts(model):
        if not isinstance(part, MixerSpec):
            continue
        if not part.divides_sequences:
            return f"mixer {part.kind!r} reads all tokens of a sequence; choose attention or mamba2, causal"
        taps = getattr(part, "d_conv", 1)
        if length // ranks < taps - 1:
            return (
                f"parts of {length // ranks} tokens are shorter than the {taps - 1} inputs that the "
                f"convolution of mixer {part.kind!r} reads before a token; choose a larger data.seq_len"
            )
    return _search(model) if isinstance(model, ImplicitLMSpec) else None


def _search(model: ImplicitLMSpec) -> str | None:
    """Return what of a search needs whole sequences on one rank; None: nothing."""
    gradient = model.gradient
    solvers = [("model.solver", model.solver)]
    if isinstance(own := getattr(gradient, "solver", None), SolverSpec):
        solvers.append(("model.gradient.solver", own))
    for place, solver in solvers:
        if not solver.elementwise:
            return f"{place} {solver.kind!r} combines all tokens of a sequence; choose 'picard'"
    if not gradient.divides_sequences:
        return f"model.gradient {gradient.kind!r} measures whole sequences; choose 'phantom'"
    if model.stopping.scope == "prefix":
        return "model.stopping.scope 'prefix' decides on tokens in order; choose 'sequence'"
    if model.window_length is not None:
        return f"model.window_length {model.window_length} solves windows in order; set it to null"
    if model.state_policy == "per_loop":
        return "model.state_policy 'per_loop' passes states on loop by loop; choose 'converged'"
    return None
