"""The map of a language model: residual blocks and a final norm, bound to one window of tokens.

Shape legend: B batch, L tokens of the window, D model width, U injection width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from implicit_blocks.contract_checks import check_mixed, mixed_and_state
from implicit_blocks.interfaces import Mixer, State, Window
from implicit_blocks.layers import RMSNorm
from implicit_blocks.registry import build
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.weight_norm import add_weight_norm


class BlockContext(NamedTuple):
    """A block's data for one window: the context of its mixer, and the dropout masks of this forward pass."""

    mixer: Any
    masks: tuple[Tensor, Tensor] | None = None


class Stream(NamedTuple):
    """The residual stream, (B, L, D), and the output of the last branch that is not added yet, or None.

    The next layer adds it, where a compiler fuses the sum with the norm that reads it.
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
        mlp: maps (B, L, D) token by token; None: no MLP.
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

    def output_projections(self) -> list[nn.Module]:
        """Return the layers that write into the residual stream."""
        projections = list(self.mixer.output_projections())
        write = getattr(self.mlp, "output_projections", None)
        return projections + (list(write()) if write is not None else [])


Value = TypeVar("Value", Tensor, Stream)


class Steps(NamedTuple):
    """Consecutive calls of a map: ``calls`` times ``z ← (1 − λ) z + λ f(z)``, where λ is the damping."""

    calls: int = 1
    damping: float = 1.0


ONE_CALL = Steps()


class MapCapture(Protocol):
    """Captured CUDA graphs of a map; ``implicit_blocks.models.map_graphs.MapGraphs`` is one."""

    def call(self, f: BoundMap, z_BLD: Tensor, steps: Steps = ...) -> Tensor:
        """Return the point after ``steps``, (B, L, D)."""


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
        """The unit whose activations backward recomputes: whole calls of the map, or its layers."""
        self.graphs: MapCapture | None = None
        """The captured graphs of the map, if enabled."""
        self.gradients_by_layer = False
        """Whether a layer's parameter gradients are complete when backward leaves it, for early exchange."""
        if spec.weight_norm:
            add_weight_norm(self.layers)

    @property
    def divides_gradients(self) -> bool:
        """Whether layers deliver their gradients one by one; a captured map delivers all of them together."""
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
        """Whether every mixer can remove committed tokens (``Mixer.truncate``)."""
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
        """Whether every mixer can read the injection of this window from a table."""
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
        """Return the map of a window, which has one set of weights, masks and dropout in all its calls."""
        dropout = self.dropout if self.training else 0.0
        contexts = tuple(
            BlockContext(
                block.mixer.prepare(window), dropout_masks(start_BLD, dropout) if dropout > 0 else None
            )
            for block in self.blocks()
        )
        return BoundMap(self, window, u_BLU, states, contexts, weights)


@dataclass(frozen=True)
class BoundMap:
    """The map ``f(z)`` of one window: pure, and called any number of times, also during backward."""

    backbone: Backbone
    window: Window
    u_BLU: Tensor | None
    states: tuple[State, ...]
    contexts: tuple[BlockContext, ...]
    weights: WeightCache

    @property
    def by_row(self) -> bool:
        """Whether ``u`` is a table, (V, U), indexed by ``window.u_rows_BL``."""
        return self.window.u_rows_BL is not None

    def __call__(self, z_BLD: Tensor) -> Tensor:
        """Return ``f(z)``, (B, L, D)."""
        return self._apply(z_BLD, ONE_CALL)

    def damped_steps(self, z_BLD: Tensor, *, count: int, damping: float) -> Tensor:
        """Return the point after ``count`` steps ``z ← (1 − λ) z + λ f(z)``, (B, L, D); λ is the damping.

        For differentiated steps: all steps are captured as one graph, and the last norm computes their sums.
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
        """Return ``f(z)``, or the point after ``steps``, layer by layer; written to ``out``, if given."""
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
        """Return ``f(z)`` or the damped step, given the residual stream after the layers."""
        more: dict[str, Any] = {} if out is None else {"out": out}
        if steps.damping != 1:
            more["damped"] = (z_BLD, steps.damping)
        return self.backbone.norm(*stream, **more)  # type: ignore[no-any-return]  # nn.Module calls are untyped

    def _checkpointed(self, z_BLD: Tensor, step: Steps, again: Literal["steps", "layers"]) -> Tensor:
        """Take one step whose activations backward recomputes."""
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


def dropout_masks(z_BLD: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Draw a block's masks for one forward pass, scaled to keep the mean; all its iterations share them."""

    def draw() -> Tensor:
        return torch.empty_like(z_BLD).bernoulli_(1 - probability).div_(1 - probability)

    return draw(), draw()


def _recomputed(function: Callable[..., Value], *arguments: Any) -> Value:
    # The map is pure and its dropout masks are drawn beforehand: there is no random state to restore.
    value: Value = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return value
