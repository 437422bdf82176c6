"""A model spec as a tree of parts with their parameters, computed without building the model.

Parts whose specs do not list their parameter shapes, such as those of some plugins, are built on the meta
device; only then torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from implicit_blocks import registry
from implicit_blocks.describing.equations import (
    core_of,
    fields_of,
    injection_of,
    layer_of,
    logits_of,
    numbers_of,
    output_of_core,
)
from implicit_blocks.models.specs import Layer, Stack
from implicit_blocks.specs import (
    ImplicitLMSpec,
    LanguageModelSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    ScalingSpec,
    StartSpec,
)
from implicit_blocks.specs.families import is_weight_normed


@dataclass(frozen=True, kw_only=True)
class Node:
    """A part of a model, or a parameter.

    ``name`` is the name in the built model. ``times`` is the number of copies, which the built model names 0,
    1, … below ``name``, or by ``numbers``. A parameter has a ``shape``; ``gains`` is the number of
    weight-norm gains for it. ``note`` describes what the part does, ``signal`` its output.
    """

    name: str
    note: str = ""
    signal: str = ""
    shape: tuple[int, ...] | None = None
    gains: int = 0
    times: int = 1
    numbers: tuple[int, ...] = ()
    iterated: bool = False
    children: tuple[Node, ...] = field(default=())

    @property
    def parameters(self) -> int:
        """Total number of parameters of all copies."""
        own = 0 if self.shape is None else math.prod(self.shape) + self.gains
        return self.times * (own + sum(child.parameters for child in self.children))

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by their names in the built model's ``named_parameters``."""
        path = f"{prefix}.{self.name}" if prefix and self.name else prefix or self.name
        if self.shape is not None:
            if not self.gains:
                return {path: self.shape}
            stem = f"{path.removesuffix('weight')}parametrizations.weight.original"
            return {f"{stem}0": (self.gains, *[1] * (len(self.shape) - 1)), f"{stem}1": self.shape}
        numbers = self.numbers or range(self.times)
        copies = [path] if self.times == 1 else [f"{path}.{number}" for number in numbers]
        found: dict[str, tuple[int, ...]] = {}
        for copy in copies:
            for child in self.children:
                found |= child.shapes(copy)
        return found


def model_tree(spec: ModelSpec) -> Node:
    """Return the tree of a model: embedding, prelude, injection, core, coda, head.

    Raises:
        ValueError: a part must be built to determine its parameters, and building fails.

    """
    if not isinstance(spec, LanguageModelSpec):
        return Node(name="", note=_fields(spec), children=_built(spec))
    parts = [_embedding(spec), *_prelude(spec), *_ends_of_core(spec), _backbone(spec), *_output(spec)]
    return Node(name="", signal="tokens (B, L)", children=tuple(parts))


def _embedding(spec: LanguageModelSpec) -> Node:
    rows, d = spec.padded_vocab_size, spec.d_model
    notes = [
        "" if rows == spec.vocab_size else f"{spec.vocab_size} tokens, padded",
        "" if spec.embedding_scale == 1 else f"times {spec.embedding_scale:g}",
    ]
    note = ", ".join(note for note in notes if note)
    return Node(name="embedding.weight", note=note, signal=f"x (B, L, {d})", shape=(rows, d))


def _prelude(spec: LanguageModelSpec) -> list[Node]:
    d, stack = spec.d_model, spec.stacks.get("prelude")
    signal = f"e (B, L, {d})"
    parts = []
    if stack is not None:
        note = "once" if spec.prelude_norm else "e = prelude(x), once"
        layers = _layers(spec, stack, injected=False)
        parts.append(
            Node(name="prelude", note=note, signal="" if spec.prelude_norm else signal, children=layers)
        )
    if spec.prelude_norm:
        note = "e = rms(x)" if stack is None else "e = rms(prelude(x))"
        parts.append(Node(name="prelude_norm.weight", note=note, signal=signal, shape=(d,)))
    return parts


def _ends_of_core(spec: LanguageModelSpec) -> list[Node]:
    """Return the injection and the start, where they have parameters."""
    if not isinstance(spec, ImplicitLMSpec):
        return []
    width, parts = spec.core_width, []
    children = _injection(spec)
    if children:
        projected = spec.injection.adds_to_projections
        signal = f"u (B, L, {_injection_width(spec)})" if projected else ""
        parts.append(Node(name="injection", note=injection_of(spec), signal=signal, children=children))
    if spec.start.parameter_count(width):
        parts.append(_small("start", spec.start, _LEARNED_START, width=width))
    return parts


