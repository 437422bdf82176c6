"""The map of single tokens in a few kernels per layer, for models of this library's own layers on a GPU.

Third-party layers, and layers that are wrapped or replaced, run through their ordinary modules.

Shape legend: S slots, R rows of a step, each in a slot, D model width, U injection width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from implicit_blocks.decoding.slots.fused_layers import FusedAttention, FusedLayer, FusedMamba2, FusedStep
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.injections.base import Injection
from implicit_blocks.interfaces import SlotStates
from implicit_blocks.layers import Linear, SwiGLU
from implicit_blocks.mixers.attention.mixer import Attention
from implicit_blocks.mixers.attention.state import AttentionSlots
from implicit_blocks.mixers.mamba2.mixer import Mamba2
from implicit_blocks.mixers.mamba2.state import Mamba2Slots
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.stack import Block, Stack
from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import note
from implicit_blocks.ops.rotary import rotation_tables
from implicit_blocks.solvers import Picard
from implicit_blocks.weights.cache import WeightCache

if TYPE_CHECKING:
    from implicit_blocks.decoding.slots.batch import SlotBatch
    from implicit_blocks.decoding.slots.ends import SlotEnds

_LOG = logging.getLogger(__name__)


def fused_map(
    model: LanguageModel, states: Sequence[SlotStates], weights: WeightCache, *, max_seq_len: int
) -> FusedMap | None:
    """Return the map of a model in fused kernels; None, and a line in the log, if it is not supported."""
    if not _supported(model, "core", model.backbone, states):
        return None
    note("steps of decoding", "our Triton kernels")
    return FusedMap(model, states, weights, max_seq_len=max_seq_len)


def fused_stack(
    model: LanguageModel,
    name: str,
    states: Sequence[SlotStates],
    weights: WeightCache | None,
    *,
    max_seq_len: int,
) -> FusedStack | None:
    """Return the layers of the ``prelude`` or ``coda``; None if there is none, or it is not supported."""
    stack = model.prelude if name == "prelude" else model.coda
    if stack is None or weights is None or not _supported(model, name, stack, states):
        return None
    return FusedStack(stack, states, weights, max_seq_len=max_seq_len)


def _supported(model: LanguageModel, name: str, stack: Stack, states: Sequence[SlotStates]) -> bool:
    why = _obstacle(model, name, stack, states)
    if why is not None:
        _LOG.info("decoding computes the %s layer by layer, without fused kernels: %s", name, why)
    return why is None


def _obstacle(model: LanguageModel, name: str, stack: Stack, states: Sequence[SlotStates]) -> str | None:
    """Return the reason why fused kernels are not supported, or None."""
    if not available("triton"):
        return "Triton is not installed"
    mixers = [layer.mixer for layer in model.spec.stacks[name].layers]
    if any(mixer != mixer.portable() for mixer in mixers):
        return "an explicitly named backend disables fusion"
    if model.stream_dtype != torch.float32:
        return f"the residual stream is {model.stream_dtype}"
    for block, state in zip(stack.blocks(), states, strict=True):
        mlp_fits = block.mlp is None or (type(block.mlp) is SwiGLU and _plain_linears(block.mlp))
        if type(block) is not Block or not block.scales_branches or not mlp_fits:
            return f"its layers are not plain: {type(block).__name__} with {type(block.mlp).__name__}"
        mixer = block.mixer
        if type(mixer) is Mamba2 and type(state) is Mamba2Slots:
            sizes = [mixer.spec.head_dim, mixer.spec.d_state]
        elif type(mixer) is Attention and type(state) is AttentionSlots:
            if not mixer.is_plain:
                return "an option of attention (a bias, clip_qkv or value_embeddings) is not fused"
            sizes = [mixer.head_dim]
        else:
            return f"{type(mixer).__name__} has no fused kernels"
        if not _plain_linears(mixer):
            return f"a projection of {type(mixer).__name__} is not a plain Linear"
        if any(size & (size - 1) or size < 2 for size in sizes):
            return f"widths {sizes} of a head are not powers of 2"
    return None


def _plain_linears(part: nn.Module) -> bool:
    return all(isinstance(layer, Linear) for name, layer in part.named_children() if name.endswith("_proj"))


class FusedStack:
    """The layers of a stack, on one token in each slot; a committing call replaces the states in place.

    With weights in ``quantized``, a type of 8 bits, it serves at most ``FEW`` rows, in calls that do not
    commit.
    """

    injection: Injection | None = None

    def __init__(
        self,
        stack: Stack,
        states: Sequence[SlotStates],
        weights: WeightCache,
        *,
        max_seq_len: int,
        quantized: torch.dtype | None = None,
    ) -> None:
        self.norm, self.weights = stack.norm, weights
        self.layers: list[FusedLayer] = []
        tables: dict[Any, tuple[Tensor, Tensor]] = {}
        mlps = [block.mlp if quantized is None else None for block in stack.blocks()]
        both = [weights.fuse(mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else None for mlp in mlps]
        with weights.activate():
            for block, state, gate_up in zip(stack.blocks(), states, both, strict=True):
                mixer: FusedMamba2 | FusedAttention
                if isinstance(block.mixer, Mamba2):
                    assert isinstance(state, Mamba2Slots)
                    mixer = FusedMamba2(block.mixer, state, quantized=quantized)
                else:
                    assert isinstance(block.mixer, Attention)
                    assert isinstance(state, AttentionSlots)
                    rotations = _tables(block.mixer, tables, max_seq_len, state)
                    mixer = FusedAttention(block.mixer, state, rotations, quantized=quantized)
                self.layers.append(FusedLayer(block, mixer, gate_up, quantized=quantized))
        recurrent = [state for state in states if isinstance(state, Mamba2Slots)]
        self.entries = _side_by_side(recurrent) if quantized is None else None

    def core(self, z_RD: Tensor, step: FusedStep) -> Tensor:
        """Return the output of the layers, after the stack's norm."""
        from implicit_blocks.ops.kernels.decoding import add_norm

        branch = None
        for layer in self.layers:
            z_RD, branch = layer(z_RD, branch, step)
        if self.norm is None:
            return add_norm(z_RD, branch, torch.ones_like(z_RD[0]), eps=1.0, dtype=z_RD.dtype)[0]
        return add_norm(z_RD, branch, self.norm.weight, eps=self.norm.eps, dtype=z_RD.dtype)[1]

    def move_on(self, step: FusedStep) -> None:
        """Advance the layers' next entries in slots whose token has been committed."""
        if self.entries is not None:
            entries, taps = self.entries
            entries[:, step.rows_R] = (entries[:, step.rows_R] + step.committing_R) % taps


