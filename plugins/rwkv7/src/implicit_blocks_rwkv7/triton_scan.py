"""Triton kernels of the generalized delta rule: the state in registers, one token after the other.

A program of the forward kernel processes columns of the state of one head in one row; columns are
independent, so that a thread owns whole columns and ``u_t = S_{t−1}ᵀ a_t`` needs no exchange between threads.
The backward kernel goes from the last token to the first. Each state is recomputed from the next one,
``S_{t−1} = (S_t − k_t v_tᵀ − b_t u_tᵀ) / w_t``, except at the first token of a chunk, whose state is stored:
over a chunk the division increases rounding errors by at most ``e^{CHUNK / √e}``, 130, and usually much less.
The gradient of the state is kept twice, once with values and once with keys across threads, so that every sum
is over the entries of a thread.

Shapes: B batch, L tokens, H heads, K key width, V value width, N chunks. All tensors are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8  # tokens between stored states
PER_WARP = 1024  # entries of a state: 32 per thread


def forward(tensors: list[Tensor], initial: Tensor | None, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``o``, (B, L, H, V), and the final state, (B, H, K, V); or what the backward kernel needs.

    Args:
        tensors: r, log_w, k, v, a and b.
        initial: the state before the first token; None: zeros.
        keep: return ``u``, (B, L, H, V), and the states at the starts of chunks, (B, H, N, K, V).

    """
    k, v = tensors[2:4]
    (batch, length, heads, width), V = k.shape, v.shape[3]
    states = (batch, heads, triton.cdiv(length, CHUNK)) if keep else (batch, heads)
    out = torch.empty_like(v, dtype=torch.float32 if keep else v.dtype)
    S = v.new_empty(*states, width, V, dtype=torch.float32)
    columns = min(V, PER_WARP // width)
    sizes = {"K": width, "V": V, "COLUMNS": columns, "CHUNK": CHUNK}
    with torch.cuda.device_of(v):
        _forward[(batch * heads, V // columns)](
            *tensors, S if initial is None else initial, out, S, length, heads,
            INITIAL=initial is not None, KEEP=keep, **sizes, num_warps=1, num_stages=1,
        )  # fmt: skip
    return out, S


def backward(
    do: Tensor, dstate: Tensor | None, state: Tensor, tensors: list[Tensor], initial: Tensor | None
) -> list[Tensor]:
    """Return the gradients of the six tensors and of the initial state.

    Args:
        do: the gradient of ``o``.
        dstate: the gradient of the final state; None: zeros.
        state: the final state.
        tensors: r, log_w, k, v, a and b.
        initial: the state before the first token; None: zeros.

    """
    (batch, length, heads, width), V = tensors[2].shape, tensors[3].shape[3]
    kept = forward(tensors, initial, keep=True)
    gradients = [torch.empty_like(t) for t in (*tensors, state)]
    with torch.cuda.device_of(do):
        _backward[(batch * heads,)](
            *tensors, *kept, state, do, state if dstate is None else dstate, *gradients, length, heads,
            DSTATE=dstate is not None, K=width, V=V, CHUNK=CHUNK,
            num_warps=max(1, width * V // PER_WARP), num_stages=1,
        )  # fmt: skip
    return gradients


@triton.jit
def _read(r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, keys, values):
    r = tl.load(r_ptr + keys).to(tl.float32)
    w = tl.exp(tl.load(log_w_ptr + keys).to(tl.float32))
    k = tl.load(k_ptr + keys).to(tl.float32)
    v = tl.load(v_ptr + values).to(tl.float32)
    a = tl.load(a_ptr + keys).to(tl.float32)
    b = tl.load(b_ptr + keys).to(tl.float32)
    return r, w, k, v, a, b


@triton.jit(do_not_specialize=["L", "H"])
def _forward(
    r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, initial_ptr, out_ptr, states_ptr, L, H,
    INITIAL: tl.constexpr, KEEP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    scan = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, K)
    value = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    entry = key[:, None] * V + value[None, :]
    place = scan // H * L * H + scan % H  # of the first token's vectors
    chunks = (L + CHUNK - 1) // CHUNK
    if INITIAL:
        S = tl.load(initial_ptr + scan * K * V + entry).to(tl.float32)
    else:
        S = tl.zeros((K, COLUMNS), tl.float32)
    r, w, k, v, a, b = _read(r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, place * K + key, place * V + value)
    for t in range(L):
        following = place + tl.where(t + 1 < L, H, 0)  # read ahead: the loads overlap the computation
        next_r, next_w, next_k, next_v, next_a, next_b = _read(
            r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, following * K + key, following * V + value
        )
        u = tl.sum(S * a[:, None], axis=0)
        if KEEP:
            if t % CHUNK == 0:
                tl.store(states_ptr + (scan * chunks + t // CHUNK) * K * V + entry, S)
            tl.store(out_ptr + place * V + value, u)
        S = w[:, None] * S + b[:, None] * u[None, :] + k[:, None] * v[None, :]
        if not KEEP:
            o = tl.sum(S * r[:, None], axis=0)
            tl.store(out_ptr + place * V + value, o.to(out_ptr.dtype.element_ty))
        r, w, k, v, a, b = next_r, next_w, next_k, next_v, next_a, next_b
        place = following
    if not KEEP:
        tl.store(states_ptr + scan * K * V + entry, S)


@triton.jit(do_not_specialize=["L", "H"])
def _backward(
    r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, u_ptr, starts_ptr, state_ptr, do_ptr, dstate_ptr,
    dr_ptr, dlog_w_ptr, dk_ptr, dv_ptr, da_ptr, db_ptr, dinitial_ptr, L, H,
    DSTATE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    scan = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    entry_VK = key[None, :] * V + value[:, None]
    entry_KV = key[:, None] * V + value[None, :]
    chunks = (L + CHUNK - 1) // CHUNK
    S = tl.load(state_ptr + scan * K * V + entry_VK)
    if DSTATE:
        dS_VK = tl.load(dstate_ptr + scan * K * V + entry_VK).to(tl.float32)
        dS_KV = tl.load(dstate_ptr + scan * K * V + entry_KV).to(tl.float32)
    else:
        dS_VK = tl.zeros((V, K), tl.float32)
        dS_KV = tl.zeros((K, V), tl.float32)
    place = (scan // H * L + L - 1) * H + scan % H  # of the last token's vectors
    r, w, k, v, a, b = _read(r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, place * K + key, place * V + value)
    u, do = tl.load(u_ptr + place * V + value), tl.load(do_ptr + place * V + value).to(tl.float32)
    for step in range(L):
        t = L - 1 - step
        keys, values = place * K + key, place * V + value
        place -= tl.where(t > 0, H, 0)
        next_r, next_w, next_k, next_v, next_a, next_b = _read(
            r_ptr, log_w_ptr, k_ptr, v_ptr, a_ptr, b_ptr, place * K + key, place * V + value
        )
        next_u = tl.load(u_ptr + place * V + value)
        next_do = tl.load(do_ptr + place * V + value).to(tl.float32)
        dS_VK += do[:, None] * r[None, :]
        dS_KV += r[:, None] * do[None, :]
        dr = tl.sum(S * do[:, None], axis=0)
        dk = tl.sum(dS_VK * v[:, None], axis=0)
        db = tl.sum(dS_VK * u[:, None], axis=0)
        dv = tl.sum(dS_KV * k[:, None], axis=0)
        du = tl.sum(dS_KV * b[:, None], axis=0)
        if t % CHUNK == 0:
            S = tl.load(starts_ptr + (scan * chunks + t // CHUNK) * K * V + entry_VK)
        else:
            S = (S - v[:, None] * k[None, :] - u[:, None] * b[None, :]) * (1.0 / w)[None, :]
        dlog_w = w * tl.sum(dS_VK * S, axis=0)
        da = tl.sum(S * du[:, None], axis=0)
        dS_VK = dS_VK * w[None, :] + du[:, None] * a[None, :]
        dS_KV = dS_KV * w[:, None] + a[:, None] * du[None, :]
        tl.store(dr_ptr + keys, dr.to(dr_ptr.dtype.element_ty))
        tl.store(dlog_w_ptr + keys, dlog_w.to(dlog_w_ptr.dtype.element_ty))
        tl.store(dk_ptr + keys, dk.to(dk_ptr.dtype.element_ty))
        tl.store(dv_ptr + values, dv.to(dv_ptr.dtype.element_ty))
        tl.store(da_ptr + keys, da.to(da_ptr.dtype.element_ty))
        tl.store(db_ptr + keys, db.to(db_ptr.dtype.element_ty))
        r, w, k, v, a, b, u, do = next_r, next_w, next_k, next_v, next_a, next_b, next_u, next_do
    tl.store(dinitial_ptr + scan * K * V + entry_VK, dS_VK)
