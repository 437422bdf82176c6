"""The contracts of a residual scaling; each is a function of its spec.

``check_scaling(MySpec(...))`` runs all; ``SCALING_CONTRACTS`` names them, to write one test each.

Shape legend: B batch, L tokens of a window, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from implicit_blocks.registry import build
from implicit_blocks.scalings.scaling import Scaling
from implicit_blocks.specs import ScalingSpec
from implicit_blocks.testing.contract import check_gradients, named, relative_error, require

ROWS, LENGTH, WIDTH, LAYERS = 2, 5, 8, 6


def _build_scaling(spec: ScalingSpec) -> Scaling:
    scaling: Scaling = build(spec, d_model=WIDTH, n_layers=LAYERS)
    return scaling.double()


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, ROWS, LENGTH, WIDTH)
    stream, branch = torch.randn(shape, generator=generator, dtype=torch.float64)
    return stream, branch


@torch.no_grad()
def types(spec: ScalingSpec) -> None:
    """Check that the stream keeps its shape and type, with branches and parameters in lower precision."""
    stream, branch = _inputs()
    expected = _build_scaling(spec)(stream, branch)
    for parameters in (torch.float32, torch.bfloat16):
        scaling = build(spec, d_model=WIDTH, n_layers=LAYERS).to(parameters)
        after = scaling(stream.float(), branch.bfloat16())
        error = relative_error(after.double(), expected)
        require(
            after.dtype == torch.float32 and after.shape == stream.shape and error < 0.02,
            scaling,
            "types",
            f"for a stream of float32 and a branch of bfloat16 it returned {tuple(after.shape)} of "
            f"{after.dtype}, with error {error:.1e}; keep the stream's shape and type",
        )


@torch.no_grad()
def tokens_apart(spec: ScalingSpec) -> None:
    """Check that a token's value does not depend on other tokens, and that no argument is modified."""
    scaling = _build_scaling(spec)
    stream, branch = _inputs()
    originals = stream.clone(), branch.clone()
    whole = scaling(stream, branch)
    parts = torch.cat([scaling(stream[:, i : i + 1], branch[:, i : i + 1]) for i in range(LENGTH)], dim=1)
    require(
        relative_error(parts, whole) < 1e-12
        and torch.equal(stream, originals[0])
        and torch.equal(branch, originals[1]),
        scaling,
        "tokens apart",
        "tokens alone have other values than together, or the call modifies its arguments; compute each "
        "token and channel separately",
    )


@torch.no_grad()
def plain(spec: ScalingSpec) -> None:
    """Check that a spec that is ``plain`` gives the sum, and that no other does."""
    scaling = _build_scaling(spec)
    stream, branch = _inputs()
    is_sum = torch.equal(scaling(stream, branch), stream + branch)
    require(
        is_sum or not spec.plain,
        scaling,
        "plain",
        "plain is True, but the value is not stream + branch; layers leave plain scalings out",
    )


def gradients(spec: ScalingSpec) -> None:
    """Check the gradients of both arguments and every parameter against finite differences, in float64."""
    scaling = _build_scaling(spec)
    stream, branch = (part.requires_grad_() for part in _inputs())
    tensors = {"the stream": stream, "the branch": branch, **dict(scaling.named_parameters())}
    weights = torch.linspace(1, 2, stream.numel(), dtype=torch.float64).view_as(stream)

    def loss() -> Tensor:
        total: Tensor = (scaling(stream, branch) * weights).sum()
        return total

    check_gradients(scaling, loss, tensors)


@torch.no_grad()
def parameters(spec: ScalingSpec) -> None:
    """Check the parameters: vectors, counted by the spec, reset, copied, built on the meta device."""
    scaling = _build_scaling(spec)
    counted = sum(parameter.numel() for parameter in scaling.parameters())
    dimensions = max((parameter.ndim for parameter in scaling.parameters()), default=0)
    require(
        dimensions <= 1 and counted == spec.parameter_count(WIDTH),
        scaling,
        "parameters",
        f"parameter_count({WIDTH}) returns {spec.parameter_count(WIDTH)}, but there are {counted} parameters "
        f"of at most {dimensions} dimensions; parameters must be vectors, which weight decay excludes",
    )
    stream, branch = _inputs()
    expected = scaling(stream, branch)
    with torch.device("meta"):
        empty: Scaling = build(spec, d_model=WIDTH, n_layers=LAYERS)
    empty = empty.to_empty(device="cpu").double()
    for parameter in empty.parameters():
        parameter.fill_(torch.nan)
    if callable(reset := getattr(empty, "reset_parameters", None)):
        reset()
    finite = all(bool(parameter.isfinite().all()) for parameter in empty.parameters())
    empty.load_state_dict(scaling.state_dict())
    same = [torch.equal(other(stream, branch), expected) for other in (copy.deepcopy(scaling), empty)]
    require(
        finite and all(same),
        scaling,
        "parameters",
        "reset_parameters must initialize every parameter, and a deep copy, or a module built on the meta "
        "device that loads the state dict, must give the same values",
    )


SCALING_CONTRACTS: dict[str, Callable[[ScalingSpec], None]] = named(
    (types, tokens_apart, plain, gradients, parameters)
)


def check_scaling(spec: ScalingSpec) -> None:
    """Run every contract on the residual scaling that a registered spec builds.

    Raises:
        ContractError: names the component, the broken contract and a remedy.

    """
    for contract in SCALING_CONTRACTS.values():
        contract(spec)