class FusedMap(FusedStack):
    """``f(z)`` of one token in each slot: the core and its injection."""

    def __init__(
        self,
        model: LanguageModel,
        states: Sequence[SlotStates],
        weights: WeightCache,
        *,
        max_seq_len: int,
        quantized: torch.dtype | None = None,
    ) -> None:
        super().__init__(model.backbone, states, weights, max_seq_len=max_seq_len, quantized=quantized)
        injection = model.injection
        self.injection = None if injection is None or injection.direct else injection

    def bind(
        self, rows_R: Tensor, ends: SlotEnds, lengths_R: Tensor, committing_R: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the map of these slots, (R, D) → (R, D); the first call commits where ``committing_R`` is.

        Further calls, as some solvers make, read the new states of committed rows, which no longer search.
        """

        def steps() -> Iterator[FusedStep]:  # what further calls read is computed where there are any
            after_R = lengths_R
            if committing_R is not None:
                yield FusedStep(rows_R, ends.u_SU, lengths_R, committing_R)
                after_R = lengths_R + committing_R
            further = FusedStep(rows_R, ends.u_SU, after_R, torch.zeros_like(rows_R, dtype=torch.bool))
            while True:
                yield further

        each = steps()

        def call(z_RD: Tensor) -> Tensor:
            step = next(each)
            value = self(z_RD, step, ends)
            if step.committing_R is committing_R:
                self.move_on(step)
            return value

        return call

    def step(self, batch: SlotBatch, rows_R: Tensor) -> None:
        """Take a whole step of slots whose search is a plain Picard iteration; see ``searches``."""
        from implicit_blocks.ops.kernels.decoding_search import take_in, take_up

        search = batch.search
        solver, rule, limits = search.solver, search.rule, search.limits
        assert isinstance(solver, Picard)
        assert rule is not None
        assert limits is not None
        z_RD, lengths, committing = take_up(search.z, batch.lengths_S, batch.busy_S, search.done, rows_R)
        ends = batch.ends
        fz_RD = self(z_RD, FusedStep(rows_R, ends.u_SU, lengths, committing), ends)
        entries, taps = self.entries or (None, 1)
        take_in(
            fz_RD,
            rows_R,
            committing,
            batch.busy_S,
            z_SD=search.z,
            best_SD=search.best,
            hidden_SD=ends.core_SC,
            residual_S=search.residual,
            scale_S=search.scale,
            iterations_S=search.iterations,
            converged_S=search.converged,
            done_S=search.done,
            lengths_S=batch.lengths_S,
            entries_YS=entries,
            taps=taps,
            damping=solver.damping,
            limits_S=limits,
            relative=rule.relative,
        )
        if not ends.plain:
            ends.pending_S[rows_R] |= committing

    @staticmethod
    def searches(search: SlotSearch) -> bool:
        """Whether ``step`` supports this search."""
        plain = type(search.solver) is Picard and not search.solver.undamped_first
        return plain and search.averages is None and search.limits is not None

    def __call__(self, z_RD: Tensor, step: FusedStep, ends: SlotEnds) -> Tensor:
        """Return ``f(z)``."""
        if self.injection is None:
            return self.core(z_RD, step)
        e_RE = None if ends.e_SE is None else ends.e_SE[step.rows_R]
        with self.weights.activate():
            entered = self.injection.enter(z_RD, e_RE)
            return self.injection.leave(self.core(entered, step), z_RD, entered, e_RE)


def _side_by_side(states: Sequence[Mamba2Slots]) -> tuple[Tensor, int] | None:
    """Join the layers' next entries in one tensor, (layers, S), to advance all of them together."""
    if not states:
        return None
    entries = torch.stack([state.next_S for state in states])
    for state, own in zip(states, entries, strict=True):
        state.next_S = own
    return entries, states[0].taps_SWC.shape[1]


def _tables(
    mixer: Attention, known: dict[Any, tuple[Tensor, Tensor]], max_seq_len: int, states: AttentionSlots
) -> tuple[Tensor, Tensor]:
    """Return the rotations of all positions, (T, P / 2) each, computed once for layers that share them."""
    key = (mixer.rope_theta, mixer.head_dim, mixer.rope_scaling)
    if key not in known:
        cos, sin = rotation_tables(
            torch.arange(max_seq_len, device=states.keys.device)[None],
            head_dim=mixer.head_dim,
            theta=mixer.rope_theta,
            dtype=torch.float32,
            scaling=mixer.rope_scaling,
        )
        known[key] = cos[0, 0].contiguous(), sin[0, 0].contiguous()
    return known[key]
