"""The map of single tokens in a few kernels a layer, for models of this library's own layers on a GPU.

Layers of other makes, and layers that something has been hung on, are computed as everywhere else.

Shape legend: S lanes, R rows of a step, each in a lane, D model width, U injection width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from implicit_blocks.decoding.lane_search import LaneSearch
from implicit_blocks.driver import RELATIVE_FLOOR
from implicit_blocks.held_weights import HeldWeights
from implicit_blocks.lanes import LaneStates
from implicit_blocks.layers import Block, Linear, RMSNorm, SwiGLU
from implicit_blocks.mixers.attention import Attention
from implicit_blocks.mixers.attention_lanes import AttentionLanes
from implicit_blocks.mixers.mamba2 import Mamba2
from implicit_blocks.mixers.mamba2_lanes import Mamba2Lanes
from implicit_blocks.model import LanguageModel
from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import note
from implicit_blocks.ops.rotary import rotation_tables
from implicit_blocks.solvers import Picard

if TYPE_CHECKING:
    from implicit_blocks.ops.kernels.decoding import Branch

_LOG = logging.getLogger(__name__)

FEW = 2  # rows up to which a product row by row beats the matrix units' kernels


class Lanes(Protocol):
    """What a whole step works on; ``LaneBatch`` is it."""

    search: LaneSearch
    lengths_S: Tensor
    busy_S: Tensor
    hidden_SD: Tensor
    u_SU: Tensor | None


@dataclass(frozen=True)
class _Step:
    """What a call of the map knows besides ``z``."""

    rows_R: Tensor
    u_SU: Tensor | None
    lengths_R: Tensor
    committing_R: Tensor


@dataclass(frozen=True)
class _Matrix:
    """A held linear map."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def fused_map(
    model: LanguageModel, states: Sequence[LaneStates], weights: HeldWeights, *, capacity: int
) -> FusedMap | None:
    """Return the map of this model in fused kernels; None, and a line in the log, where that can't be."""
    why = _obstacle(model, states)
    if why is not None:
        _LOG.info("decoding computes layer by layer, without fused kernels: %s", why)
        return None
    note("steps of decoding", "our Triton kernels")
    return FusedMap(model, states, weights, capacity=capacity)


def _obstacle(model: LanguageModel, states: Sequence[LaneStates]) -> str | None:
    """Return what stands in the way of fused kernels, or None."""
    if not available("triton"):
        return "Triton is not installed"
    if model.spec.mixer != model.spec.mixer.portable():
        return "the spec names a backend, which is taken at its word"
    if model.stream_dtype != torch.float32:
        return f"the residual stream is {model.stream_dtype}"
    for block, state in zip(model.backbone.blocks(), states, strict=True):
        for part in block.modules():
            if part._forward_hooks or part._forward_pre_hooks:
                return f"a hook hangs on a {type(part).__name__}"
        mlp_fits = block.mlp is None or (type(block.mlp) is SwiGLU and _plain_linears(block.mlp))
        if type(block) is not Block or not mlp_fits:
            return f"its layers are not plain: {type(block).__name__} with {type(block.mlp).__name__}"
        mixer = block.mixer
        if type(mixer) is Mamba2 and type(state) is Mamba2Lanes:
            sizes = [mixer.spec.head_dim, mixer.spec.d_state]
        elif type(mixer) is Attention and type(state) is AttentionLanes:
            sizes = [mixer.head_dim]
        else:
            return f"it mixes by {type(mixer).__name__}"
        if not _plain_linears(mixer):
            return f"a projection of {type(mixer).__name__} is not a plain Linear"
        if any(size & (size - 1) or size < 2 for size in sizes):
            return f"widths {sizes} of a head are not powers of 2"
    return None


def _plain_linears(part: nn.Module) -> bool:
    projections = [child for name, child in part.named_children() if name.endswith("_proj")]
    return all(isinstance(layer, Linear) for layer in projections)


