"""The map of a language model: its layers and final norm, bound to one window of tokens.

Shape legend: B batch, L tokens of the window, D model width, U injection width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from implicit_blocks.cuda.map_graphs import ONE_CALL, MapGraphs, Steps
from implicit_blocks.interfaces import State, Window
from implicit_blocks.layers import RMSNorm
from implicit_blocks.models.block import Block, BlockContext, Stream
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.weight_norm import add_weight_norm

Value = TypeVar("Value", Tensor, Stream)


class Backbone(nn.Module):
    """``z → norm(layer_n(… layer_1(z, u) …, u))``; the final norm belongs to the map."""

    def __init__(self, spec: ImplicitLMSpec | ExplicitLMSpec) -> None:
        super().__init__()

        def block() -> Block:
            mlp = None if spec.mlp is None else build(spec.mlp, d_model=spec.d_model)
            mixer = build(spec.mixer, d_model=spec.d_model)
            return Block(mixer, mlp, d_model=spec.d_model, norm_eps=spec.norm_eps)

        self.layers = nn.ModuleList(block() for _ in range(spec.n_layers))
        self.norm = RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.dropout = spec.dropout
        self.activation_checkpointing: Literal["none", "steps", "layers"] = "none"
        """What backward computes again instead of keeping it: whole calls of the map, or its layers."""
        self.graphs: MapGraphs | None = None  # of the map, where they are wanted
        self.gradients_by_layer = False
        """Whether a layer's parameters have their gradients as backward leaves it, to be exchanged early."""
        if spec.weight_norm:
            add_weight_norm(self.layers)

    @property
    def divides_gradients(self) -> bool:
        """Whether layers hand their gradients on one by one; a captured map gives all of them at once."""
        return self.gradients_by_layer and (self.graphs is None or self.activation_checkpointing != "none")

    @property
    def injection_width(self) -> int:
        """Width of ``u``, the same in every layer."""
        return self.blocks()[0].mixer.injection_width

    def blocks(self) -> list[Block]:
        """Return the layers, first to last."""
        return list(self.layers)  # type: ignore[arg-type]  # all of them are Blocks

    @property
    def truncates(self) -> bool:
        """Whether every mixer can take committed tokens back."""
        return all(block.mixer.truncates for block in self.blocks())

    def initial_states(
        self, batch_size: int, *, device: torch.device, dtype: torch.dtype, max_seq_len: int | None = None
    ) -> tuple[State, ...]:
        """Return every layer's state before the first token."""
        return tuple(
            block.mixer.initial_state(batch_size, device=device, dtype=dtype, max_seq_len=max_seq_len)
            for block in self.blocks()
        )

    def supports_injection_table(self, window: Window) -> bool:
        """Whether every mixer can take the injection of this window from a table."""
        return all(block.mixer.supports_injection_table(window) for block in self.blocks())

    def bind(
        self,
        window: Window,
        *,
        u_BLU: Tensor | None,
        states: tuple[State, ...],
        start_BLD: Tensor,
        weights: WeightCache,
    ) -> BoundMap:
        """Fix what does not change while a window is iterated: weights, injection, masks, dropout, states."""
        dropout = self.dropout if self.training else 0.0
        contexts = tuple(
            BlockContext(block.mixer.prepare(window), block.dropout_masks(start_BLD, dropout))
            for block in self.blocks()
        )
        return BoundMap(self, window, u_BLU, states, contexts, weights)


