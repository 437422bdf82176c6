"""Layers, stacks of layers, and the pure map that a stack is bound to in one window of tokens.

Shape legend: B batch, L tokens of the window, D width of the stack, U width of the mixers' projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from implicit_blocks._utils.describe import described
from implicit_blocks.injections.base import Injection
from implicit_blocks.interfaces import Mixer, State
from implicit_blocks.layers import RMSNorm, add_weight_norm
from implicit_blocks.models.map_steps import ONE_CALL, MapCapture, Steps
from implicit_blocks.models.specs import NormPlacement
from implicit_blocks.models.specs import Stack as StackLayout
from implicit_blocks.registry import build
from implicit_blocks.registry.contracts import require
from implicit_blocks.scalings.scaling import BranchFactor
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.quantized import QuantizedWeights
from implicit_blocks.windows import Window

Masks = tuple[Tensor, Tensor]
"""The dropout masks of a layer in one forward pass: of its mixer and of its MLP."""


class BlockContext(NamedTuple):
    """A block's data for one window: the context of its mixer, and the dropout masks of this forward pass."""

    mixer: Any
    masks: Masks | None = None


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
    """A residual layer: ``z ← z + mixer(norm(z), u)``, and with an MLP ``z ← z + mlp(norm(z))``.

    Args:
        mixer: mixes (B, L, D) along the tokens, with the injection u (B, L, U).
        mlp: maps (B, L, D) token by token; None: no MLP.
        d_model: D, width of the residual stream.
        norm_eps: added to the mean squares in the norms.
        norm_placement: where the norms are (``implicit_blocks.models.specs.NormPlacement``).
        scalings: modules that add a branch to the stream, of the mixer and of the MLP; None: a plain sum.

    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: nn.Module | None,
        *,
        d_model: int,
        norm_eps: float,
        norm_placement: NormPlacement = "pre",
        scalings: tuple[nn.Module | None, nn.Module | None] = (None, None),
    ) -> None:
        super().__init__()
        self.norm_placement: NormPlacement = norm_placement

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(d_model, eps=norm_eps) if wanted else None

        before, after = norm_placement != "post", norm_placement != "pre"
        self.mixer_norm = norm(before)
        self.mixer = mixer
        self.mlp_norm = norm(before and mlp is not None)
        self.mlp = mlp
        self.mixer_post_norm = norm(after)
        self.mlp_post_norm = norm(after and mlp is not None)
        self.mixer_scaling, self.mlp_scaling = scalings

    @property
    def scales_branches(self) -> bool:
        """Whether the layer has pre-norms and adds its branches to the stream, with a factor or without."""
        used = [one for one in (self.mixer_scaling, self.mlp_scaling) if one is not None]
        return self.norm_placement == "pre" and all(type(one).forward is BranchFactor.forward for one in used)

    def forward(self, stream: Stream, u_BLU: Tensor | None, state: State, context: BlockContext) -> Stream:
        """Return the residual stream after the layer."""
        z = stream.joined()
        return self._add(z, self.mixer(_normed(self.mixer_norm, z), u_BLU, state, context.mixer), context)

    def advance(
        self, stream: Stream, u_BLU: Tensor | None, state: State, context: BlockContext, *prefix: Any
    ) -> tuple[Stream, State]:
        """Return the stream after the layer, and the state after the window or its ``prefix`` of each row."""
        z = stream.joined()
        advance = self.mixer.advance_prefix if prefix else self.mixer.advance
        made = advance(_normed(self.mixer_norm, z), u_BLU, state, context.mixer, *prefix)
        mixed, after = mixed_and_state(self.mixer, made)
        return self._add(z, mixed, context), after

    def _add(self, z: Tensor, mixed: Tensor, context: BlockContext) -> Stream:
        _check_mixed(self.mixer, mixed, z)
        first, second = context.masks or (None, None)
        stream = self._sum(z, mixed, first, self.mixer_post_norm, self.mixer_scaling)
        if self.mlp is None:
            return stream
        z = stream.joined()
        hidden: Tensor = self.mlp(_normed(self.mlp_norm, z))
        return self._sum(z, hidden, second, self.mlp_post_norm, self.mlp_scaling)

    def _sum(
        self,
        z: Tensor,
        branch: Tensor,
        mask: Tensor | None,
        post_norm: nn.Module | None,
        scaling: nn.Module | None,
    ) -> Stream:
        branch = branch if mask is None else branch * mask
        if self.norm_placement == "sandwich":
            branch = _normed(post_norm, branch)
        stream = Stream(z, branch) if scaling is None else Stream(scaling(z, branch))
        if self.norm_placement in ("post", "pre_post"):
            return Stream(_normed(post_norm, stream.joined()))
        return stream

    def output_projections(self) -> list[nn.Module]:
        """Return the layers that write into the residual stream."""
        projections = list(self.mixer.output_projections())
        write = getattr(self.mlp, "output_projections", None)
        return projections + (list(write()) if write is not None else [])


def _normed(norm: nn.Module | None, z: Tensor) -> Tensor:
    normed: Tensor = z if norm is None else norm(z)
    return normed


def dropout_masks(z_BLD: Tensor, probability: float) -> Masks:
    """Draw a block's masks for one forward pass, scaled to keep the mean; all its iterations share them."""

    def draw() -> Tensor:
        return torch.empty_like(z_BLD).bernoulli_(1 - probability).div_(1 - probability)

    return draw(), draw()


