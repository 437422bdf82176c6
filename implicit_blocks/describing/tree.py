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
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, MixerSpec, MLPSpec, ModelSpec
from implicit_blocks.specs.layers import is_weight_normed


@dataclass(frozen=True, kw_only=True)
class Node:
    """A part of a model, or a parameter.

    ``name`` is the name in the built model. ``times`` is the number of consecutive copies, which the built
    model names 0, 1, … below ``name``. A parameter has a ``shape``; ``gains`` is the number of weight-norm
    gains for it. ``note`` describes what the part does, ``signal`` its output.
    """

    name: str
    note: str = ""
    signal: str = ""
    shape: tuple[int, ...] | None = None
    gains: int = 0
    times: int = 1
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
        copies = [path] if self.times == 1 else [f"{path}.{number}" for number in range(self.times)]
        found: dict[str, tuple[int, ...]] = {}
        for copy in copies:
            for child in self.children:
                found |= child.shapes(copy)
        return found


def model_tree(spec: ModelSpec) -> Node:
    """Return the tree of a model.

    Raises:
        ValueError: a part must be built to determine its parameters, and building fails.

    """
    if not isinstance(spec, LanguageModelSpec):
        return Node(name="", note=_fields(spec), children=_built(spec))
    d, implicit = spec.d_model, isinstance(spec, ImplicitLMSpec)
    rows = spec.padded_vocab_size
    padded = "" if rows == spec.vocab_size else f"{spec.vocab_size} tokens, padded"
    embedding = Node(name="embedding.weight", note=padded, signal=f"x (B, L, {d})", shape=(rows, d))
    parts = [embedding]
    if implicit:
        parts.append(_injection(spec))
    parts.append(_backbone(spec))
    logits = f"logits (B, L, {rows})"
    if spec.tie_embeddings:
        parts.append(Node(name="head", note="the embedding", signal=logits))
    else:
        parts.append(Node(name="head.weight", signal=logits, shape=(rows, d)))
    return Node(name="", signal="tokens (B, L)", children=tuple(parts))


def _injection(spec: LanguageModelSpec) -> Node:
    d, width = spec.d_model, _injection_width(spec)
    return Node(
        name="injection",
        note="u = W rms(x) + b, once a forward pass",
        signal=f"u (B, L, {width})",
        children=(
            Node(name="norm.weight", shape=(d,)),
            _parameter("proj.weight", (width, d), normed=spec.weight_norm),
            Node(name="proj.bias", shape=(width,)),
        ),
    )


def _backbone(spec: LanguageModelSpec) -> Node:
    d, implicit = spec.d_model, isinstance(spec, ImplicitLMSpec)
    parts: list[Node] = []
    for name, part in (("mixer", spec.mixer), ("mlp", spec.mlp)):
        if part is not None:
            parts.append(Node(name=f"{name}_norm.weight", shape=(d,)))
            parts.append(_part(name, part, d_model=d, normed=spec.weight_norm, injected=implicit))
    between = "z + mixer(rms(z), u)" if implicit else "z + mixer(rms(z))"
    if spec.mlp is not None:
        between += ", then z + mlp(rms(z))"
    layers = Node(name="layers", note=between, times=spec.n_layers, children=tuple(parts))
    if spec.n_layers == 1:
        layers = Node(name="layers.0", note=between, children=tuple(parts))
    start = {"zeros": "0", "embedding": "x"}[spec.z_init] if isinstance(spec, ImplicitLMSpec) else ""
    return Node(
        name="backbone",
        note=f"z ← f(z, u) from z = {start}, until z = f(z, u)" if implicit else "z = f(x), once",
        signal=f"z (B, L, {d})",
        iterated=implicit,
        children=(layers, Node(name="norm.weight", shape=(d,))),
    )


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


def _injection_width(spec: LanguageModelSpec) -> int:
    width = spec.mixer.injection_width(spec.d_model)
    if width is None:
        built: Any = _on_meta(spec.mixer, d_model=spec.d_model)
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
