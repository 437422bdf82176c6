"""The equations of a model, one line each: its map, start, layers and head. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from implicit_blocks.models.specs import Layer, Stack
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, StartSpec
from implicit_blocks.specs.base import ComponentSpec

_RUNS = 3
"""Runs of layer numbers that are written out."""


def fields_of(spec: ComponentSpec) -> str:
    """Return the kind and the fields that differ from their defaults."""
    named = type(spec).model_fields
    shown = [f"{name} {value}" for name, value in spec if name != "kind" and value != named[name].default]
    return f"{spec.kind}: {', '.join(shown)}" if shown else str(spec.kind)


def input_of_core(spec: LanguageModelSpec) -> str:
    """Return the symbol of what the injection reads: e after a prelude, else x, the embedded tokens."""
    return "x" if spec.prelude is None and not spec.prelude_norm else "e"


def map_of(spec: ImplicitLMSpec) -> str:
    """Return the right-hand side of ``z ← …``; f are the layers of the core."""
    injection, e = spec.injection, input_of_core(spec)
    match injection.kind:  # the kind, because a plugin's kind may extend a built-in spec
        case "projection":
            return "f(z, u)"
        case "none":
            return "f(z)"
        case "add":
            return f"f(z + {e})"
        case "concat":
            return f"f(W [z; {e}])"
        case "diagonal":
            return f"f(exp(-Δ·A) z + Δ·B {e})"
        case "attractor":
            return f"f(z + {e}) - z"
        case "residual":
            damping = getattr(injection, "damping", 1.0)
            gated = getattr(injection, "gate_init", None) is not None
            value = f"{e} + f(v) - v" if gated else f"{e} + f(z) - z"
            damped = value if damping == 1 else f"{1 - damping:g}·z + {damping:g}·({value})"
            return f"{damped}, v = {e} + g·(z - {e})" if gated else damped
    return f"f(z, {e})"


def injection_of(spec: ImplicitLMSpec) -> str:
    """Return the equation of the injection's own parameters."""
    injection, e = spec.injection, input_of_core(spec)
    match injection.kind:
        case "projection":
            return f"u = W rms({e}) + b, once a forward pass"
        case "concat":
            return f"W [z; {e}]{' + b' if getattr(injection, 'bias', False) else ''}, in each call"
        case "diagonal":
            return f"Δ·B {e}, once a forward pass; exp(-Δ·A) z in each call"
        case "residual":
            return "the gate g, in each call"
    return fields_of(injection)


def core_of(spec: LanguageModelSpec) -> str:
    """Return the equation of the core, where it starts, and when it ends."""
    e = input_of_core(spec)
    if not isinstance(spec, ImplicitLMSpec):
        return f"z = f({e}), once"
    value = map_of(spec)
    if (loops := loops_of(spec)) is not None:
        end = f"{loops}"
    else:
        end = f"until z = {value}" if spec.injection.kind == "projection" else "until it converges"
    return f"z ← {value} from z = {start_of(spec.start, e)}, {end}"


def loops_of(spec: ImplicitLMSpec) -> str | None:
    """Return the number of loops in training; None: a stopping rule ends them."""
    if (mean := spec.depth.expected_loops()) is None:
        searched = spec.gradient.searches or spec.gradient.differentiates_solver
        return None if searched else _times(spec.stopping.max_iterations)
    most = spec.depth.maximum_loops()
    if most is not None and most == mean:
        return _times(most)
    return f"{mean:.3g} loops on average"


def _times(loops: int) -> str:
    return f"{loops} loop{'' if loops == 1 else 's'}"


def start_of(start: StartSpec, e: str) -> str:
    """Return the initial point of the loop."""
    match start.kind:
        case "zeros":
            point = "0"
        case "embedding":
            point = "x"
        case "prelude":
            point = e
        case "learned":
            point = "a learned vector"
        case "normal":
            point = f"N(0, {getattr(start, 'std', 1):g}²)"
            if (truncation := getattr(start, "truncation", None)) is not None:
                point += f" cut at {truncation:g} standard deviations"
        case _:
            point = fields_of(start)
    return f"{point} + N(0, {start.noise_std:g}²)" if start.noise_std else point


def layer_of(stack: Stack, layer: Layer, *, injected: bool) -> str:
    """Return the equation of a layer: where it normalizes, and how it adds its branches to the stream."""
    mixer = _branch(stack, "mixer", ", u" if injected else "")
    return mixer if layer.mlp is None else f"{mixer}, then {_branch(stack, 'mlp', '')}"


def _branch(stack: Stack, name: str, more: str) -> str:
    placement, scaling = stack.norm_placement, stack.residual_scaling
    branch = f"{name}({'z' if placement == 'post' else 'rms(z)'}{more})"
    if placement == "sandwich":
        branch = f"rms({branch})"
    match scaling.kind:
        case "none":
            value = f"z + {branch}"
        case "layer_scale" | "bounded_gate":
            value = f"z + γ·{branch}"  # noqa: RUF001  # a gamma is intended
        case "deepnorm":
            value = f"α·z + {branch}"  # noqa: RUF001  # an alpha is intended
        case _:
            value = f"{scaling.kind}(z, {branch})"
    return f"rms({value})" if placement in ("post", "pre_post") else value


def output_of_core(spec: LanguageModelSpec) -> str:
    """Return what the coda reads, or without one the last norm."""
    value = "C z" if spec.core_projection else "z"
    if spec.core_residual:
        value += f" + {input_of_core(spec)}"
    return f"rms({value})" if spec.norm_before_coda else value


def logits_of(spec: LanguageModelSpec) -> str:
    """Return the scale and soft cap of the logits; empty without them."""
    parts = ["" if spec.logit_scale == 1 else f"times {spec.logit_scale:g}"]
    if spec.logit_softcap is not None:
        parts.append(f"soft cap {spec.logit_softcap:g}")
    return ", ".join(part for part in parts if part)


def numbers_of(numbers: Sequence[int]) -> str:
    """Return layer numbers as runs: ``0–2, 4–6``; long lists are cut."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}"  # noqa: RUF001  # an en dash is intended
        for run in runs[:_RUNS]
    ]
    return ", ".join([*shown, *(["…"] if len(runs) > _RUNS else [])])
