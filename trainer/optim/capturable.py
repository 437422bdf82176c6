"""Steps of optimizers that read nothing on the host, so that they can be captured as CUDA graphs.

AdamW has such a step (``capturable``). torch's Muon reads its learning rate on the host and orthogonalizes
matrices one by one, with 15 small products each; here the rate is a tensor, and matrices of equal shape are
orthogonalized together. The update is that of ``torch.optim.Muon``, up to rounding.

Shape legend: K matrices of equal shape, R rows and C columns, R at most C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.optim.muon import MuonAndAdamW


def make_capturable(optimizer: torch.optim.Optimizer, rate: Tensor, skip: Tensor) -> bool:
    """Let an optimizer read its learning rate, and whether to skip a step, on the device.

    Args:
        optimizer: AdamW with its fused kernel, or Muon with AdamW; other optimizers stay as they are.
        rate: the learning rate, float32 scalar on the device.
        skip: 1 where a step must change nothing, float32 scalar on the device.

    Returns:
        Whether `capturable_step` can be used.

    """
    adamw = optimizer.adamw if isinstance(optimizer, MuonAndAdamW) else optimizer
    if not isinstance(adamw, torch.optim.AdamW):
        return False
    for group in adamw.param_groups:
        group["lr"], group["capturable"] = rate, True
    adamw.found_inf = skip  # type: ignore[attr-defined]  # the fused kernel reads it
    # The first steps run eagerly on purpose; torch would warn that they are slower than a graph.
    adamw._warned_capturable_if_run_uncaptured = True
    return True


def undo_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Return an optimizer that `make_capturable` has changed to steps with a learning rate on the host."""
    adamw = optimizer.adamw if isinstance(optimizer, MuonAndAdamW) else optimizer
    for group in adamw.param_groups:
        group["lr"], group["capturable"] = float(group["lr"]), False
    del adamw.found_inf  # type: ignore[attr-defined]  # set by make_capturable


@torch.no_grad()
def step_where_finite(optimizer: torch.optim.Optimizer, *values: Tensor) -> bool:
    """Make a step that changes nothing if a scalar is NaN or infinite, without asking the device.

    Returns False, and does nothing, for optimizers other than AdamW with its fused kernel.
    """
    if not isinstance(optimizer, torch.optim.AdamW) or not all(g["fused"] for g in optimizer.param_groups):
        return False
    finite = torch.stack([value.float() for value in values]).isfinite().all()
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # the fused kernel reads it
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]  # as above
    return True


@torch.no_grad()
def capturable_step(optimizer: torch.optim.Optimizer, rate: Tensor, skip: Tensor) -> None:
    """Make a step of an optimizer that `make_capturable` has changed, with the same two tensors."""
    if isinstance(optimizer, MuonAndAdamW):
        muon_step(optimizer.muon, rate, skip)
        optimizer.adamw.step()
    else:
        optimizer.step()


@torch.no_grad()
def muon_step(muon: torch.optim.Muon, rate: Tensor, skip: Tensor) -> None:
    """Make a step of Muon with a learning rate on the device; gradients of skipped steps may be NaN or inf.

    The state is that of ``torch.optim.Muon``: one ``momentum_buffer`` per parameter.
    """
    apply = 1 - skip
    for group in muon.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            continue
        for p in parameters:
            if "momentum_buffer" not in muon.state[p]:
                muon.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [muon.state[p]["momentum_buffer"] for p in parameters]
        # NaN · 0 is NaN: the gradients themselves are replaced.
        skipped = skip > 0
        gradients = [p.grad.masked_fill(skipped, 0.0) for p in parameters if p.grad is not None]
        momentum = group["momentum"]
        torch._foreach_mul_(buffers, 1 - (1 - momentum) * apply)
        torch._foreach_add_(buffers, torch._foreach_mul(gradients, (1 - momentum) * apply))
        updates = torch._foreach_lerp(gradients, buffers, momentum) if group["nesterov"] else buffers
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"] * apply)
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number, p in enumerate(parameters):
            by_shape.setdefault((min(p.shape), max(p.shape)), []).append(number)
        for numbers in by_shape.values():
            tall = [n for n in numbers if parameters[n].shape[0] > parameters[n].shape[1]]
            wide = [n for n in numbers if n not in tall]
            moved_KRC = orthogonalized(
                torch.stack([updates[n].mT for n in tall] + [updates[n] for n in wide]),
                coefficients=group["ns_coefficients"],
                steps=group["ns_steps"],
                eps=group["eps"],
            ).float() * (rate * apply)
            moved = [each_RC.mT for each_RC in moved_KRC[: len(tall)]] + list(moved_KRC[len(tall) :])
            for chosen, matrices in ((tall, moved[: len(tall)]), (wide, moved[len(tall) :])):
                if chosen:
                    scale = _shape_scale(group["adjust_lr_fn"], parameters[chosen[0]].shape)
                    torch._foreach_sub_([parameters[n] for n in chosen], matrices, alpha=scale)


def orthogonalized(
    matrices_KRC: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return approximations of the nearest matrices with orthonormal rows, bfloat16 (K, R, C).

    The Newton–Schulz iteration of ``torch.optim.Muon``, in bfloat16 too.
    """
    a, b, c = coefficients
    x_KRC = matrices_KRC.bfloat16()
    x_KRC = x_KRC / torch.linalg.vector_norm(x_KRC, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_KRR = x_KRC @ x_KRC.mT
        update_KRR = torch.baddbmm(gram_KRR, gram_KRR, gram_KRR, beta=b, alpha=c)
        x_KRC = torch.baddbmm(x_KRC, update_KRR, x_KRC, beta=a)
    return x_KRC


def newton_schulz_flops(shapes: list[tuple[int, int]], *, steps: int) -> float:
    """Return the floating-point operations of the iterations of one step of Muon, two per multiplication."""
    total = 0.0
    for shape in shapes:
        rows, columns = min(shape), max(shape)
        total += steps * (4 * rows**2 * columns + 2 * rows**3)
    return total


def _shape_scale(kind: str | None, shape: torch.Size) -> float:
    """Return the factor of the learning rate, see ``MuonSpec.shape_scaling``."""
    rows, columns = shape
    if kind == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1.0, rows / columns) ** 0.5)
