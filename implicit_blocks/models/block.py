"""The residual block of a language model: a mixer, and a multilayer perceptron where there is one.

Shape legend: B batch, L tokens of a window, D model width, U injection width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implicit_blocks.contract_checks import check_mixed, mixed_and_state
from implicit_blocks.interfaces import Mixer, State
from implicit_blocks.layers import RMSNorm


class BlockContext(NamedTuple):
    """What a block needs to know of a window: its mixer's context, this forward pass's dropout masks."""

    mixer: Any
    masks: tuple[Tensor, Tensor] | None = None


class Stream(NamedTuple):
    """The residual stream, (B, L, D), and what the last branch has yet to add to it, or None.

    The sum is left to the next layer, where a compiler fuses it with the norm that reads it.
    """

    z_BLD: Tensor
    branch_BLD: Tensor | None = None

    def joined(self) -> Tensor:
        """Return the stream with the branch added."""
        return self.z_BLD if self.branch_BLD is None else self.z_BLD + self.branch_BLD


class Block(nn.Module):
    """A pre-norm residual layer: ``z ← z + mixer(norm(z), u)``, and with an MLP ``z ← z + mlp(norm(z))``.

    Args:
        mixer: mixes (B, L, D) along the tokens, with the injection u (B, L, U).
        mlp: maps (B, L, D) token by token; None: there is none.
        d_model: D, width of the residual stream.
        norm_eps: added to the mean squares in the norms.

    """

    def __init__(self, mixer: Mixer, mlp: nn.Module | None, *, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.mlp_norm = None if mlp is None else RMSNorm(d_model, eps=norm_eps)
        self.mlp = mlp

    def forward(self, stream: Stream, u_BLU: Tensor | None, state: State, context: BlockContext) -> Stream:
        """Return the residual stream after the layer."""
        z = stream.joined()
        return self._add(z, self.mixer(self.mixer_norm(z), u_BLU, state, context.mixer), context)

    def advance(
        self, stream: Stream, u_BLU: Tensor | None, state: State, context: BlockContext
    ) -> tuple[Stream, State]:
        """Return the residual stream after the layer, and the state after the window."""
        z = stream.joined()
        advanced = self.mixer.advance(self.mixer_norm(z), u_BLU, state, context.mixer)
        mixed, after = mixed_and_state(self.mixer, advanced)
        return self._add(z, mixed, context), after

    def _add(self, z: Tensor, mixed: Tensor, context: BlockContext) -> Stream:
        check_mixed(self.mixer, mixed, z)
        first, second = context.masks or (None, None)
        mixed = mixed if first is None else mixed * first
        if self.mlp is None or self.mlp_norm is None:
            return Stream(z, mixed)
        z = z + mixed
        hidden: Tensor = self.mlp(self.mlp_norm(z))
        return Stream(z, hidden if second is None else hidden * second)

    def dropout_masks(self, z_BLD: Tensor, probability: float) -> tuple[Tensor, Tensor] | None:
        """Draw the masks of one forward pass, scaled to keep the mean; the same for all its iterations."""
        if probability == 0:
            return None

        def draw() -> Tensor:
            return torch.empty_like(z_BLD).bernoulli_(1 - probability).div_(1 - probability)

        return draw(), draw()

    def output_projections(self) -> list[nn.Module]:
        """Return the layers that write into the residual stream."""
        projections = list(self.mixer.output_projections())
        write = getattr(self.mlp, "output_projections", None)
        return projections + (list(write()) if write is not None else [])
