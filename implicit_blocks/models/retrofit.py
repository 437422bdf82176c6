"""Retrofit: the middle layers of an explicit model become the core of a sandwich of the same function.

The first layers become the prelude, with output e, and the last ones the coda. The core iterates::

    z ← e + core(u) − u,   u = e + g ⊙ (z − e),   from z = e

With the gate ``g = 0`` every call gives ``core(e)``, the explicit model, whatever the number of loops. From
the second loop on ``z − e`` is not zero, so that the gate has a gradient and training opens it. Fine-tune
with few loops first and more later, as S. McLeish et al., "Teaching Pretrained Language Models to Think
Deeper with Retrofitted Recurrence", 2025 (2511.07384). Their adapter is another one, a linear map of z and
e, with which the model does not start as the same function. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from implicit_blocks.scalings import DeepNormSpec
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"backbone\.layers\.(\d+)\.")


def retrofit(
    spec: Any, state: Mapping[str, Tensor], first: int, stop: int, *, gate_init: float | None = 0.0
) -> tuple[ImplicitLMSpec, dict[str, Tensor]]:
    """Return an implicit model of the same function, whose core is the layers from ``first`` up to ``stop``.

    In training it takes 4 loops, all differentiated, which a run can change.

    Args:
        spec: spec of the explicit model, one stack of layers without weight norm.
        state: state dict of the explicit model, with tensors of that model's shapes.
        first: number of the core's first layer, which is the number of layers of the prelude.
        stop: number of the layer after the core's last one, where the coda begins.
        gate_init: initial value of the gate, None for no gate. With other values than 0 the function is the
            same with one loop only.

    Raises:
        ValueError: the model is not explicit, has several stacks or weight norm, or the layers are not
            ``0 ≤ first < stop ≤ n_layers``.

    """
    retrofitted = retrofit_spec(spec, first, stop, gate_init=gate_init)
    renamed = {_renamed(name, first, stop): tensor for name, tensor in state.items()}
    if gate_init is not None:
        renamed["injection.gate"] = state["backbone.norm.weight"].new_full((spec.d_model,), gate_init)
    return retrofitted, renamed


def retrofit_spec(spec: Any, first: int, stop: int, *, gate_init: float | None = 0.0) -> ImplicitLMSpec:
    """Return the spec of ``retrofit``, with these arguments.

    Raises:
        ValueError: as for ``retrofit``.

    """
    _check(spec, first, stop)
    kept = spec.model_fields_set - {"kind", "layers", "n_layers", "core_norm"}
    fields = {name: getattr(spec, name) for name in kept}
    if isinstance(scaling := spec.residual_scaling, DeepNormSpec):  # α of a stack depends on its depth
        fields["residual_scaling"] = DeepNormSpec(alpha=scaling.factor(spec.n_layers))
    return ImplicitLMSpec(
        **fields
        | _stack(spec, first, stop)
        | ({"prelude": _stack(spec, 0, first)} if first > 0 else {})
        | ({"coda": _stack(spec, stop, spec.n_layers)} if stop < spec.n_layers else {})
        | {
            "weight_norm": False,
            "injection": {"kind": "residual", "gate_init": gate_init},
            "z_init": {"kind": "prelude"},
            "depth": {"kind": "fixed", "loops": 4},
            "gradient": {"kind": "last_loops"},
        }
    )


def core_of(spec: ImplicitLMSpec) -> tuple[int, int] | None:
    """Return the ``first`` and ``stop`` with which ``retrofit`` makes such a model; None: it does not."""
    if spec.injection.kind != "residual" or spec.weight_norm:
        return None
    first = 0 if spec.prelude is None else spec.prelude.n_layers
    return first, first + spec.n_layers


def parse_core(text: str) -> tuple[int, int]:
    """Return the numbers of ``FIRST:STOP``.

    Raises:
        ValueError: the text has another form.

    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if match is None:
        raise ValueError(
            f"the core is {text!r}; expected FIRST:STOP, numbers of layers, such as 4:12 for layers 4 to 11"
        )
    return int(match[1]), int(match[2])


def _check(spec: Any, first: int, stop: int) -> None:
    if not isinstance(spec, ExplicitLMSpec):
        raise ValueError(
            f"the model is of kind {getattr(spec, 'kind', None)!r}, and only layers of an explicit_lm can be "
            "retrofitted; choose an explicit model"
        )
    more = ("prelude", "coda", "core_d_model", "core_projection", "core_residual", "prelude_norm")
    if given := [name for name in more if getattr(spec, name)]:
        raise ValueError(
            f"the model has {', '.join(given)}, and only a single stack of layers can be divided; choose a "
            "model without them"
        )
    if not spec.norm_in_core:
        raise ValueError("the model has core_norm: false; choose a model whose layers end with a norm")
    if spec.weight_norm:
        raise ValueError("the model has weight norm; fold it into the weights first (--fold-weight-norm)")
    n_layers = spec.n_layers
    if not 0 <= first <= n_layers or not 0 <= stop <= n_layers:
        raise ValueError(
            f"the core {first}:{stop} is outside the model's {n_layers} layers, 0 to {n_layers - 1}; choose "
            f"0 ≤ FIRST < STOP ≤ {n_layers}"
        )
    if first >= stop:
        raise ValueError(
            f"the core {first}:{stop} is empty: STOP is the layer after its last; choose a STOP above {first}"
        )


def _stack(spec: ExplicitLMSpec, first: int, stop: int) -> dict[str, Any]:
    """Return the fields of the stack of some layers; a pattern is spelled out."""
    layers = spec.core.layers[first:stop]
    if spec.core.uniform:
        return {"n_layers": len(layers)}
    return {"n_layers": len(layers), "layers": [{"mixer": each.mixer, "mlp": each.mlp} for each in layers]}


def _renamed(name: str, first: int, stop: int) -> str:
    """Return the name of a tensor in the sandwich."""
    if name.startswith("backbone.norm."):
        return name.removeprefix("backbone.")
    match = _LAYER.match(name)
    if match is None:
        return name
    number = int(match[1])
    if number < first:
        stem = f"prelude.layers.{number}"
    elif number < stop:
        stem = f"backbone.layers.{number - first}"
    else:
        stem = f"coda.layers.{number - stop}"
    return f"{stem}.{name[match.end() :]}"
