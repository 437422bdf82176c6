"""The gated delta rule over a window of tokens, in chunks, in plain PyTorch.

With ``α = exp(g)`` and ``γ_t`` the sum of ``g`` up to token t of a chunk, the recurrence ``S_t = α_t (I −
β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ`` writes at each token the difference between the new value and the old
answer, ``u_t = β_t (v_t − α_t S_{t−1}ᵀ k_t)``, so that

    ``S_t = e^{γ_t} S_0 + Σ_{j≤t} e^{γ_t − γ_j} k_j u_jᵀ``,
    ``u_t + Σ_{j<t} β_t e^{γ_t − γ_j} (k_t · k_j) u_j = β_t v_t − β_t e^{γ_t} S_0ᵀ k_t``:

a unit lower triangular system in the chunk's ``u`` (the WY form of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", NeurIPS 2024, with decay as in "Gated Delta Networks", ICLR 2025). It is
solved for all chunks together, for the right-hand sides ``β v`` and ``β e^γ k``; only products with the
state are sequential over chunks.

Shape legend: B batch, L tokens, H heads, K key width, V value width, N chunks, Q tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from implicit_blocks.ops.backends import without_autocast


def gated_delta_rule(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    g_BLH: Tensor,
    beta_BLH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    chunk_size: int = 64,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan ``S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ``, ``o_t = S_tᵀ q_t``.

    A token with ``g = 0`` and ``β = 0`` leaves the state unchanged (padding). The initial state is not
    modified.

    Args:
        q_BLHK: queries, already scaled; any float type. L is at least 1.
        k_BLHK: keys, of norm at most 1: with larger norms the state can diverge.
        v_BLHV: values.
        g_BLH: logarithms of the decays, at most 0.
        beta_BLH: the share of the old answer to replace: in (0, 1), or (0, 2) for negative eigenvalues.
        initial_state_BHKV: the state after the tokens before the window; None is zero.
        chunk_size: tokens per chunk, computed by dense products; affects speed and memory only.
        documents_BL: document number of each token, non-decreasing along a row; the state is reset where
            it changes. None: each row is one document.
        initial_document_B: the document that the initial state belongs to; None: the first token's.

    Returns:
        ``o_BLHV`` in the type of v, and the state after the last token in float32, or in float64 if any input
        is. Decays are summed in float64 for all input types.

    Raises:
        ValueError: the shapes do not fit.

    """
    _check_shapes(q_BLHK, k_BLHK, v_BLHV, g_BLH, beta_BLH, initial_state_BHKV, chunk_size)
    tensors = (q_BLHK, k_BLHK, v_BLHV, g_BLH, beta_BLH)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    batch, length, heads, key_width = k_BLHK.shape
    chunks = -(-length // chunk_size)
    size = -(-length // chunks)
    with without_autocast(k_BLHK.device.type):
        q, k, v, g, beta = (_cut(t, chunks, size, torch.promote_types(t.dtype, wide)) for t in tensors)
        decays = _decays(g.double(), wide, documents_BL, initial_document_B, size)
        beta = beta[..., None]
        mixing = (beta * (k @ k.mT) * decays.within).tril(-1)
        known = torch.cat((beta * v, beta * decays.carry_in * k), dim=-1)
        if size > 1:  # a single token reads only the state
            identity = torch.eye(size, dtype=wide, device=k.device)
            known = torch.linalg.solve_triangular(mixing + identity, known, upper=False, unitriangular=True)
        values, keys = known.split((v.shape[-1], key_width), dim=-1)
        scores = (q @ k.mT) * decays.within
        q_in, k_out = decays.carry_in * q, decays.carry_out * k
        if initial_state_BHKV is None:
            state = v.new_zeros(batch, heads, key_width, v.shape[-1])
        else:
            state = initial_state_BHKV.to(wide)
        outputs = []
        for n in range(chunks):
            u = values[:, :, n] - keys[:, :, n] @ state
            outputs.append(q_in[:, :, n] @ state + scores[:, :, n] @ u)
            state = decays.through[:, :, n] * state + k_out[:, :, n].mT @ u
        o = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return o.transpose(1, 2).to(v_BLHV.dtype), state


class _Decays(NamedTuple):
    """Decay factors between tokens, 0 between documents; each at most 1."""

    within: Tensor  # from token j of a chunk to token i ≥ j, (B, H, N, Q, Q), 0 above the diagonal
    carry_in: Tensor  # from the state before a chunk to each token, (B, H, N, Q, 1)
    carry_out: Tensor  # from each token to the state after its chunk, (B, H, N, Q, 1)
    through: Tensor  # from the state before a chunk to the state after, (B, H, N, 1, 1)


def _decays(
    g_BHNQ: Tensor, dtype: torch.dtype, documents: Tensor | None, initial: Tensor | None, size: int
) -> _Decays:
    """Sum the log decays in float64, because only their differences matter."""
    sums = g_BHNQ.cumsum(-1)
    seen = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    within = (sums[..., :, None] - sums[..., None, :]).masked_fill(~seen, -torch.inf)
    carry_in, carry_out = sums, sums[..., -1:] - sums
    if documents is not None:
        chunks = sums.shape[2]
        filled = pad(documents[:, None].double(), (0, chunks * size - documents.shape[1]), mode="replicate")
        by_chunk = filled.view(-1, 1, chunks, size)
        last = by_chunk[..., -1:]
        first = documents[:, 0] if initial is None else initial
        before = torch.cat((first.double()[:, None, None, None], last[:, :, :-1]), dim=2)
        within = within.masked_fill(by_chunk[..., :, None] != by_chunk[..., None, :], -torch.inf)
        carry_in = carry_in.masked_fill(by_chunk != before, -torch.inf)
        carry_out = carry_out.masked_fill(by_chunk != last, -torch.inf)
    carry_in = carry_in.exp().to(dtype)[..., None]
    return _Decays(
        within.exp().to(dtype), carry_in, carry_out.exp().to(dtype)[..., None], carry_in[..., -1:, :]
    )


def _cut(t_BLH: Tensor, chunks: int, size: int, dtype: torch.dtype) -> Tensor:
    """Reshape (B, L, H, …) to (B, H, N, Q, …); zeros fill the last chunk, which do not change the state."""
    missing = chunks * size - t_BLH.shape[1]
    if missing:
        t_BLH = pad(t_BLH, (0, 0) * (t_BLH.ndim - 2) + (0, missing))
    t_BHNQ: Tensor = t_BLH.to(dtype).transpose(1, 2).unflatten(2, (chunks, size))
    return t_BHNQ


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk_size: int
) -> None:
    if k.ndim != 4 or k.shape[1] < 1 or q.shape != k.shape or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "expected q and k (B, L, H, K) with L at least 1, and v (B, L, H, V), got shapes "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if g.shape != k.shape[:3] or beta.shape != k.shape[:3]:
        raise ValueError(
            f"g and beta must have shape (B, L, H) = {tuple(k.shape[:3])}, "
            f"got {tuple(g.shape)} and {tuple(beta.shape)}"
        )
    expected = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if state is not None and state.shape != expected:
        raise ValueError(
            f"the initial state must have shape (B, H, K, V) = {expected}, got {tuple(state.shape)}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
