"""The generalized delta rule with a choice between our Triton kernels and plain PyTorch.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.ops.backends import Backend, Operation, is_differentiated_forward
from implicit_blocks_rwkv7 import fla_scan
from implicit_blocks_rwkv7.delta_rule import check_shapes, generalized_delta_rule

WIDTHS = (16, 32)
"""Widths of keys and values that the kernels support: a program holds a state in registers."""


def _refuses(*inputs: Tensor | None) -> str:
    """Return why the kernels do not support the inputs, or ""."""
    *tensors, documents = inputs
    k, v = tensors[2], tensors[3]
    assert k is not None
    assert v is not None
    if not v.is_cuda:
        return "the kernels require a GPU"
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return "the kernels accumulate in float32, not float64"
    if documents is not None:
        return "the kernels support one document per row"
    if k.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return f"the kernels support keys and values of width {', '.join(map(str, WIDTHS))}"
    return "the kernels support neither forward mode nor torch.func" if is_differentiated_forward() else ""


def scan_triton(
    *tensors: Any, initial_state_BHKV: Tensor | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    """Scan with the kernels; ``generalized_delta_rule`` documents arguments and results."""
    tensors = (*tensors, initial_state_BHKV)
    check_shapes(*tensors)
    o, state = _scan(*tensors)
    return o, state


@torch.library.custom_op("implicit_blocks_rwkv7::scan", mutates_args=())
def _scan(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    from implicit_blocks_rwkv7 import triton_scan

    return triton_scan.forward(
        [t.contiguous() for t in (r, log_w, k, v, a, b)], None if initial is None else initial.contiguous()
    )


@_scan.register_fake
def _(*given: Tensor) -> tuple[Tensor, Tensor]:
    k, v = given[2:4]
    return _like(v), v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


@torch.library.custom_op("implicit_blocks_rwkv7::scan_backward", mutates_args=())
def _scan_backward(
    do: Tensor, dstate: Tensor | None, state: Tensor, tensors: list[Tensor], initial: Tensor | None
) -> list[Tensor]:
    """Return the gradients of the six tensors and, in float32, of the initial state."""
    from implicit_blocks_rwkv7 import triton_scan

    return triton_scan.backward(
        do.contiguous(),
        None if dstate is None else dstate.contiguous(),
        state,
        [t.contiguous() for t in tensors],
        None if initial is None else initial.contiguous(),
    )


@_scan_backward.register_fake
def _(do: Tensor, dstate: Tensor, state: Tensor, tensors: list[Tensor], initial: Tensor) -> list[Tensor]:
    return [_like(t) for t in (*tensors, state)]


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, initial, state = ctx.saved_tensors
    if do is None and dstate is None:
        return (None,) * 7
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        return _differentiable_gradients((*tensors, initial), do, dstate)
    do = torch.zeros_like(tensors[3]) if do is None else do
    *gradients, dinitial = _scan_backward(do, dstate, state, tensors, initial)
    return *gradients, None if initial is None else dinitial.to(initial.dtype)


def _differentiable_gradients(
    tensors: tuple[Tensor | None, ...], do: Tensor | None, dstate: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the same gradients by differentiable operators."""
    found = generalized_delta_rule(*tensors[:6], initial_state_BHKV=tensors[6])  # type: ignore[arg-type]  # only the state may be None
    outputs = [(o, g) for o, g in zip(found, (do, dstate), strict=True) if g is not None]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    gradients = iter(
        torch.autograd.grad(
            [o for o, _ in outputs], wanted, [g for _, g in outputs], create_graph=True, allow_unused=True
        )
    )
    return tuple(next(gradients) if t is not None and t.requires_grad else None for t in tensors)


_scan.register_autograd(_differentiate, setup_context=_keep)

DELTA_RULE = Operation(
    "generalized delta rule",
    Backend("triton", scan_triton, _refuses, module="triton", package="triton"),
    fla_scan.BACKEND,
    Backend("plain", generalized_delta_rule),
)
"""The scan, with a choice of ``generalized_delta_rule`` and kernels."""