@dataclass(frozen=True)
class BoundMap:
    """The map ``f(z)`` of one window: pure, to be called any number of times, and again in backward."""

    backbone: Backbone
    window: Window
    u_BLU: Tensor | None
    states: tuple[State, ...]
    contexts: tuple[BlockContext, ...]
    weights: WeightCache

    @property
    def by_row(self) -> bool:
        """Whether ``u`` is a table, (V, U), of which the window says each token's row."""
        return self.window.u_rows_BL is not None

    def __call__(self, z_BLD: Tensor) -> Tensor:
        """Return ``f(z)``, (B, L, D)."""
        return self._apply(z_BLD, ONE_CALL)

    def damped_steps(self, z_BLD: Tensor, *, count: int, damping: float) -> Tensor:
        """Return where ``count`` steps ``z ← (1 − λ) z + λ f(z)`` lead, (B, L, D); λ is the damping.

        For steps that are differentiated: they are captured as one, and their sums taken by the last norm.
        Without gradients they run eagerly.
        """
        return self._apply(z_BLD, Steps(count, damping))

    def _apply(self, z_BLD: Tensor, steps: Steps) -> Tensor:
        again = self.backbone.activation_checkpointing if torch.is_grad_enabled() else "none"
        graphs = self.backbone.graphs
        capturable = again == "none" and (torch.is_grad_enabled() or steps == ONE_CALL)
        if graphs is not None and z_BLD.is_cuda and capturable:
            return graphs.call(self, z_BLD, steps)
        if again == "none":
            return self.compute(z_BLD, steps)
        for _ in range(steps.calls):
            z_BLD = self._checkpointed(z_BLD, Steps(1, steps.damping), again)
        return z_BLD

    def compute(self, z_BLD: Tensor, steps: Steps = ONE_CALL, *, out: Tensor | None = None) -> Tensor:
        """Return ``f(z)``, or where steps lead, layer by layer; in ``out``, if given."""
        for _ in range(steps.calls):
            stream = Stream(z_BLD)
            with self.weights.activate():
                for block, state, context in zip(
                    self.backbone.blocks(), self.states, self.contexts, strict=True
                ):
                    self._prepare(block)
                    stream = block(stream, self.u_BLU, state, context)
                z_BLD = self._end(z_BLD, stream, steps, out)
        return z_BLD

    def _end(self, z_BLD: Tensor, stream: Stream, steps: Steps, out: Tensor | None = None) -> Tensor:
        """Return ``f(z)`` or the damped step, given the residual stream behind the layers."""
        more: dict[str, Any] = {} if out is None else {"out": out}
        if steps.damping != 1:
            more["damped"] = (z_BLD, steps.damping)
        return self.backbone.norm(*stream, **more)  # type: ignore[no-any-return]  # nn.Module calls are untyped

    def _checkpointed(self, z_BLD: Tensor, step: Steps, again: Literal["steps", "layers"]) -> Tensor:
        """Take a step of which backward computes again what this leaves out."""
        if again == "steps":
            return _recomputed(self.compute, z_BLD, step)
        stream = Stream(z_BLD)
        for block, state, context in zip(self.backbone.blocks(), self.states, self.contexts, strict=True):
            stream = _recomputed(self._layer, stream, block, state, context)
        return self._end(z_BLD, stream, step)

    def _layer(self, stream: Stream, block: Block, state: State, context: BlockContext) -> Stream:
        with self.weights.activate():
            self._prepare(block)
            return block(stream, self.u_BLU, state, context)  # type: ignore[no-any-return]  # as above

    def _prepare(self, block: Block) -> None:
        if self.backbone.divides_gradients and torch.is_grad_enabled():
            self.weights.sync_layer_gradients(block)

    def commit(self, z_BLD: Tensor) -> tuple[Tensor, tuple[State, ...]]:
        """Return ``f(z)`` and every layer's state after the window."""
        after, stream = [], Stream(z_BLD)
        with self.weights.activate():
            for block, state, context in zip(self.backbone.blocks(), self.states, self.contexts, strict=True):
                self._prepare(block)
                stream, state_after = block.advance(stream, self.u_BLU, state, context)
                after.append(state_after)
            return self.backbone.norm(*stream), tuple(after)

    def first(self, tokens: int) -> BoundMap:
        """Return the map of the window's first tokens, given the same states."""
        return self._cut(0, tokens, self.states)

    def after(self, z_BLD: Tensor) -> BoundMap:
        """Commit the first tokens, at ``z``, and return the map of the others."""
        taken = z_BLD.shape[1]
        _, states = self.first(taken).commit(z_BLD)
        return self._cut(taken, self.window.length, states)

    def _cut(self, first: int, stop: int, states: tuple[State, ...]) -> BoundMap:
        return self._part(self.window.cut(first, stop), states, lambda of_all: of_all[:, first:stop])

    def select_rows(self, rows: Tensor) -> BoundMap:
        """Return the map of these rows, (R,) int64 indices."""
        of_blocks = zip(self.backbone.blocks(), self.states, strict=True)
        states = tuple(block.mixer.select_rows(state, rows) for block, state in of_blocks)
        return self._part(self.window.select_rows(rows), states, lambda of_all: of_all[rows])

    def _part(self, window: Window, states: tuple[State, ...], take: Callable[[Tensor], Tensor]) -> BoundMap:
        """Return the map of a part of the window, given its states; ``take`` cuts it from (B, L, …)."""

        def context(block: Block, whole: BlockContext) -> BlockContext:
            masks: Any = None if whole.masks is None else tuple(map(take, whole.masks))
            return BlockContext(block.mixer.prepare(window), masks)

        return replace(
            self,
            window=window,
            u_BLU=self.u_BLU if self.u_BLU is None or self.by_row else take(self.u_BLU),
            states=states,
            contexts=tuple(map(context, self.backbone.blocks(), self.contexts)),
        )


def _recomputed(function: Callable[..., Value], *arguments: Any) -> Value:
    # The map is pure, its dropout drawn beforehand: there is no random state to put back.
    value: Value = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return value
