"""The SSD recurrence, token by token: the reference for the tests of all other backends.

Shapes: B batch, L length, H heads, P head width, G groups (H is a multiple of G), N state width.
"""

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.tiles import accumulation_dtype


def ssd_recurrence(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None = None,
    chunk_size: int = 64,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run ``h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_tᵀ``, ``y_t = h_t C_t`` literally (Mamba2, eq. 1).

    Arguments and results are those of :func:`implicit_blocks.ops.ssd.ssd`; ``chunk_size`` has no effect.
    Slow (several operator calls and autograd nodes per token): for tests, not for training.
    """
    del chunk_size
    batch, length, heads, width = x_BLHP.shape
    groups, d_state = B_BLGN.shape[2:]
    dtype = accumulation_dtype(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN)
    x, dt, A = x_BLHP.to(dtype), dt_BLH.to(dtype), A_H.to(dtype)
    B_BLHN = B_BLGN.to(dtype).repeat_interleave(heads // groups, dim=2)
    C_BLHN = C_BLGN.to(dtype).repeat_interleave(heads // groups, dim=2)
    if initial_state_BHPN is None:
        h = x.new_zeros(batch, heads, width, d_state)
    else:
        h = initial_state_BHPN.to(dtype)

    previous_document_B = initial_document_B
    outputs = []
    for t in range(length):
        if documents_BL is not None:
            if previous_document_B is not None:
                same_B = documents_BL[:, t] == previous_document_B
                h = torch.where(same_B[:, None, None, None], h, 0.0)
            previous_document_B = documents_BL[:, t]
        decay_BH = torch.exp(A * dt[:, t])
        update_BHPN = (dt[:, t, :, None] * x[:, t])[..., None] * B_BLHN[:, t, :, None, :]
        h = decay_BH[..., None, None] * h + update_BHPN
        outputs.append((h * C_BLHN[:, t, :, None, :]).sum(-1))
    y_BLHP = torch.stack(outputs, dim=1).to(x_BLHP.dtype)
    return y_BLHP, h if return_final_state else None