def _injection(spec: ImplicitLMSpec) -> tuple[Node, ...]:
    projected = _injection_width(spec) if spec.injection.adds_to_projections else 0
    shapes = spec.injection.parameter_shapes(spec.d_model, spec.core_width, projected)
    if shapes is not None:
        return tuple(_parameter(key, shape, normed=spec.weight_norm) for key, shape in shapes.items())
    return _built(
        spec.injection,
        normed=spec.weight_norm,
        d_model=spec.d_model,
        core_width=spec.core_width,
        projected=projected or None,
        norm_eps=spec.norm_eps,
    )


def _backbone(spec: LanguageModelSpec) -> Node:
    implicit, width = isinstance(spec, ImplicitLMSpec), spec.core_width
    injected = isinstance(spec, ImplicitLMSpec) and spec.injection.adds_to_projections
    layers = _layers(spec, spec.core, injected=injected)
    norm = (Node(name="norm.weight", shape=(width,)),) if spec.norm_in_core else ()
    return Node(
        name="backbone",
        note=core_of(spec),
        signal=f"z (B, L, {width})",
        iterated=implicit,
        children=(*layers, *norm),
    )


def _output(spec: LanguageModelSpec) -> list[Node]:
    """Return the parts after the core: projection, coda, norm, exit gate, head."""
    d, width, rows, stack = spec.d_model, spec.core_width, spec.padded_vocab_size, spec.stacks.get("coda")
    parts, read, signal = [], output_of_core(spec), f"h (B, L, {d})"
    if spec.core_projection:
        children = [Node(name="weight", shape=(d, width))]
        children += [Node(name="bias", shape=(d,))] if spec.core_projection_bias else []
        parts.append(Node(name="core_projection", note="C", children=tuple(children)))
    if stack is not None:
        layers = _layers(spec, stack, injected=False)
        parts.append(Node(name="coda", note=f"h = coda({read}), once", signal=signal, children=layers))
    if spec.final_norm:
        note = "rms(h)" if stack is not None else f"h = rms({read})"
        parts.append(
            Node(name="norm.weight", note=note, signal="" if stack is not None else signal, shape=(d,))
        )
    if isinstance(spec, ImplicitLMSpec) and spec.exit_gate:
        children = [Node(name="weight", shape=(1, width)), Node(name="bias", shape=(1,))]
        note = "reads when a token may leave the loop"
        parts.append(Node(name="exit_gate", note=note, children=tuple(children)))
    logits, scaled = f"logits (B, L, {rows})", logits_of(spec)
    if spec.tie_embeddings:
        note = ", ".join(note for note in ("the embedding", scaled) if note)
        parts.append(Node(name="head", note=note, signal=logits))
    else:
        parts.append(Node(name="head.weight", note=scaled, signal=logits, shape=(rows, d)))
    return parts


# ------------------------------------------------------------------------------------ layers

_LAYER_SCALINGS = {"layer_scale": "gamma", "bounded_gate": "raw_gamma"}
"""Names of the parameter of built-in scalings."""
_LEARNED_START = {"learned": "value"}


def _layers(spec: LanguageModelSpec, stack: Stack, *, injected: bool) -> tuple[Node, ...]:
    """Return the layers of a stack, those of one kind together, in the order of their first ones."""
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(stack.layers):
        groups.setdefault(repr(layer), []).append(number)
    nodes = []
    for numbers in groups.values():
        layer = stack.layers[numbers[0]]
        note = layer_of(stack, layer, injected=injected)
        parts = _layer(spec, stack, layer, injected=injected)
        if len(numbers) == 1:
            nodes.append(Node(name=f"layers.{numbers[0]}", note=note, children=parts))
            continue
        if len(groups) > 1:
            note = f"{numbers_of(numbers)}: {note}"
        nodes.append(
            Node(name="layers", note=note, times=len(numbers), numbers=tuple(numbers), children=parts)
        )
    return tuple(nodes)


