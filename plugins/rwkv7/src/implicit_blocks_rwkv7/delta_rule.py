"""The generalized delta rule over a window of tokens, in chunks, in plain PyTorch.

With ``γ_t`` the sum of ``log w`` up to token t of a chunk and ``u_t = S_{t−1}ᵀ a_t``, which token t reads
before it writes, the recurrence ``S_t = (diag(w_t) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ`` unrolls to

    ``S_t = e^{γ_t} ⊙ S_0 + Σ_{j≤t} e^{γ_t − γ_j} ⊙ (k_j v_jᵀ + b_j u_jᵀ)``,
    ``u_t − Σ_{j<t} (ã_t · b̄_j) u_j = S_0ᵀ ã_t + Σ_{j<t} (ã_t · k̄_j) v_j``,

with ``ã_t = e^{γ_{t−1}} ⊙ a_t``, ``b̄_j = e^{−γ_j} ⊙ b_j``, ``k̄_j = e^{−γ_j} ⊙ k_j``: a unit lower triangular
system in the chunk's ``u``. It is solved for all chunks together; only products with the state are
sequential over chunks. ``e^{−γ}`` grows along a chunk: RWKV-7 bounds its decays by ``w ≥ e^{−1/√e}``, so
that over 64 tokens it stays below 1e17, which float32 can represent.

Shape legend: B batch, L tokens, H heads, K key width, V value width, N chunks, Q tokens of a chunk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from implicit_blocks.ops.backends import without_autocast

LONGEST_CHUNK = 64

FASTEST_DECAY = math.exp(-0.5)
"""Bound of RWKV-7's decays: their logarithms are above minus this."""


