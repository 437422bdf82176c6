"""The map of a model captured as CUDA graphs: an iteration of the search is then one launch.

A map of 24 layers is some 400 kernels, and its backward twice as many. Launched one by one they keep the host
busy for longer than the GPU needs for the work (Mamba2 130M, 8 × 2048 tokens on an H100: 32 ms of launching
for 19 ms of work).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, proxy, ref

import torch
from torch import Tensor, nn

from implicit_blocks._utils.module_hooks import any_hooks
from implicit_blocks.cuda.buffer_pool import BufferPool
from implicit_blocks.cuda.capture import capture, forgetting_casts, leaves_of_its_own
from implicit_blocks.models.backbone import ONE_CALL, BlockContext, BoundMap, Steps
from implicit_blocks.ops.transforms import first_derivatives_only
from implicit_blocks.weights.cache import WeightCache, modules_of

_LOG = logging.getLogger(__name__)

MOST = 8  # graphs of a kind: shapes of training, evaluation, and the batches that converged rows have left
VALUES = 3  # of the map, in a search: the point, its value, and the point before, still being looked at


class MapGraphs:
    """Graphs of a model's map, one a shape, without gradients for searches and with them for what follows.

    What follows a search, a few steps in a row, is one graph: points and gradients that only the next step
    reads are never copied, and the weights' gradients leave it once.

    They serve plain windows: those that begin their sequences, without padding or documents; any other is
    computed as if there were no graphs, and so is, with a line in the log, a map that can't be captured, or
    whose modules have hooks, which nobody would call. A call whose ``z`` is a leaf that takes a gradient is
    too: a graph goes backwards once, and gradients that are solved for ask for many products with one
    Jacobian. Weights, injection and the masks of dropout are copied into buffers of the graphs once a pass,
    ``z`` where it isn't there.

    Nothing here holds the backbone, which holds this: both go with the last reference to the model.
    """

    def __init__(self) -> None:
        self._searches: dict[Hashable, _SearchGraph] = {}
        self._steps: dict[Hashable, list[_StepGraph]] = {}
        self._buffers: dict[Hashable, _Buffers] = {}
        self._refused: set[Hashable] = set()
        self._memory: tuple[int, ...] = ()
        self._pool: Any = None  # of all searches, whose graphs leave nothing in it, and of one step
        self._beside: _StepGraph | None = None  # this: no search is replayed while it awaits its backward
        self._hooks_told = False
        self._last: tuple[ReferenceType[BoundMap], _SearchGraph, torch.dtype | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MapGraphs:
        return MapGraphs()  # a graph works on the memory that it was captured with

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # the empty state of a copy

    def call(self, f: BoundMap, z_BLD: Tensor, steps: Steps = ONE_CALL) -> Tensor:
        """Return where steps lead, from a graph where there is one or one can be made.

        Without gradients that must be one call, undamped.
        """
        if self._beside is not None and self._beside.in_use and not torch.is_grad_enabled():
            return f.compute(z_BLD, steps)  # a search's graph would write over what backward reads
        if torch.is_grad_enabled() and z_BLD.requires_grad and z_BLD.is_leaf:
            return f.compute(z_BLD, steps)  # of a point of its own the caller asks for many products
        try:
            if (search := self._once_more(f, z_BLD)) is not None:
                return search.call(z_BLD, self._pool)
            key = _key(f, z_BLD)
            if key is None or (key, torch.is_grad_enabled()) in self._refused:
                return f.compute(z_BLD, steps)
            return self._call(f, z_BLD, key, steps)
        except _NotCapturedError as error:
            _LOG.warning("the map can't be captured as a CUDA graph, so it runs eagerly: %s", error.__cause__)
            self._refused.add((_key(f, z_BLD), torch.is_grad_enabled()))
            self._last = self._pool = None  # a pool that a capture failed in may take no other
            return f.compute(z_BLD, steps)

    def _once_more(self, f: BoundMap, z_BLD: Tensor) -> _SearchGraph | None:
        """Return the graphs of the last call in a search, where this one is of the same map.

        The device waits for the host between two iterations, and this is what the host is spared.
        """
        if self._last is None or torch.is_grad_enabled():
            return None
        known, search, autocast = self._last
        return search if known() is f and search.takes(z_BLD) and autocast == _autocast() else None

    def _call(self, f: BoundMap, z_BLD: Tensor, key: Hashable, steps: Steps) -> Tensor:
        buffers = self._loaded(f, key)
        if buffers is None:
            return f.compute(z_BLD, steps)
        if torch.is_grad_enabled():
            # What a search found carries no gradient, nor does what is frozen, as long as it is. All of a
            # pass's steps read the same buffers.
            given = _inputs(f, z_BLD)
            kind = (key, f.backbone.training, tuple(t.requires_grad for t in given), steps)
            if kind not in self._steps and len(self._steps) >= MOST:
                return f.compute(z_BLD, steps)
            ready = self._steps.setdefault(kind, [])
            step = next((graph for graph in ready if not graph.in_use), None)
            if step is None:
                if len(ready) >= MOST:
                    return f.compute(z_BLD, steps)
                # Activations stay between forward and backward: every graph but one has a pool of its own.
                pool = self._shared_pool() if self._beside is None else torch.cuda.graph_pool_handle()
                step = _StepGraph(buffers.bind(f, with_gradients=True), z_BLD, steps, pool)
                self._beside = self._beside or step
                ready.append(step)
            return step.call(given)
        search = self._searches.get(key)
        if search is None:
            if len(self._searches) >= MOST:
                return f.compute(z_BLD)
            search = self._searches[key] = _SearchGraph(buffers.bind(f, with_gradients=False), z_BLD)
        value = search.call(z_BLD, self._shared_pool())
        self._last = ref(f), search, _autocast()
        return value

    def _shared_pool(self) -> Any:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def _loaded(self, f: BoundMap, key: Hashable) -> _Buffers | None:
        """Return the buffers of a key with what this pass reads in them.

        None while another pass's backward still needs what is in them.
        """
        buffers = self._buffers.get(key)
        if buffers is not None and buffers.hold(f):
            return buffers
        if any(step.in_use for steps in self._steps.values() for step in steps):
            return None
        parts = modules_of(f.backbone)
        if any_hooks(parts):
            if not self._hooks_told:
                self._hooks_told = True
                _LOG.warning("modules of the map have hooks, so it runs eagerly: a CUDA graph calls none")
            return None
        memory = _memory_of(parts)
        if memory != self._memory:  # the model has moved: nothing captured is worth anything
            self._searches, self._steps, self._buffers, self._memory = {}, {}, {}, memory
            self._pool = self._beside = buffers = None
        if buffers is None:
            weights = next(
                iter(b.weights for b in self._buffers.values() if b.weights.alike(f.weights)), None
            )
            buffers = self._buffers[key] = _Buffers(f, weights)
        buffers.load(f)
        self._last = None
        return buffers


class _NotCapturedError(RuntimeError):
    """What a graph cannot hold, such as asking for a value; the cause says what."""


def _memory_of(parts: list[nn.Module]) -> tuple[int, ...]:
    """Return where modules' parameters and buffers lie, asked for while the device waits for a pass."""
    held = [(part._parameters, part._buffers) for part in parts]
    return tuple(t.data_ptr() for pair in held for own in pair for t in own.values() if t is not None)


