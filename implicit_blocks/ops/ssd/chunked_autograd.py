"""The chunked SSD algorithm in functional torch operators, differentiated by autograd.

The readable form of :mod:`implicit_blocks.ops.ssd.scan`, which computes the same with a hand-written
backward pass. Every operator here can be transformed again, so this is also the form for second
derivatives, forward mode and ``torch.func``.

Shapes: B batch, L length, H heads, P head width, G groups, R = H/G heads a group, N state width,
Q length of one chunk (i, j are positions in it, written as two Qs).
"""

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.tiles import LOWEST_LOG_DECAY, accumulation_dtype


def ssd_chunked_autograd(
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
    """Scan chunk by chunk: attention-like within a chunk, a state carried between chunks (Mamba2, section 6).

    Arguments and results are those of :func:`implicit_blocks.ops.ssd.ssd`. Time and memory are linear in L.
    """
    batch, length, heads, width = x_BLHP.shape
    d_state = B_BLGN.shape[3]
    dtype = accumulation_dtype(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN)
    if initial_state_BHPN is None:
        h = x_BLHP.new_zeros(batch, heads, width, d_state, dtype=dtype)
    else:
        h = initial_state_BHPN.to(dtype)
    x, dt, B, C = x_BLHP.to(dtype), dt_BLH.to(dtype), B_BLGN.to(dtype), C_BLGN.to(dtype)
    carried_B = initial_document_B
    outputs = []
    for start in range(0, length, chunk_size):
        chunk = slice(start, min(start + chunk_size, length))
        documents = None if documents_BL is None else documents_BL[:, chunk]
        y, h = _chunk(x[:, chunk], dt[:, chunk], A_H, B[:, chunk], C[:, chunk], h, documents, carried_B)
        carried_B = None if documents is None else documents[:, -1]
        outputs.append(y)
    y_BLHP = torch.cat(outputs, dim=1).to(x_BLHP.dtype)
    return y_BLHP, h if return_final_state else None


def _chunk(
    x_BQHP: Tensor,
    dt_BQH: Tensor,
    A_H: Tensor,
    B_BQGN: Tensor,
    C_BQGN: Tensor,
    h_BHPN: Tensor,
    documents_BQ: Tensor | None,
    carried_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of one chunk and the state after it."""
    batch, length, heads, width = x_BQHP.shape
    groups, d_state = B_BQGN.shape[2:]
    dtype = x_BQHP.dtype

    # Sums of log decays in float64: only their differences matter, and a float32 sum over a chunk with strong
    # decays loses the digits of the weak ones.
    log_decay_BQH = (dt_BQH.double() * A_H.double()).clamp_min(LOWEST_LOG_DECAY)
    s_BHQ = log_decay_BQH.cumsum(1).transpose(1, 2)
    keep_QQ = torch.ones(length, length, dtype=torch.bool, device=x_BQHP.device).tril()
    keep = keep_QQ
    from_start = to_end = None
    if documents_BQ is not None:
        keep = keep_QQ & (documents_BQ[:, None, :, None] == documents_BQ[:, None, None, :])
        to_end = (documents_BQ == documents_BQ[:, -1:])[:, None, :]
        first_B = documents_BQ[:, 0] if carried_B is None else carried_B
        from_start = (documents_BQ == first_B[:, None])[:, None, :]
    # Masked before the exponential: above the diagonal the difference is positive and may overflow, and the
    # gradient of exp would then be 0·inf.
    difference = (s_BHQ[..., :, None] - s_BHQ[..., None, :]).masked_fill(~keep, -torch.inf)
    decay_BHQQ = difference.to(dtype).exp()
    carry_in = _masked(s_BHQ, from_start).to(dtype).exp()
    carry_out = _masked(s_BHQ[..., -1:] - s_BHQ, to_end).to(dtype).exp()

    x_dt = (x_BQHP * dt_BQH[..., None]).transpose(1, 2)  # BHQP
    gram = C_BQGN.transpose(1, 2) @ B_BQGN.permute(0, 2, 3, 1)  # BGQQ: per group, not per head
    scores = decay_BHQQ * gram.repeat_interleave(heads // groups, dim=1)
    h_BGRN = h_BHPN.reshape(batch, groups, -1, d_state)
    y_carried = C_BQGN.transpose(1, 2) @ h_BGRN.transpose(2, 3)  # (B, G, Q, R·P)
    y_carried = y_carried.transpose(1, 2).reshape(batch, length, heads, width)
    y = (scores @ x_dt).transpose(1, 2) + carry_in.transpose(1, 2)[..., None] * y_carried

    weighted = (x_dt * carry_out[..., None]).reshape(batch, groups, -1, length, width).transpose(-1, -2)
    update = weighted.reshape(batch, groups, -1, length) @ B_BQGN.transpose(1, 2)
    return y, carry_in[..., -1, None, None] * h_BHPN + update.view_as(h_BHPN)


def _masked(log_decay_BHQ: Tensor, keep: Tensor | None) -> Tensor:
    """Set log decays to −∞ where the mask, if any, is False."""
    return log_decay_BHQ if keep is None else log_decay_BHQ.masked_fill(~keep, -torch.inf)