Value = TypeVar("Value", Tensor, Stream)


class Stack(nn.Module):
    """``z → norm(layer_n(… layer_1(z, u) …, u))``; without a norm the last layer's stream.

    Args:
        layout: width, layers, placement of norms and scaling of branches.
        norm: whether the stack ends with a norm.
        norm_eps: added to the mean square in every norm.
        dropout: fraction of each branch that is dropped in training.
        weight_norm: whether the layers' weights have weight norm.

    """

    def __init__(
        self, layout: StackLayout, *, norm: bool, norm_eps: float, dropout: float, weight_norm: bool
    ) -> None:
        super().__init__()
        width, count = layout.d_model, len(layout.layers)

        def scaling() -> nn.Module | None:
            spec = layout.residual_scaling
            if spec.plain:
                return None
            made: nn.Module = build(spec, d_model=width, n_layers=count)
            return made

        def block(number: int) -> Block:
            layer = layout.layers[number]
            mlp = None if layer.mlp is None else build(layer.mlp, d_model=width)
            mixer = build(layer.mixer, d_model=width)
            return Block(
                mixer,
                mlp,
                d_model=width,
                norm_eps=norm_eps,
                norm_placement=layout.norm_placement,
                scalings=(scaling(), None if mlp is None else scaling()),
            )

        self.width = width
        self.layers = nn.ModuleList(block(number) for number in range(count))
        self.norm = RMSNorm(width, eps=norm_eps) if norm else None
        self.dropout = dropout
        self.activation_checkpointing: Literal["none", "steps", "layers"] = "none"
        """The unit whose activations backward recomputes: whole calls of the map, or its layers."""
        self.graphs: MapCapture | None = None
        """The captured graphs of the map, if enabled."""
        self.quantized: QuantizedWeights | None = None
        """The weights of the first calls of a search in training, if these are in 8-bit floats."""
        self.gradients_by_layer = False
        """Whether a layer's parameter gradients are complete when backward leaves it, for early exchange."""
        if weight_norm:
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
    def needs_token_ids(self) -> bool:
        """Whether a mixer reads the token IDs of a window."""
        return any(block.mixer.needs_token_ids for block in self.blocks())

    def contexts(self, window: Window, masks: Sequence[Masks | None]) -> tuple[BlockContext, ...]:
        """Return the layers' data for a window, given their dropout masks."""
        of_blocks = zip(self.blocks(), masks, strict=True)
        return tuple(BlockContext(block.mixer.prepare(window), both) for block, both in of_blocks)

    def bind(
        self,
        window: Window,
        *,
        states: tuple[State, ...],
        start_BLD: Tensor,
        weights: WeightCache,
        u_BLU: Tensor | None = None,
        injection: Injection | None = None,
        e_BLD: Tensor | None = None,
    ) -> BoundMap:
        """Return the map of a window, which has one set of weights, masks and dropout in all its calls.

        ``u_BLU`` is added to the mixers' input projections; ``injection``, given ``e``, computes what enters
        and what leaves the stack. ``start_BLD`` gives the shape of the dropout masks.
        """
        dropout = self.dropout if self.training else 0.0
        masks = [dropout_masks(start_BLD, dropout) if dropout > 0 else None for _ in self.layers]
        contexts = self.contexts(window, masks)
        low = self.quantized is not None and self.training
        return BoundMap(self, window, u_BLU, states, contexts, weights, injection, e_BLD, low)