def generalized_delta_rule(
    r_BLHK: Tensor,
    log_w_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    a_BLHK: Tensor,
    b_BLHK: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    chunk_size: int = 32,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan ``S_t = (diag(w_t) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ``, ``o_t = S_tᵀ r_t``.

    A token with ``log w``, ``b`` and ``k`` of 0 leaves the state unchanged (padding). The initial state is
    not modified.

    Args:
        r_BLHK: receptance, which reads the state; any float type. L is at least 1.
        log_w_BLHK: logarithms of the decays per channel, within [−1/√e, 0].
        k_BLHK: keys.
        v_BLHV: values.
        a_BLHK: direction in which the state is read for the correction; −κ̂ in RWKV-7.
        b_BLHK: direction in which the correction is written; the learning rate times κ̂ in RWKV-7.
        initial_state_BHKV: the state after the tokens before the window; None is zero.
        chunk_size: tokens per chunk, at most 64; affects speed and memory only.
        documents_BL: document number of each token, non-decreasing along a row; the state is reset where
            it changes. None: each row is one document.
        initial_document_B: the document that the initial state belongs to; None: the first token's.

    Returns:
        ``o_BLHV`` in the type of v, and the state after the last token in float32, or in float64 if any input
        is.

    Raises:
        ValueError: the shapes do not fit.

    """
    check_shapes(r_BLHK, log_w_BLHK, k_BLHK, v_BLHV, a_BLHK, b_BLHK, initial_state_BHKV)
    if not 1 <= chunk_size <= LONGEST_CHUNK:
        raise ValueError(f"chunk_size must be from 1 to {LONGEST_CHUNK}, got {chunk_size}")
    tensors = (r_BLHK, log_w_BLHK, k_BLHK, v_BLHV, a_BLHK, b_BLHK)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    batch, length, heads, width = k_BLHK.shape
    chunks = -(-length // chunk_size)
    size = -(-length // chunks)
    with without_autocast(k_BLHK.device.type):
        r, log_w, k, v, a, b = (_cut(t.to(wide), chunks, size) for t in tensors)
        sums = log_w.cumsum(3)
        grown, end = torch.exp(-sums), sums[:, :, :, -1:]
        cuts = _cuts(documents_BL, initial_document_B, chunks, size)
        a_in, r_in = a * torch.exp(sums - log_w), r * torch.exp(sums)
        k_bar, b_bar = k * grown, b * grown
        k_out, b_out = (x * torch.exp(end - sums) for x in (k, b))
        from_k, from_b = (_visible(a_in @ x.mT, cuts, -1) for x in (k_bar, b_bar))
        score_k, score_b = (_visible(r_in @ x.mT, cuts, 0) for x in (k_bar, b_bar))
        through = end.exp().mT  # (B, H, N, K, 1)
        if cuts is not None:
            a_in, r_in = (x * cuts.begins.to(wide) for x in (a_in, r_in))
            k_out, b_out = (x * cuts.ends.to(wide) for x in (k_out, b_out))
            through = through * cuts.begins[..., -1:, :].to(wide)
        known = torch.cat((from_k @ v, a_in), dim=-1)
        if size > 1:  # a single token reads only the state
            identity = torch.eye(size, dtype=wide, device=k.device)
            known = torch.linalg.solve_triangular(identity - from_b, known, upper=False, unitriangular=True)
        read, read_in = known.split((v.shape[-1], width), dim=-1)
        given, kept = score_k @ v, k_out.mT @ v
        if initial_state_BHKV is None:
            state = v.new_zeros(batch, heads, width, v.shape[-1])
        else:
            state = initial_state_BHKV.to(wide)
        outputs = []
        for n in range(chunks):
            u = read[:, :, n] + read_in[:, :, n] @ state
            outputs.append(given[:, :, n] + r_in[:, :, n] @ state + score_b[:, :, n] @ u)
            state = through[:, :, n] * state + kept[:, :, n] + b_out[:, :, n].mT @ u
        o = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return o.transpose(1, 2).to(v_BLHV.dtype), state


class _Cuts(NamedTuple):
    """Which tokens of a chunk share a document with each other, the state before, and the last token."""

    same: Tensor  # (B, 1, N, Q, Q)
    begins: Tensor  # (B, 1, N, Q, 1)
    ends: Tensor  # (B, 1, N, Q, 1)


def _cuts(documents: Tensor | None, initial: Tensor | None, chunks: int, size: int) -> _Cuts | None:
    if documents is None:
        return None
    filled = pad(documents[:, None].double(), (0, chunks * size - documents.shape[1]), mode="replicate")
    by_chunk = filled.view(-1, 1, chunks, size)
    last = by_chunk[..., -1:]
    first = documents[:, 0] if initial is None else initial
    before = torch.cat((first.double()[:, None, None, None], last[:, :, :-1]), dim=2)
    return _Cuts(
        by_chunk[..., :, None] == by_chunk[..., None, :],
        (by_chunk == before)[..., None],
        (by_chunk == last)[..., None],
    )


def _visible(products: Tensor, cuts: _Cuts | None, diagonal: int) -> Tensor:
    """Keep the products of token i with tokens j ≤ i + diagonal of its document."""
    seen = products.tril(diagonal)
    return seen if cuts is None else seen * cuts.same.to(seen.dtype)


def _cut(t_BLHK: Tensor, chunks: int, size: int) -> Tensor:
    """Reshape (B, L, H, K) to (B, H, N, Q, K); zeros fill the last chunk, which do not change the state."""
    missing = chunks * size - t_BLHK.shape[1]
    if missing:
        t_BLHK = pad(t_BLHK, (0, 0, 0, 0, 0, missing))
    t_BHNQK: Tensor = t_BLHK.transpose(1, 2).unflatten(2, (chunks, size))
    return t_BHNQK


def check_shapes(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None
) -> None:
    """Raise a ValueError if the arguments of ``generalized_delta_rule`` do not fit together."""
    if k.ndim != 4 or k.shape[1] < 1 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "expected k (B, L, H, K) with L at least 1, and v (B, L, H, V), got shapes "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    for name, tensor in (("r", r), ("log_w", log_w), ("a", a), ("b", b)):
        if tensor.shape != k.shape:
            raise ValueError(f"{name} must have the shape of k, {tuple(k.shape)}, got {tuple(tensor.shape)}")
    expected = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if state is not None and state.shape != expected:
        raise ValueError(
            f"the initial state must have shape (B, H, K, V) = {expected}, got {tuple(state.shape)}"
        )