def _inputs(f: BoundMap, z_BLD: Tensor) -> list[Tensor]:
    """Return all that the value may depend on: z, injection, cached weights, parameters."""
    u = [] if f.u_BLU is None else [f.u_BLU]
    every = [p for part in modules_of(f.backbone) for p in part._parameters.values() if p is not None]
    return [z_BLD, *u, *f.weights.tensors(), *dict.fromkeys(every)]  # a shared one once


def _key(f: BoundMap, z_BLD: Tensor) -> Hashable | None:
    """Return what two calls must share to share a graph, or None where the window is not plain."""
    window = f.window
    plain = window.start == 0 and window.valid_BT is None and window.documents_BT is None
    if not plain:
        return None
    given = tuple((name, t.shape, t.dtype) for name, t in _given(f))
    return (z_BLD.shape, z_BLD.dtype, given, _autocast(), z_BLD.device)


def _given(f: BoundMap) -> list[tuple[Hashable, Tensor]]:
    """Return what a pass brings beside the weights: injection, its rows, the masks of dropout."""
    named = [("u", f.u_BLU), ("rows", f.window.u_rows_BL)]
    masks = [
        ((layer, at), mask)
        for layer, context in enumerate(f.contexts)
        for at, mask in enumerate(context.masks or ())
    ]
    return [(name, t) for name, t in (*named, *masks) if t is not None]


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class _Weights:
    """A copy of cached weights, shared by the graphs that use weights of these types."""

    def __init__(self, cached: WeightCache) -> None:
        self.copy = cached.copied()
        self._of: ReferenceType[WeightCache] | None = None

    def alike(self, cached: WeightCache) -> bool:
        return [(t.shape, t.dtype) for t in self.copy.tensors()] == [
            (t.shape, t.dtype) for t in cached.tensors()
        ]

    def hold(self, cached: WeightCache) -> bool:
        """Whether these are the weights that were copied last."""
        return self._of is not None and self._of() is cached

    def load(self, cached: WeightCache) -> None:
        if not self.hold(cached):
            self.copy.load_(cached)
            self._of = ref(cached)


