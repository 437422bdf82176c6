"""The contracts of an injection; each is a function of its spec.

``check_injection(MySpec(...))`` runs all; ``INJECTION_CONTRACTS`` names them, to write one test each.

Shape legend: B batch, L tokens of a window, D model width, C core width, U width of the mixers' projections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from implicit_blocks.injections.base import Injection
from implicit_blocks.layers import reset_parameters_
from implicit_blocks.registry import build, kinds
from implicit_blocks.specs.families import InjectionSpec
from implicit_blocks.testing.contract import check_gradients, named, relative_error, require

ROWS, LENGTH, WIDTH, OTHER_WIDTH, PROJECTED = 3, 6, 8, 12, 10


class _Inputs(NamedTuple):
    """The prelude's output (B, L, D), the state, and the core's output (B, L, C)."""

    x: Tensor
    z: Tensor
    h: Tensor

    def part(self, rows: slice | Tensor, tokens: slice) -> _Inputs:
        return _Inputs(*(tensor[rows, tokens] for tensor in self))


class _Values(NamedTuple):
    """Everything that an injection computes; None where it computes nothing."""

    source: Tensor | None
    projected: Tensor | None
    entered: Tensor
    left: Tensor


def _core_width(spec: InjectionSpec) -> int:
    return WIDTH if spec.needs_equal_widths else OTHER_WIDTH


def _built(spec: InjectionSpec, core_width: int) -> Injection:
    width = PROJECTED if spec.adds_to_projections else None
    built: Injection = build(spec, d_model=WIDTH, core_width=core_width, projected=width, norm_eps=1e-5)
    return built


def _randomized(spec: InjectionSpec, dtype: torch.dtype = torch.float64) -> Injection:
    """Return an injection with random parameters, so that none of them is without effect."""
    injection = _built(spec, _core_width(spec)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in injection.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 + 0.3 * noise)
    return injection


def _inputs(spec: InjectionSpec, dtype: torch.dtype = torch.float64) -> _Inputs:
    generator = torch.Generator().manual_seed(1)
    widths = (WIDTH, _core_width(spec), _core_width(spec))
    shapes = [(ROWS, LENGTH, width) for width in widths]
    return _Inputs(
        *(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    )


def _run(injection: Injection, inputs: _Inputs) -> _Values:
    source, projected = injection.source(inputs.x), injection.projected(inputs.x)
    e = None if source is None else source.to(inputs.z.dtype)  # as models do
    entered = injection.enter(inputs.z, e)
    return _Values(source, projected, entered, injection.leave(inputs.h, inputs.z, entered, e))


@torch.no_grad()
def shapes_and_dtypes(spec: InjectionSpec) -> None:
    """Check that the stream keeps its shape and type: float64, float32, under autocast, bfloat16 weights."""
    expected = _run(_randomized(spec), _inputs(spec))
    core = (ROWS, LENGTH, _core_width(spec))
    for stream, weights, autocast in (
        (torch.float64, torch.float64, False),
        (torch.float32, torch.float32, False),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
    ):
        injection = _randomized(spec, weights)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = _run(injection, _inputs(spec, stream))
        for name, value in (("enter", found.entered), ("leave", found.left)):
            require(
                value.shape == core and value.dtype == stream,
                injection,
                "shapes and dtypes",
                f"for a stream of {stream}, weights of {weights} and autocast {'on' if autocast else 'off'} "
                f"{name} returned {tuple(value.shape)} of {value.dtype}; return {core} of the stream's type",
            )
        pairs = zip(found._fields, found, expected, strict=True)
        errors = {
            name: relative_error(value.double(), exact)
            for name, value, exact in pairs
            if value is not None and exact is not None
        }
        worst = max(errors, key=lambda name: errors[name])
        bound = 0.03 if autocast or weights == torch.bfloat16 else 1e-5
        require(
            errors[worst] < bound,
            injection,
            "shapes and dtypes",
            f"{worst} differs by {errors[worst]:.1e} from its value in float64, with a stream of {stream}, "
            f"weights of {weights} and autocast {'on' if autocast else 'off'}",
        )
    width = None if expected.projected is None else expected.projected.shape
    wanted = (ROWS, LENGTH, PROJECTED) if spec.adds_to_projections else None
    require(
        width == wanted,
        spec,
        "shapes and dtypes",
        f"adds_to_projections is {spec.adds_to_projections}, but projected returned "
        f"{None if width is None else tuple(width)}; expected {wanted}",
    )


@torch.no_grad()
def positions_apart(spec: InjectionSpec) -> None:
    """Check that a token's values depend on no other token and no other row."""
    injection, inputs = _randomized(spec), _inputs(spec)
    whole = _run(injection, inputs)
    everything = slice(None)
    for rows, tokens, name in (
        (torch.tensor([2, 0]), everything, "rows 2 and 0"),
        (everything, slice(0, 4), "the first 4 tokens"),
        (everything, slice(3, 4), "token 3"),
    ):
        alone = _run(injection, inputs.part(rows, tokens))
        for of, value, together in zip(whole._fields, alone, whole, strict=True):
            if value is None or together is None:
                continue
            error = relative_error(value, together[rows, tokens])
            require(
                error < 1e-12,
                injection,
                "positions apart",
                f"{of} of {name} alone differs by {error:.1e} from its value in the batch; compute each "
                "position separately, so that windows and rows do not influence each other",
            )