@dataclass(frozen=True)
class BoundMap:
    """The map ``f(z)`` of one window: pure, and called any number of times, also during backward.

    ``f(z) = leave(layers(enter(z, e), u), z, e)``, where an injection computes ``enter`` and ``leave``.
    """

    stack: Stack
    window: Window
    u_BLU: Tensor | None
    states: tuple[State, ...]
    contexts: tuple[BlockContext, ...]
    weights: WeightCache
    injection: Injection | None = None
    e_BLD: Tensor | None = None
    begins_low: bool = False

    @property
    def direct(self) -> bool:
        """Whether the map is the stack itself."""
        return self.injection is None or self.injection.direct

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the map calls."""
        return [self.stack] if self.injection is None or self.direct else [self.stack, self.injection]

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

    def low_precision(self) -> BoundMap | None:
        """Return the map with weights in 8-bit floats, for the first calls of a search in training."""
        quantized = self.stack.quantized
        weights = None if quantized is None else quantized.of(self.weights)
        return None if weights is None else replace(self, weights=weights, begins_low=False)

    def _apply(self, z_BLD: Tensor, steps: Steps) -> Tensor:
        again = self.stack.activation_checkpointing if torch.is_grad_enabled() else "none"
        graphs = self.stack.graphs
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
            with self.weights.activate():
                stream = self._enter(z_BLD)
                entered_BLD = stream.z_BLD
                layers = zip(self.stack.blocks(), self.states, self.contexts, strict=True)
                for block, state, context in layers:
                    self._prepare(block)
                    stream = block(stream, self.u_BLU, state, context)
                z_BLD = self._end(z_BLD, entered_BLD, stream, steps, out)
        return z_BLD

    def _enter(self, z_BLD: Tensor) -> Stream:
        """Return the stream before the layers."""
        if self.injection is None or self.direct:
            return Stream(z_BLD)
        return Stream(self.injection.enter(z_BLD, self.e_BLD))

    def _end(
        self,
        z_BLD: Tensor,
        entered_BLD: Tensor,
        stream: Stream,
        steps: Steps,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``f(z)`` or the damped step, given the stream before and after the layers."""
        norm = self.stack.norm
        if norm is not None and self.direct:
            more: dict[str, Any] = {} if out is None else {"out": out}
            if steps.damping != 1:
                more["damped"] = (z_BLD, steps.damping)
            return norm(*stream, **more)  # type: ignore[no-any-return]  # nn.Module calls are untyped
        value: Tensor = stream.joined() if norm is None else norm(*stream)
        if self.injection is not None and not self.direct:
            value = self.injection.leave(value, z_BLD, entered_BLD, self.e_BLD)
        if steps.damping != 1:
            value = torch.lerp(z_BLD, value, steps.damping)
        return value if out is None else out.copy_(value)

    def _checkpointed(self, z_BLD: Tensor, step: Steps, again: Literal["steps", "layers"]) -> Tensor:
        """Take one step whose activations backward recomputes."""
        if again == "steps":
            return _recomputed(self.compute, z_BLD, step)
        with self.weights.activate():
            stream = self._enter(z_BLD)
        entered_BLD = stream.z_BLD
        for block, state, context in zip(self.stack.blocks(), self.states, self.contexts, strict=True):
            stream = _recomputed(self._layer, stream, block, state, context)
        return self._end(z_BLD, entered_BLD, stream, step)

    def _layer(self, stream: Stream, block: Block, state: State, context: BlockContext) -> Stream:
        with self.weights.activate():
            self._prepare(block)
            return block(stream, self.u_BLU, state, context)  # type: ignore[no-any-return]  # as above

    def _prepare(self, block: Block) -> None:
        if self.stack.divides_gradients and torch.is_grad_enabled():
            self.weights.sync_layer_gradients(block)

    def commit(self, z_BLD: Tensor, prefix: Window | None = None) -> tuple[Tensor, tuple[State, ...]]:
        """Return ``f(z)`` and every layer's state after the window.

        ``prefix`` is the same window in which all but the first tokens of each row are padding; the states
        are then those after these tokens (``Mixer.advance_prefix``).
        """
        after: list[State] = []
        with self.weights.activate():
            stream = self._enter(z_BLD)
            entered_BLD = stream.z_BLD
            for block, state, context in zip(self.stack.blocks(), self.states, self.contexts, strict=True):
                self._prepare(block)
                first = () if prefix is None else (block.mixer.prepare(prefix),)
                stream, state_after = block.advance(stream, self.u_BLU, state, context, *first)
                after.append(state_after)
            return self._end(z_BLD, entered_BLD, stream, ONE_CALL), tuple(after)

    def without_padding(self) -> BoundMap:
        """Return a map with the same values at real tokens, in a window whose padding only follows them.

        Causal mixers then need no mask, and the map can be captured.
        """
        window = self.window
        positions = torch.arange(window.length, device=window.device)[None]
        window = replace(window, valid_BT=None, positions_BL=positions, trailing=False, shared={})
        of_blocks = zip(self.stack.blocks(), self.contexts, strict=True)
        contexts = tuple(BlockContext(block.mixer.prepare(window), old.masks) for block, old in of_blocks)
        return replace(self, window=window, contexts=contexts)

    def with_states(self, states: tuple[State, ...]) -> BoundMap:
        """Return the map of the same window after other states of the layers."""
        return replace(self, states=states)

    def first(self, tokens: int) -> BoundMap:
        """Return the map of the window's first tokens, given the same states."""
        return self._cut(0, tokens, self.states)

    def after(self, z_BLD: Tensor) -> BoundMap:
        """Commit the first tokens, at ``z``, and return the map of the others."""
        taken = z_BLD.shape[1]
        _, states = self.first(taken).commit(z_BLD)
        return self._cut(taken, self.window.length, states)

    def _cut(self, first: int, stop: int, states: tuple[State, ...]) -> BoundMap:
        part, masks = self._of_part((slice(None), slice(first, stop)))
        window = self.window.cut(first, stop)
        return replace(part, window=window, states=states, contexts=self.stack.contexts(window, masks))

    def select_rows(self, rows: Tensor) -> BoundMap:
        """Return the map of these rows, (R,) int64 indices."""
        part, masks = self._of_part(rows)
        of_blocks = zip(self.stack.blocks(), self.states, strict=True)
        states = tuple(block.mixer.select_rows(state, rows) for block, state in of_blocks)
        window = self.window.select_rows(rows)
        return replace(part, window=window, states=states, contexts=self.stack.contexts(window, masks))

    def _of_part(self, index: Any) -> tuple[BoundMap, list[Masks | None]]:
        """Return the map with ``u`` and ``e`` at an index in (B, L, …), and the dropout masks there."""
        u, e = self.u_BLU, self.e_BLD
        part = replace(
            self, u_BLU=u if u is None or self.by_row else u[index], e_BLD=None if e is None else e[index]
        )
        masks = [context.masks for context in self.contexts]
        return part, [None if both is None else (both[0][index], both[1][index]) for both in masks]


def _recomputed(function: Callable[..., Value], *arguments: Any) -> Value:
    # The map is pure and its dropout masks are drawn beforehand: there is no random state to restore.
    value: Value = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return value


def mixed_and_state(mixer: Mixer, returned: Any) -> tuple[Any, Any]:
    """Return the mixed window and the state that ``advance`` returned.

    Raises:
        ContractError: it did not return a tuple of two.

    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        require(
            False,
            mixer,
            "mixes a window",
            f"advance returned {described(returned)}; return a tuple of the mixed window and the state "
            "after it",
        )
    return returned[0], returned[1]


def _check_mixed(mixer: Mixer, mixed: Any, z_BLD: Tensor) -> None:
    """Check that a mixer returns a floating-point tensor of the window's shape, (B, L, D).

    Raises:
        ContractError: it does not.

    """
    if not isinstance(mixed, Tensor) or mixed.shape != z_BLD.shape or not mixed.is_floating_point():
        require(
            False,
            mixer,
            "mixes a window",
            f"it returned {described(mixed)} for {described(z_BLD)}; return the window's shape and a "
            "floating-point type (and from advance a tuple of that and the state after the window)",
        )