class FusedMap:
    """``f(z)`` of one token in each of some lanes; a call that commits replaces the states in place."""

    def __init__(
        self, model: LanguageModel, states: Sequence[LaneStates], weights: HeldWeights, *, capacity: int
    ) -> None:
        self.norm = model.backbone.norm
        self.layers: list[_Layer] = []
        tables: dict[Any, tuple[Tensor, Tensor]] = {}
        mlps = [block.mlp for block in model.backbone.blocks()]
        both = [
            weights.lay_together(mlp.gate_proj, mlp.up_proj) if isinstance(mlp, SwiGLU) else None
            for mlp in mlps
        ]
        with weights.in_use():
            for block, state, gate_up in zip(model.backbone.blocks(), states, both, strict=True):
                mixer: _Mamba2 | _Attention
                if isinstance(block.mixer, Mamba2):
                    assert isinstance(state, Mamba2Lanes)
                    mixer = _Mamba2(block.mixer, state)
                else:
                    assert isinstance(block.mixer, Attention)
                    assert isinstance(state, AttentionLanes)
                    mixer = _Attention(block.mixer, state, _tables(block.mixer, tables, capacity, state))
                self.layers.append(_Layer(block, mixer, gate_up))
        self.slots = _side_by_side([state for state in states if isinstance(state, Mamba2Lanes)])

    def bind(
        self, rows_R: Tensor, u_SU: Tensor | None, lengths_R: Tensor, committing_R: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Return the map of these lanes, (R, D) → (R, D); its first call commits where it is to.

        Further ones, as some solvers make, see the states that this has left: those rows don't search.
        """
        steps = self._steps(rows_R, u_SU, lengths_R, committing_R)

        def call(z_RD: Tensor) -> Tensor:
            step = next(steps)
            value = self(z_RD, step)
            self._move_on(step)
            return value

        return call

    def _move_on(self, step: _Step) -> None:
        if self.slots is not None:
            slots, taps = self.slots
            slots[:, step.rows_R] = (slots[:, step.rows_R] + step.committing_R) % taps

    def step(self, batch: Lanes, rows_R: Tensor) -> None:
        """Take a whole step of lanes whose search is plain Picard iteration: see ``searches``."""
        from implicit_blocks.ops.kernels.decoding_search import take_in, take_up

        search = batch.search
        solver, stopping = search.solver, search.stopping
        assert isinstance(solver, Picard)
        assert stopping is not None
        z_RD, lengths, committing = take_up(search.z, batch.lengths_S, batch.busy_S, search.done, rows_R)
        fz_RD = self(z_RD, _Step(rows_R, batch.u_SU, lengths, committing))
        slots, taps = self.slots or (None, 1)
        take_in(
            fz_RD,
            rows_R,
            committing,
            batch.busy_S,
            z_SD=search.z,
            best_SD=search.best,
            hidden_SD=batch.hidden_SD,
            residual_S=search.residual,
            iterations_S=search.iterations,
            converged_S=search.converged,
            done_S=search.done,
            lengths_S=batch.lengths_S,
            slots_YS=slots,
            taps=taps,
            damping=solver.damping,
            tolerance=stopping.tolerance,
            max_iterations=stopping.max_iterations,
            floor=None if stopping.norm == "absolute" else RELATIVE_FLOOR,
        )

    @staticmethod
    def searches(search: LaneSearch) -> bool:
        """Whether ``step`` takes the steps of this search."""
        plain = type(search.solver) is Picard and not search.solver.undamped_first
        return plain and search.averages is None

    @staticmethod
    def _steps(rows: Tensor, u: Tensor | None, lengths: Tensor, committing: Tensor) -> Iterator[_Step]:
        yield _Step(rows, u, lengths, committing)
        while True:
            yield _Step(rows, u, lengths + committing, torch.zeros_like(committing))

    def __call__(self, z_RD: Tensor, step: _Step) -> Tensor:
        """Return ``f(z)``."""
        from implicit_blocks.ops.kernels.decoding import add_norm

        branch = None
        for layer in self.layers:
            z_RD, branch = layer(z_RD, branch, step)
        return add_norm(z_RD, branch, self.norm.weight, eps=self.norm.eps, dtype=z_RD.dtype)[1]


class _Layer:
    """A residual block on (stream, what is still to be added to it)."""

    def __init__(self, block: Block, mixer: _Mamba2 | _Attention, gate_up: Tensor | None) -> None:
        self.norm, self.mixer = block.mixer_norm, mixer
        self.mlp = None if block.mlp is None else _SwiGLU(block.mlp, gate_up)
        self.mlp_norm = block.mlp_norm

    def __call__(self, z: Tensor, branch: Branch | None, step: _Step) -> tuple[Tensor, Branch | None]:
        z, branch = self.mixer(z, branch, self.norm, step)
        if self.mlp is not None and self.mlp_norm is not None:
            return self.mlp(z, branch, self.mlp_norm)
        return z, branch


class _Mamba2:
    def __init__(self, mixer: Mamba2, states: Mamba2Lanes) -> None:
        self.mixer, self.states = mixer, states
        self.in_proj, self.out_proj = _held(mixer.in_proj), _held(mixer.out_proj)
        self.conv_weight = mixer.conv.weight.detach().t().contiguous()

    def __call__(
        self, z: Tensor, branch: Branch | None, norm: RMSNorm, step: _Step
    ) -> tuple[Tensor, Branch | None]:
        from implicit_blocks.ops.kernels.decoding import Branch, Mamba2Inputs, add_norm, linear_rows
        from implicit_blocks.ops.kernels.decoding_mamba2 import prepare_mamba2, scan_step

        few, mixer, into = len(z) <= FEW, self.mixer, self.in_proj
        inputs = Mamba2Inputs(
            self.states.next_S,
            self.states.taps_SWC,
            self.conv_weight,
            mixer.conv.bias,
            mixer.dt_bias,
            mixer.d_inner,
        )
        if few:
            assert branch is None
            prepared = linear_rows(
                z,
                into.weight,
                into.bias,
                norm_K=norm.weight,
                eps=norm.eps,
                u_SM=step.u_SU,
                rows_R=step.rows_R,
                mamba2=inputs,
            )
        else:
            z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=into.weight.dtype)
            prepared = prepare_mamba2(into(normed), step.u_SU, step.rows_R, inputs)
        out, gated = self.out_proj, mixer.norm
        dtype = out.weight.dtype
        # A norm's divisor can follow the product, where nothing overflows for want of it.
        later = not few and gated.groups == 1 and out.bias is None and dtype != torch.float16
        mixed, squares = scan_step(
            prepared,
            step.rows_R,
            step.committing_R,
            self.states.h_SHPN,
            A_log_H=mixer.A_log,
            D_H=mixer.D,
            groups=mixer.spec.n_groups,
            norm_I=gated.weight if later else None,
            dtype=dtype if later else torch.float32,
        )
        if later:
            return z, Branch(out(mixed), squares, mixer.d_inner, gated.eps)
        if few and gated.groups == 1:
            return linear_rows(mixed, out.weight, out.bias, norm_K=gated.weight, eps=gated.eps, z_RM=z), None
        _, normed = add_norm(mixed, None, gated.weight, eps=gated.eps, groups=gated.groups, dtype=dtype)
        if few:
            return linear_rows(normed, out.weight, out.bias, z_RM=z), None
        return z, Branch(out(normed))


class _Attention:
    def __init__(self, mixer: Attention, states: AttentionLanes, tables: tuple[Tensor, Tensor]) -> None:
        self.heads, self.states, self.tables = mixer.n_heads, states, tables
        self.in_proj, self.out_proj = _held(mixer.in_proj), _held(mixer.out_proj)

    def __call__(
        self, z: Tensor, branch: Branch | None, norm: RMSNorm, step: _Step
    ) -> tuple[Tensor, Branch | None]:
        from implicit_blocks.ops.kernels.decoding import Branch, add_norm, linear_rows
        from implicit_blocks.ops.kernels.decoding_attention import attention_step

        few = len(z) <= FEW
        into, out = self.in_proj, self.out_proj
        u = step.u_SU
        if few:
            assert branch is None
            projected = linear_rows(
                z,
                into.weight,
                into.bias,
                norm_K=norm.weight,
                eps=norm.eps,
                u_SM=u,
                rows_R=step.rows_R,
            )
            u = None
        else:
            z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=into.weight.dtype)
            projected = into(normed)
        y = attention_step(
            projected,
            u,
            step.rows_R,
            step.lengths_R,
            self.states.keys,
            self.states.values,
            *self.tables,
            n_heads=self.heads,
            dtype=torch.float32 if few else out.weight.dtype,
            key_scales_SKT=self.states.key_scales,
            value_scales_SKT=self.states.value_scales,
        )
        if few:
            return linear_rows(y, out.weight, out.bias, z_RM=z), None
        return z, Branch(out(y))


class _SwiGLU:
    def __init__(self, mlp: nn.Module, gate_up: Tensor | None) -> None:
        assert isinstance(mlp, SwiGLU)
        self.gate, self.up, self.out = _held(mlp.gate_proj), _held(mlp.up_proj), _held(mlp.out_proj)
        if gate_up is None:  # its layers make their weights ready themselves
            gate_up = torch.cat((self.gate.weight, self.up.weight))
        biases = [part.bias for part in (self.gate, self.up) if part.bias is not None]
        self.both = _Matrix(gate_up, torch.cat(biases) if biases else None)  # one product for many rows

    def __call__(self, z: Tensor, branch: Branch | None, norm: RMSNorm) -> tuple[Tensor, Branch | None]:
        from implicit_blocks.ops.kernels.decoding import Branch, add_norm, linear_rows, silu_product

        if len(z) <= FEW:
            hidden = linear_rows(
                z,
                self.up.weight,
                self.up.bias,
                gate_MK=self.gate.weight,
                gate_bias_M=self.gate.bias,
                norm_K=norm.weight,
                eps=norm.eps,
            )
            return linear_rows(hidden, self.out.weight, self.out.bias, z_RM=z), None
        z, normed = add_norm(z, branch, norm.weight, eps=norm.eps, dtype=self.up.weight.dtype)
        return z, Branch(self.out(silu_product(self.both(normed))))


def _held(layer: nn.Module) -> _Matrix:
    assert isinstance(layer, Linear)
    weight, bias = layer.prepared() if layer.held is None else layer.held
    return _Matrix(weight.detach().contiguous(), bias)


def _side_by_side(states: Sequence[Mamba2Lanes]) -> tuple[Tensor, int] | None:
    """Lay the layers' next slots into one tensor, (layers, S), for one step forward to serve all."""
    if not states:
        return None
    slots = torch.stack([state.next_S for state in states])
    for state, own in zip(states, slots, strict=True):
        state.next_S = own
    return slots, states[0].taps_SWC.shape[1]


def _tables(
    mixer: Attention, known: dict[Any, tuple[Tensor, Tensor]], capacity: int, states: AttentionLanes
) -> tuple[Tensor, Tensor]:
    """Return the rotations of all positions, (T, P / 2) each, made once for layers that share them."""
    key = (mixer.rope_theta, mixer.head_dim, mixer.rope_scaling)
    if key not in known:
        cos, sin = rotation_tables(
            torch.arange(capacity, device=states.keys.device)[None],
            head_dim=mixer.head_dim,
            theta=mixer.rope_theta,
            dtype=torch.float32,
            scaling=mixer.rope_scaling,
        )
        known[key] = cos[0, 0].contiguous(), sin[0, 0].contiguous()
    return known[key]