@torch.no_grad()
def purity(spec: InjectionSpec) -> None:
    """Check that two calls agree, in training mode too, and that no argument or random state is modified."""
    injection, inputs = _randomized(spec).train(), _inputs(spec)
    kept, numbers = _Inputs(*(tensor.clone() for tensor in inputs)), torch.get_rng_state()
    first, second = _run(injection, inputs), _run(injection, inputs)
    equal = all(
        one is other or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(first, second, strict=True)
    )
    unchanged = all(torch.equal(one, other) for one, other in zip(inputs, kept, strict=True))
    require(
        equal and unchanged and torch.equal(numbers, torch.get_rng_state()),
        injection,
        "purity",
        "two calls differ, or a call modifies an argument or draws random numbers; the map is called many "
        "times and must be a function of its arguments",
    )


@torch.no_grad()
def direct(spec: InjectionSpec) -> None:
    """Check that ``direct`` is True exactly where ``enter`` and ``leave`` change nothing."""
    injection, inputs = _randomized(spec), _inputs(spec)
    found = _run(injection, inputs)
    is_identity = torch.equal(found.entered, inputs.z) and torch.equal(found.left, inputs.h)
    require(
        injection.direct == is_identity,
        injection,
        "direct",
        f"direct is {injection.direct}, but enter and leave {'change nothing' if is_identity else 'change z'}"
        "; a model calls neither where direct is True",
    )


def gradients(spec: InjectionSpec) -> None:
    """Check that gradients reach every input and parameter, against finite differences in float64."""
    injection, inputs = _randomized(spec), _Inputs(*(tensor.requires_grad_() for tensor in _inputs(spec)))

    def loss() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, value in enumerate(_run(injection, inputs), 1):
            if value is not None:  # the weights differ, so that no two values cancel
                weights = torch.linspace(number, number**2 + 1, value.numel(), dtype=torch.float64)
                total = total + (value * weights.view_as(value)).sum()
        return total

    tensors = {
        "the prelude's output": inputs.x,
        "z": inputs.z,
        "the core's output": inputs.h,
        **dict(injection.named_parameters()),
    }
    for name, derivative in check_gradients(injection, loss, tensors, tolerance=1e-5).items():
        require(
            name not in dict(injection.named_parameters()) or derivative != 0,
            injection,
            "gradients",
            f"no gradient reaches the parameter {name}; remove it or use it",
        )


def widths(spec: InjectionSpec) -> None:
    """Check that ``check`` refuses the widths that the module refuses, and names both."""
    messages = []
    for run in (lambda: spec.check(WIDTH, OTHER_WIDTH), lambda: _built(spec, OTHER_WIDTH)):
        try:
            run()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    equal = bool(messages[0]) == bool(messages[1]) == spec.needs_equal_widths
    both = all(str(WIDTH) in text and str(OTHER_WIDTH) in text for text in messages if text)
    require(
        equal and both,
        spec,
        "widths",
        f"needs_equal_widths is {spec.needs_equal_widths}; for d_model {WIDTH} and a core of width "
        f"{OTHER_WIDTH} check gives {messages[0]!r} and the module {messages[1]!r}; both must accept the "
        "widths, or refuse them and name both",
    )
    spec.check(WIDTH, WIDTH)
    require(
        spec.z_init in kinds("start"),
        spec,
        "widths",
        f"z_init is {spec.z_init!r}; name one of the initial states {', '.join(kinds('start'))}",
    )


@torch.no_grad()
def parameters(spec: InjectionSpec) -> None:
    """Check the spec's shapes, deep copies, state dicts, construction on the meta device, and the reset."""
    injection, inputs = _randomized(spec), _inputs(spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in injection.named_parameters()}
    core_width, projected = _core_width(spec), PROJECTED if spec.adds_to_projections else None
    declared = spec.parameter_shapes(WIDTH, core_width, projected)
    require(
        declared is None or declared == shapes,
        injection,
        "parameters",
        f"parameter_shapes({WIDTH}, {core_width}, {projected}) returns {declared}, but the parameters are "
        f"{shapes}",
    )
    with torch.device("meta"):
        empty = _built(spec, core_width)
    on_meta = all(parameter.is_meta for parameter in empty.parameters())
    empty = empty.to_empty(device="cpu").double()
    for parameter in empty.parameters():
        parameter.fill_(torch.nan)
    reset_parameters_(nn.ModuleList([empty]))
    finite = all(bool(parameter.isfinite().all()) for parameter in empty.parameters())
    require(
        on_meta and finite,
        injection,
        "parameters",
        "a module built on the meta device must allocate nothing, and reset_parameters must then initialize "
        "every parameter",
    )
    empty.load_state_dict(injection.state_dict())
    expected = _run(injection, inputs)
    for other in (copy.deepcopy(injection), empty):
        same = [
            one is two or (one is not None and two is not None and torch.equal(one, two))
            for one, two in zip(_run(other, inputs), expected, strict=True)
        ]
        require(
            all(same),
            injection,
            "parameters",
            "a deep copy, or a module from the meta device that loads the state dict, gives other values; "
            "store everything learned in parameters",
        )


INJECTION_CONTRACTS: dict[str, Callable[[InjectionSpec], None]] = named(
    (purity, shapes_and_dtypes, positions_apart, direct, gradients, widths, parameters)
)


def check_injection(spec: InjectionSpec) -> None:
    """Run every contract on the injection that a registered spec builds.

    Raises:
        ContractError: names the component, the broken contract and a remedy.

    """
    for contract in INJECTION_CONTRACTS.values():
        contract(spec)