class _Buffers:
    """What graphs of one shape read: weights, injection, masks of dropout."""

    def __init__(self, f: BoundMap, weights: _Weights | None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.weights = weights if weights is not None else _Weights(f.weights)
            self._own = {name: t.detach().clone() for name, t in _given(f)}
        self._of: list[ReferenceType[Tensor]] = []

    def hold(self, f: BoundMap) -> bool:
        """Whether the buffers hold what this map reads."""
        if not self.weights.hold(f.weights):
            return False
        return all(known() is t for known, (_, t) in zip(self._of, _given(f), strict=True))

    @torch.no_grad()
    def load(self, f: BoundMap) -> None:
        """Take what a pass reads."""
        self.weights.load(f.weights)
        given = _given(f)
        for name, t in given:
            self._own[name].copy_(t)
        self._of = [ref(t) for _, t in given]

    def bind(self, f: BoundMap, *, with_gradients: bool) -> BoundMap:
        """Return the map on these buffers; with gradients they are leaves on the same memory."""
        weights, own = self.weights.copy, self._own
        u = own.get("u")
        if with_gradients:
            weights = weights.as_leaves(f.weights)
            u = (
                None
                if u is None
                else u.detach().requires_grad_(f.u_BLU is not None and f.u_BLU.requires_grad)
            )
        # The states before a sequence's first token and the rotations are the same in every such window.
        window, mixers = f.window, [context.mixer for context in f.contexts]
        if "rows" in own:
            window = replace(window, u_rows_BL=own["rows"], shared={})
            mixers = [block.mixer.prepare(window) for block in f.backbone.blocks()]
        contexts = tuple(
            BlockContext(mixer, None if context.masks is None else (own[layer, 0], own[layer, 1]))
            for layer, (mixer, context) in enumerate(zip(mixers, f.contexts, strict=True))
        )
        backbone: Any = proxy(f.backbone)  # which holds the graphs: only the collector would find the circle
        return replace(f, backbone=backbone, window=window, contexts=contexts, weights=weights, u_BLU=u)


class _SearchGraph:
    """Calls of the map without gradients: computed the first time, then captured and replayed.

    Compilers and tuners of kernels run at the first call; they could not while a graph is captured. Values
    lie in buffers that are lent to the caller, and where a call is given the value of another, as an undamped
    iteration gives it, the graph reads it there: at 512 × 256 tokens of width 256, copying points in and out
    took a twentieth of a step. A graph knows two addresses, so there is one for each two that meet; and one
    for each mode, since a mixer of others' may compute otherwise in training.
    """

    def __init__(self, f: BoundMap, z_BLD: Tensor) -> None:
        with torch.inference_mode(False):
            self._z = z_BLD.detach().clone(memory_format=torch.contiguous_format)  # points from elsewhere
        self._values = BufferPool(self._z, VALUES)
        self._kept: Tensor | None = None
        self._f = f
        self._graphs: dict[tuple[int | None, int | None, bool], torch.cuda.CUDAGraph] = {}
        self._ready: set[bool] = set()

    def takes(self, z_BLD: Tensor) -> bool:
        """Whether the graphs are of such points."""
        own = self._z
        return z_BLD.shape == own.shape and z_BLD.dtype == own.dtype and z_BLD.device == own.device

    def call(self, z_BLD: Tensor, pool: Any) -> Tensor:
        """Return ``f(z)``, which nothing overwrites while it is held."""
        given, free = self._values.index_of(z_BLD), self._values.free()
        if given is None:
            self._z.copy_(z_BLD)
        training = self._f.backbone.training
        graph = self._graphs.get((given, free, training))
        if graph is not None:
            graph.replay()
        else:
            self._first(given, free, training, pool)
        return self._values.acquire(free) if free is not None else self._spare().clone()

    def _first(self, given: int | None, free: int | None, training: bool, pool: Any) -> None:
        """Compute the first call of a mode, and record and replay that of each two buffers."""
        point = self._z if given is None else self._values.acquire(given)
        value = self._spare() if free is None else self._values.acquire(free)
        if training not in self._ready:
            self._ready.add(training)
            with forgetting_casts():
                self._f.compute(point, out=value)
            return
        graph = self._graphs[given, free, training] = self._captured(point, value, pool)
        graph.replay()

    def _spare(self) -> Tensor:
        """Return the buffer that takes a value while all others are lent."""
        if self._kept is None:
            with torch.inference_mode(False):
                self._kept = torch.empty_like(self._z)
        return self._kept

    def _captured(self, point: Tensor, value: Tensor, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode(False), torch.no_grad(), capture(graph, pool):
                self._f.compute(point, out=value)
        except RuntimeError as error:
            raise _NotCapturedError from error
        return graph


class _StepGraph:
    """Steps with gradients, forward and backward captured; of one call at a time may backward be to come."""

    def __init__(self, f: BoundMap, z_BLD: Tensor, steps: Steps, pool: Any) -> None:
        self._z = z_BLD.detach().clone().requires_grad_(z_BLD.requires_grad)
        self._f, self._steps = f, steps
        self._call: ReferenceType[_Call] | None = None
        try:
            with leaves_of_its_own(f.backbone):
                self._capture(pool)
        except RuntimeError as error:
            raise _NotCapturedError from error

    def _capture(self, pool: Any) -> None:
        f, given = self._f, _inputs(self._f, self._z)
        leaves = [t for t in given if t.requires_grad]
        with forgetting_casts():
            # Later steps differ from the first by the gradient of their z: there is no third to compile.
            out = f.compute(self._z, Steps(min(self._steps.calls, 2), self._steps.damping))
            torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
        del out
        torch.cuda.synchronize()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capture(self._forward, pool):
            out = f.compute(self._z, self._steps)
        self._dout = torch.zeros_like(out)
        with capture(self._backward, pool):
            grads = torch.autograd.grad(out, leaves, self._dout, allow_unused=True)
        self._out = out.detach()
        found = dict(zip(map(id, leaves), grads, strict=True))
        self._grads = [found.get(id(t)) for t in given]

    @property
    def in_use(self) -> bool:
        """Whether a call's backward is still to come."""
        return self._call is not None and self._call() is not None

    def call(self, given: list[Tensor]) -> Tensor:
        """Return where the steps lead, with its gradient, from what ``_inputs`` gives, z first."""
        value: Tensor = _Step.apply(self, *given)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return value

    def replay(self, z_BLD: Tensor, call: _Call) -> Tensor:
        self._call = ref(call)
        with torch.no_grad():
            self._z.copy_(z_BLD)
        self._forward.replay()
        return self._out.clone()

    def replay_backward(self, dout: Tensor, call: _Call, given: list[bool]) -> list[Tensor | None]:
        """Return the gradients of the inputs; ``given`` says which of them keep theirs as it is."""
        if self._call is None or self._call() is not call:
            raise RuntimeError(
                "backward a second time through a map captured as a CUDA graph, whose activations are gone; "
                "keep the gradients of the first, or model.capture_graphs(False)"
            )
        self._dout.copy_(dout)
        self._backward.replay()
        self._call = None
        # Autograd may keep a leaf's gradient as it is given: that must be no buffer of the graph's.
        kept = [g for g, leaf in zip(self._grads, given, strict=True) if leaf and g is not None]
        own = [torch.empty_like(g) for g in kept]
        if own:
            torch._foreach_copy_(own, kept)  # hundreds of small ones: not a launch each
        copies = iter(own)
        return [
            None if g is None else next(copies) if leaf else g.detach()
            for g, leaf in zip(self._grads, given, strict=True)
        ]


class _Call:
    """Stands for one forward replay; alive as long as its backward may come."""


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _StepGraph, z: Tensor, *others: Tensor) -> Tensor:
        ctx.graph, ctx.call = graph, _Call()
        ctx.leaves = [t.is_leaf for t in (z, *others)]
        return graph.replay(z, ctx.call)

    @staticmethod
    @first_derivatives_only(
        "a map captured as a CUDA graph",
        "switch captured graphs off by model.capture_graphs(False)",
    )
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graph.replay_backward(dout, ctx.call, ctx.leaves))
