"""The gated delta rule, token by token: the reference for tests of the chunked form.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule_recurrence(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    g_BLH: Tensor,
    beta_BLH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ``, ``o_t = S_tᵀ q_t`` token by token.

    Gated DeltaNet's equation 10, transposed, with ``α = exp(g)``. Arguments and results are those of
    ``implicit_blocks_gated_deltanet.delta_rule.gated_delta_rule``. It calls several operators per token; use
    it in tests, not for training.
    """
    batch, length, heads, width = k_BLHK.shape
    S = v_BLHV.new_zeros(batch, heads, width, v_BLHV.shape[3])
    if initial_state_BHKV is not None:
        S = initial_state_BHKV
    identity = torch.eye(width, dtype=S.dtype, device=S.device)
    before = initial_document_B
    outputs = []
    for t in range(length):
        if documents_BL is not None:
            if before is not None:
                S = S.where((documents_BL[:, t] == before)[:, None, None, None], 0.0)
            before = documents_BL[:, t]
        k, v, q = k_BLHK[:, t, :, :, None], v_BLHV[:, t, :, None, :], q_BLHK[:, t, :, None, :]
        alpha, beta = g_BLH[:, t, :, None, None].exp(), beta_BLH[:, t, :, None, None]
        S = alpha * (identity - beta * k @ k.mT) @ S + beta * k @ v
        outputs.append((q @ S).squeeze(2))
    return torch.stack(outputs, dim=1), S
