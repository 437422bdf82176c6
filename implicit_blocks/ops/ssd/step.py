"""One step of the SSD recurrence: windows of a single token, as in decoding.

Shapes: B batch, H heads, P head width, G groups, N state width.
"""

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.recurrence import accumulation_dtype


def ssd_step(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    *,
    initial_state_BHPN: Tensor | None = None,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scan a window of length 1 in a handful of operators, where nothing is left to chunk.

    Arguments and results are those of :func:`implicit_blocks.ops.ssd.ssd`, L = 1.
    """
    batch, _, heads, width = x_BLHP.shape
    groups, d_state = B_BLGN.shape[2:]
    dtype = accumulation_dtype(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN)
    # Groups beside the batch, the heads of a group and their width folded: (B·G, R·P, ·).
    dt_BH1 = dt_BLH.to(dtype).view(batch, heads, 1)
    x_dt = (x_BLHP.to(dtype).reshape(batch, heads, width) * dt_BH1).view(batch * groups, -1, 1)
    B_b1N = B_BLGN.to(dtype).reshape(batch * groups, 1, d_state)
    C_bN1 = C_BLGN.to(dtype).reshape(batch * groups, d_state, 1)
    if initial_state_BHPN is None:
        before = x_dt.new_zeros(batch, heads, width, d_state)
    else:
        before = initial_state_BHPN.to(dtype)
    if documents_BL is not None and initial_document_B is not None:
        same_B = documents_BL[:, 0] == initial_document_B
        before = torch.where(same_B[:, None, None, None], before, 0.0)
    decay_BH11 = torch.exp(dt_BH1 * A_H.to(dtype)[:, None])[..., None]
    h_bFN = (before * decay_BH11).reshape(x_dt.shape[0], -1, d_state) + x_dt * B_b1N
    y_BLHP = torch.bmm(h_bFN, C_bN1).view(x_BLHP.shape).to(x_BLHP.dtype)
    return y_BLHP, h_bFN.view(batch, heads, width, d_state) if return_final_state else None
