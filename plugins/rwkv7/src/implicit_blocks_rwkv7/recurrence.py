"""The generalized delta rule, token by token: the reference for tests of the chunked form.

Shape legend: B batch, L tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_delta_rule_recurrence(
    r_BLHK: Tensor,
    log_w_BLHK: Tensor,
    k_BLHK: Tensor,
    v_BLHV: Tensor,
    a_BLHK: Tensor,
    b_BLHK: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``S_t = (diag(w_t) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ``, ``o_t = S_tᵀ r_t`` token by token.

    RWKV-7's equation 17, transposed. Arguments and results are those of
    ``implicit_blocks_rwkv7.delta_rule.generalized_delta_rule``. It calls several operators per token; use it
    in tests, not for training.
    """
    batch, length, heads, width = k_BLHK.shape
    S = v_BLHV.new_zeros(batch, heads, width, v_BLHV.shape[3])
    if initial_state_BHKV is not None:
        S = initial_state_BHKV
    before = initial_document_B
    outputs = []
    for t in range(length):
        if documents_BL is not None:
            if before is not None:
                S = S.where((documents_BL[:, t] == before)[:, None, None, None], 0.0)
            before = documents_BL[:, t]
        w, k, a, b, r = (x[:, t, :, :, None] for x in (log_w_BLHK.exp(), k_BLHK, a_BLHK, b_BLHK, r_BLHK))
        S = (torch.diag_embed(w.squeeze(-1)) + b @ a.mT) @ S + k @ v_BLHV[:, t, :, None, :]
        outputs.append((r.mT @ S).squeeze(2))
    return torch.stack(outputs, dim=1), S