def _layer(spec: LanguageModelSpec, stack: Stack, layer: Layer, *, injected: bool) -> tuple[Node, ...]:
    parts: list[Node] = []
    for name, part in (("mixer", layer.mixer), ("mlp", layer.mlp)):
        if part is None:
            continue
        if stack.norm_placement != "post":
            parts.append(Node(name=f"{name}_norm.weight", shape=(stack.d_model,)))
        parts.append(_part(name, part, d_model=stack.d_model, normed=spec.weight_norm, injected=injected))
        if stack.norm_placement != "pre":
            parts.append(Node(name=f"{name}_post_norm.weight", shape=(stack.d_model,)))
        scaling = stack.residual_scaling
        if scaling.parameter_count(stack.d_model):
            context = {"d_model": stack.d_model, "n_layers": len(stack.layers)}
            parts.append(_small(f"{name}_scaling", scaling, _LAYER_SCALINGS, **context))
    return tuple(parts)


def _small(name: str, spec: ScalingSpec | StartSpec, known: Mapping[str, str], **context: Any) -> Node:
    """Return a scaling or a start: a built-in one with its only parameter, a vector, and others as built."""
    if spec.kind in known:
        width = context.get("d_model", context.get("width", 0))
        return Node(name=f"{name}.{known[spec.kind]}", note=fields_of(spec), shape=(width,))
    return Node(name=name, note=fields_of(spec), children=_built(spec, **context))


def _part(name: str, spec: MixerSpec | MLPSpec, *, d_model: int, normed: bool, injected: bool) -> Node:
    shapes = spec.parameter_shapes(d_model)
    headline = spec.headline(d_model)
    note = f"{spec.kind}: {headline}" if headline else spec.kind
    if isinstance(spec, MixerSpec) and injected:
        note += ", input + u"
    if shapes is not None:
        children = tuple(_parameter(key, shape, normed=normed) for key, shape in shapes.items())
    else:
        children = _built(spec, normed=normed, d_model=d_model)
    return Node(name=name, note=note, children=children)


def _injection_width(spec: ImplicitLMSpec) -> int:
    width = spec.injection_table_width
    if width is None:
        built: Any = _on_meta(spec.core.layers[0].mixer, d_model=spec.core_width)
        width = int(built.injection_width)
    return width


def _parameter(name: str, shape: tuple[int, ...], *, normed: bool) -> Node:
    return Node(name=name, shape=shape, gains=shape[0] if normed and is_weight_normed(name, shape) else 0)


# ------------------------------------------------------------------------------------ what must be built


def _on_meta(spec: Any, **context: Any) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return registry.build(spec, **context)
    except ImportError as error:
        raise ValueError(
            f"{type(spec).family} {spec.kind!r} cannot be built for its description: {error}"
        ) from error


def _built(spec: Any, *, normed: bool = False, **context: Any) -> tuple[Node, ...]:
    """Build a part on the meta device and list its parameters."""
    return _of_module(_on_meta(spec, **context), normed=normed)


def _of_module(module: Any, *, normed: bool, seen: set[int] | None = None) -> tuple[Node, ...]:
    seen = set() if seen is None else seen
    nodes = []
    for name, parameter in module.named_parameters(recurse=False):
        tied = id(parameter) in seen
        seen.add(id(parameter))
        nodes.append(
            Node(name=name, note="tied: counted above")
            if tied
            else _parameter(name, tuple(parameter.shape), normed=normed)
        )
    for name, child in module.named_children():
        inner = _of_module(child, normed=normed, seen=seen)
        copies = [node for node in inner if node.name.isdigit()]
        if len(copies) == len(inner) > 1 and len({node.children for node in inner}) == 1:
            nodes.append(Node(name=name, times=len(inner), children=inner[0].children))
        elif len(inner) == 1 and not inner[0].children:  # a single weight, such as that of a norm
            nodes.append(replace(inner[0], name=f"{name}.{inner[0].name}"))
        elif inner:
            nodes.append(Node(name=name, note=type(child).__name__, children=inner))
    return tuple(nodes)


def _fields(spec: ModelSpec) -> str:
    shown = {n: v for n, v in spec if n != "kind" and v != type(spec).model_fields[n].default}
    return ", ".join(f"{n} {v}" for n, v in shown.items() if not isinstance(v, Mapping))
