"""Context parallelism: ranks that solve the parts of one sequence at the same time.

Every rank has a run of the tokens, all of one length, and everything that processes single tokens is local.
In each call of a mixer the ranks exchange what later tokens see: attention gathers keys and values (as in the
training of Llama 3, 2024); Mamba2 passes the last inputs of its convolution to the next rank, and combines
the ranks' states of the scan, which is linear in its state.

Torch's ring attention (``torch.distributed.tensor.experimental.context_parallel``) replaces SDPA's CUDA
kernels alone, has no CPU version, and knows neither the convolution nor the scan.

Shape legend: B batch, L tokens of this rank, T tokens up to its last one, K key and value heads, H heads, G
groups of heads, P head width, N state width, C convolved channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from implicit_blocks.layers import at_least_float32
from implicit_blocks.ops.backends import without_autocast
from implicit_blocks.parallel.collectives import gathered

if TYPE_CHECKING:
    from implicit_blocks.search.agreement import Agreement
    from implicit_blocks.windows import Window


@dataclass(frozen=True)
class SequencePart:
    """The part of the sequences of a batch that a rank has.

    All ranks of ``group`` must make the same calls of the map and of its backward pass. ``agree`` is the
    agreement of their searches: they measure whole rows.
    """

    group: dist.ProcessGroup
    agree: Agreement

    @property
    def index(self) -> int:
        """The number of this part, from 0."""
        return self.group.rank()

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.group.size()

    def check(self, window: Window, *, taps: int = 1) -> None:
        """Raise ValueError for windows that parts do not support.

        ``taps`` are those of a convolution, whose earlier inputs come from one other rank.
        """
        if window.valid_BT is not None:
            raise ValueError(
                "the sequences have padding (attention_mask), which ranks that divide sequences do not "
                "support; pack the sequences, or set training.distributed.context=1"
            )
        if window.length < taps - 1:
            raise ValueError(
                f"a part of {window.length} tokens is shorter than the {taps - 1} inputs that a convolution "
                "reads of the part before it; use longer sequences or a smaller training.distributed.context"
            )

    def up_to_here(self, k_BKLP: Tensor, v_BKLP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens up to this rank's last one, (B, K, T, P)."""
        # Every rank's gather has a gradient, so that backward passes meet.
        every = gathered(torch.stack((k_BKLP, v_BKLP)), self.group)[: self.index + 1]
        keys, values = every.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return keys, values

    def tail_before(self, x_BLC: Tensor, count: int) -> Tensor:
        """Return the last ``count`` inputs of the part before this one, zeros before the first."""
        tails = gathered(x_BLC[:, x_BLC.shape[1] - count :], self.group)
        return tails[max(0, self.index - 1) : self.index].sum(0)


def state_before(
    part: SequencePart,
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    *,
    A_H: Tensor,
    B_BLGN: Tensor,
    documents_BL: Tensor | None = None,
    initial_document_B: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Return the state of Mamba2's scan before this rank's tokens, (B, H, P, N), in float32 or better.

    Each rank computes the state after its tokens from a zero state, and the decay of a state over them; the
    state before a part is ``h_r = Σ_{s<r} (Π_{s<t<r} decay_t) state_s``. Arguments are those of
    ``implicit_blocks.ops.ssd.ssd``; others than these do not change the state.
    """
    with without_autocast(x_BLHP.device.type):
        log_decay_BLH = (A_H * dt_BLH).cumsum(1)
        total_BH = log_decay_BLH[:, -1]
        weight_BLH = torch.exp(total_BH[:, None] - log_decay_BLH) * dt_BLH
        decay_BH = total_BH.exp()
        if documents_BL is not None:
            last_B = documents_BL[:, -1]
            weight_BLH = weight_BLH.where((documents_BL == last_B[:, None])[:, :, None], 0.0)
            if initial_document_B is not None:
                decay_BH = decay_BH.where((initial_document_B == last_B)[:, None], 0.0)
        groups = B_BLGN.shape[2]
        weighted = (at_least_float32(x_BLHP) * weight_BLH[..., None]).unflatten(2, (groups, -1))
        state = torch.einsum("blgkp,blgn->bgkpn", weighted, at_least_float32(B_BLGN)).flatten(1, 2)
        # One message, of which every rank uses a slice: backward passes meet also where it is empty.
        every = gathered(torch.cat((state.flatten(2), decay_BH[..., None]), dim=2), part.group)
        before = every[:0, ..., :-1].sum(0)
        for earlier in every[: part.index].unbind():
            before = before * earlier[..., -1:] + earlier[..., :-1]
    return before.view_as(state)
