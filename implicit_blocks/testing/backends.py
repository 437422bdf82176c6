"""The contract of kernels: they agree with the plain operators to the accuracy of their precision.

Shape legend: B batch, L tokens, D model width, U injection width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Mixer
from implicit_blocks.registry import build
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require
from implicit_blocks.testing.mixer_runs import begin, make, run


def check_backend(
    spec: MixerSpec,
    reference: MixerSpec,
    *,
    d_model: int = 64,
    batch: int = 3,
    length: int = 70,
    device: str = "cuda",
    precision: torch.dtype | None = torch.bfloat16,
    tolerance: float = 1e-2,
    draws: int = 1,
) -> None:
    """Check that a mixer's kernels agree with its plain operators: outputs, final state, every gradient.

    Both are computed in ``precision`` by autocast and compared with the plain operators in float64. The error
    of the kernels may be twice that of the plain operators plus ``tolerance`` (relative errors, per tensor),
    and types must be equal. Sequences are processed whole, in windows down to one token, and padded.

    Args:
        spec: the mixer with the kernels; its parameters must have the names and shapes of the reference.
        reference: the same mixer with plain operators.
        d_model: width of the residual stream.
        batch: rows, B.
        length: tokens, L; use more than one chunk of the kernels.
        device: where both run; use "cpu" for kernels that need no GPU.
        precision: of autocast; None: float32 without autocast.
        tolerance: relative error that the kernels may add.
        draws: number of random inputs and loss weights over which errors are taken jointly. A gradient with
            few entries, such as one per head, is a sum over all tokens with cancellation: its rounding error
            varies by a factor of two or three between draws, for any implementation.

    Raises:
        ContractError: naming the mixer, the tensor, the windows, and both errors.

    """
    plain = make(reference, d_model).to(device)
    fast: Mixer = build(spec, d_model=d_model).to(device)
    fast.load_state_dict(plain.state_dict())
    generator = torch.Generator().manual_seed(1)
    inputs = [
        tuple(
            torch.randn(batch, length, width, generator=generator).to(device)
            for width in (d_model, plain.injection_width)
        )
        for _ in range(draws)
    ]
    padded = torch.rand(batch, length, generator=generator).to(device) < 0.7
    for name, cuts, valid in (
        ("one window", [length], None),
        ("windows", sorted({1, length // 2, length - 1, length} - {0}), None),
        ("a padded window", [length], padded),
        ("padded windows", sorted({length // 2, length} - {0}), padded),
    ):
        found = _drawn(fast.float(), inputs, cuts, valid, precision)
        same = _drawn(copy.deepcopy(plain).float(), inputs, cuts, valid, precision)
        exact = _drawn(plain, [(z.double(), u.double()) for z, u in inputs], cuts, valid, None)
        for part, expected in exact.items():
            kinds = found[part].dtype, same[part].dtype
            require(
                kinds[0] == kinds[1],
                fast,
                "backend",
                f"for {name}, {part} has type {kinds[0]}, with plain operators {kinds[1]}",
            )
            error, other = (relative_error(values[part].double(), expected) for values in (found, same))
            require(
                error <= tolerance + 2 * other,
                fast,
                "backend",
                f"for {name}, {part} has error {error:.1e}; plain operators in the same precision have "
                f"error {other:.1e}",
            )


def _drawn(
    mixer: Mixer,
    inputs: Sequence[tuple[Tensor, ...]],
    cuts: Sequence[int],
    valid: Tensor | None,
    precision: torch.dtype | None,
) -> dict[str, Tensor]:
    """Return the results of ``_differentiated`` for all inputs, each with its own loss weights."""
    found = [
        _differentiated(mixer, z, u, cuts, valid, precision, seed=2 + number)
        for number, (z, u) in enumerate(inputs)
    ]
    return {name: torch.stack([values[name] for values in found]) for name in found[0]}


def _differentiated(
    mixer: Mixer,
    z: Tensor,
    u: Tensor,
    cuts: Sequence[int],
    valid: Tensor | None,
    precision: torch.dtype | None,
    *,
    seed: int,
) -> dict[str, Tensor]:
    """Return outputs, final state, and the gradients of a weighted sum of both, by name."""
    leaves = {"z": z.clone().requires_grad_(), "u": u.clone().requires_grad_()}
    start = begin(mixer, z.shape[0], dtype=z.dtype, device=z.device)
    with torch.autocast(z.device.type, precision, enabled=precision is not None):
        # An injection is the output of a linear layer, so autocast has reduced its precision.
        injection = leaves["u"] if precision is None else leaves["u"].to(precision)
        y, state = run(mixer, leaves["z"], injection, cuts, valid=valid, start=start)
    if valid is not None:
        y = y.where(valid[:, :, None], 0.0)  # values at padding are arbitrary
    values = {"the output": y}
    for number, leaf in enumerate(pytree.tree_leaves(state)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            values[f"tensor {number} of the final state"] = leaf
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64, device=z.device)
    for value in values.values():
        weights = torch.randn(value.shape, dtype=torch.float64, generator=generator).to(z.device)
        loss = loss + (value.double() * weights).sum()
    leaves |= dict(mixer.named_parameters())
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        values[f"the gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach() for name, value in values.items()}
