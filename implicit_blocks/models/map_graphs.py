"""The map of a model captured as CUDA graphs: an iteration of the search is then one launch.

A map of 24 layers has some 400 kernels, and its backward twice as many. Launching them one by one takes
longer than the GPU needs to run them (Mamba2 130M, 8 × 2048 tokens on an H100: 32 ms of launches for 19 ms of
work).

``torch.cuda.make_graphed_callables`` does not replace these graphs. It has one static input per graph, so
that every iteration would copy its point there, where a search passes a value on in place. Weights
computed once per pass (weight norm, casts) would be arguments, copied at every call. A graph keeps the
activations of one forward pass: the steps after a search would need a graph each, and copy points, gradients
and the weights' gradients between them. It raises where capture fails; here the map then runs eagerly.
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
from implicit_blocks.cuda.capture import capture, cast_cache_disabled, temporary_leaves
from implicit_blocks.models.map_steps import ONE_CALL, Steps
from implicit_blocks.models.stack import BlockContext, BoundMap
from implicit_blocks.ops.backends import first_derivatives_only
from implicit_blocks.weights.cache import WeightCache, modules_of

_LOG = logging.getLogger(__name__)

MOST = 8  # graphs of a kind: shapes of training, evaluation, and compacted batches
VALUES = 3  # buffers of a search: the point, its value, and the previous point, which is still read


class MapGraphs:
    """CUDA graphs of a model's map, one per shape: without gradients for searches, with them for steps.

    The differentiated steps after a search are one graph: points and gradients that only the next step reads
    are never copied, and the weights' gradients are copied once.

    Graphs run plain windows, which begin their sequences and have no padding or documents. Other windows run
    eagerly, and so do, with a line in the log, maps that cannot be captured or whose modules have hooks: a
    graph does not call hooks. A call whose ``z`` is a leaf that requires gradients runs eagerly as well: a
    graph runs backward once, and implicit gradients need many products with one Jacobian. Weights, injection
    and dropout masks are copied into the buffers of the graphs once per pass, ``z`` unless it is already
    there.

    No reference to the stack is kept here, because the stack refers to this object: both are freed with
    the last reference to the model.

    Args:
        most: maximum number of shapes of searches.
        compact: whether rows that are done leave searches, which continue in graphs of fewer rows.

    """

    def __init__(self, most: int = MOST, *, compact: bool = True) -> None:
        self._most, self.compact = most, compact
        self._searches: dict[Hashable, _SearchGraph] = {}
        self._steps: dict[Hashable, list[_StepGraph]] = {}
        self._buffers: dict[Hashable, _Buffers] = {}
        self._refused: set[Hashable] = set()
        self._memory: tuple[int, ...] = ()
        self._pool: Any = None  # shared by all searches, whose graphs keep nothing in it, and one step
        self._beside: _StepGraph | None = None  # this step: no search is replayed before its backward has run
        self._hooks_told = False
        self._last: tuple[ReferenceType[BoundMap], _SearchGraph, torch.dtype | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MapGraphs:
        return MapGraphs(
            self._most, compact=self.compact
        )  # a graph uses the memory that it was captured with

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # the empty state of a copy

    def call(self, f: BoundMap, z_BLD: Tensor, steps: Steps = ONE_CALL) -> Tensor:
        """Return the point after ``steps``, by a graph where one exists or can be captured.

        Without gradients ``steps`` must be one undamped call.
        """
        if self._beside is not None and self._beside.in_use and not torch.is_grad_enabled():
            return f.compute(z_BLD, steps)  # a search's graph would overwrite tensors that backward reads
        if torch.is_grad_enabled() and z_BLD.requires_grad and z_BLD.is_leaf:
            return f.compute(z_BLD, steps)  # the caller computes many products with the Jacobian at this leaf
        try:
            if (search := self._once_more(f, z_BLD)) is not None:
                return search.call(z_BLD, self._pool)
            key = _key(f, z_BLD)
            if key is None or (key, torch.is_grad_enabled()) in self._refused:
                return f.compute(z_BLD, steps)
            return self._call(f, z_BLD, key, steps)
        except _NotCapturedError as error:
            _LOG.warning(
                "the map cannot be captured as a CUDA graph, so it runs eagerly: %s", error.__cause__
            )
            self._refused.add((_key(f, z_BLD), torch.is_grad_enabled()))
            self._last = self._pool = None  # a pool in which a capture failed cannot be used again
            return f.compute(z_BLD, steps)

    def _once_more(self, f: BoundMap, z_BLD: Tensor) -> _SearchGraph | None:
        """Return the graphs of the last call in a search, if this call is of the same map.

        The device waits for the host between two iterations; this shortcut saves the host's work.
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
            # The result of a search and frozen parameters require no gradient. All steps of a pass read the
            # same buffers.
            given = _inputs(f, z_BLD)
            kind = (key, f.stack.training, tuple(t.requires_grad for t in given), steps)
            if kind not in self._steps and len(self._steps) >= MOST:
                return f.compute(z_BLD, steps)
            ready = self._steps.setdefault(kind, [])
            step = next((graph for graph in ready if not graph.in_use), None)
            if step is None:
                if len(ready) >= MOST:
                    return f.compute(z_BLD, steps)
                # Activations are kept between forward and backward: every graph but one has its own pool.
                pool = self._shared_pool() if self._beside is None else torch.cuda.graph_pool_handle()
                step = _StepGraph(buffers.bind(f, with_gradients=True), z_BLD, steps, pool)
                self._beside = self._beside or step
                ready.append(step)
            return step.call(given)
        search = self._searches.get(key)
        if search is None:
            if len(self._searches) >= self._most:
                return f.compute(z_BLD)
            search = self._searches[key] = _SearchGraph(buffers.bind(f, with_gradients=False), z_BLD)
        value = search.call(z_BLD, self._shared_pool())
        self._last = ref(f), search, _autocast()
        return value

    def _shared_pool(self) -> Any:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def _loaded(self, f: BoundMap, key: Hashable) -> _Buffers | None:
        """Return the buffers of a key, filled with the tensors of this pass.

        None while the backward of another pass still needs their content.
        """
        buffers = self._buffers.get(key)
        if buffers is not None and buffers.hold(f):
            return buffers
        if any(step.in_use for steps in self._steps.values() for step in steps):
            return None
        parts = _modules_of(f)
        if any_hooks(parts):
            if not self._hooks_told:
                self._hooks_told = True
                _LOG.warning(
                    "modules of the map have hooks, so it runs eagerly: a CUDA graph does not call hooks"
                )
            return None
        memory = _memory_of(parts)
        if memory != self._memory:  # the model's memory has moved: all graphs are invalid
            self._searches, self._steps, self._buffers, self._memory = {}, {}, {}, memory
            self._pool = self._beside = buffers = None
        if buffers is None:
            others = list(self._buffers.values())
            weights = next((b.weights for b in others if b.weights.alike(f.weights)), None)
            given = next((b.given for b in others if b.given.alike(f)), None)
            buffers = self._buffers[key] = _Buffers(f, weights, given)
        buffers.load(f)
        self._last = None
        return buffers


class _NotCapturedError(RuntimeError):
    """An operation that cannot be captured, such as reading a value; the cause is the original error."""


def _memory_of(parts: list[nn.Module]) -> tuple[int, ...]:
    """Return the addresses of modules' parameters and buffers; the device waits for this function."""
    tables = [(part._parameters, part._buffers) for part in parts]
    return tuple(t.data_ptr() for pair in tables for own in pair for t in own.values() if t is not None)


def _inputs(f: BoundMap, z_BLD: Tensor) -> list[Tensor]:
    """Return all tensors that the value may depend on: z, injections, cached weights, parameters."""
    u = [t for t in (f.u_BLU, f.e_BLD) if t is not None]
    every = [p for part in _modules_of(f) for p in part._parameters.values() if p is not None]
    return [z_BLD, *u, *f.weights.tensors(), *dict.fromkeys(every)]  # shared parameters once


def _key(f: BoundMap, z_BLD: Tensor) -> Hashable | None:
    """Return the key of the graph that serves a call, or None where the window is not plain."""
    window = f.window
    plain = window.start == 0 and window.valid_BT is None and window.documents_BT is None
    if not plain:
        return None
    given = tuple((name, t.shape, t.dtype) for name, t in _given(f))
    return (z_BLD.shape, z_BLD.dtype, given, _autocast(), z_BLD.device, f.weights.low_precision)


def _given(f: BoundMap) -> list[tuple[Hashable, Tensor]]:
    """Return the inputs of a pass beside the weights: injections, row indices, token IDs, dropout masks."""
    named = [("u", f.u_BLU), ("e", f.e_BLD), ("rows", f.window.u_rows_BL), ("ids", f.window.ids_BL)]
    masks = [
        ((layer, at), mask)
        for layer, context in enumerate(f.contexts)
        for at, mask in enumerate(context.masks or ())
    ]
    return [(name, t) for name, t in (*named, *masks) if t is not None]


def _modules_of(f: BoundMap) -> list[nn.Module]:
    """Return the modules of a map and their descendants."""
    return [part for module in f.modules for part in modules_of(module)]


def _leaf(buffer: Tensor | None, given: Tensor | None) -> Tensor | None:
    """Return an autograd leaf on a buffer, which requires gradients where the given tensor does."""
    if buffer is None or given is None:
        return None
    return buffer.detach().requires_grad_(given.requires_grad)


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


class _Weights:
    """A copy of cached weights, shared by the graphs that use weights of these shapes and dtypes.

    Weights of low precision, which have the same memory in all passes, are not copied.
    """

    def __init__(self, cached: WeightCache) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.copy = cached if cached.low_precision else cached.copied()
        self._of: ReferenceType[WeightCache] | None = None

    def alike(self, cached: WeightCache) -> bool:
        if self.copy.low_precision or cached.low_precision:
            return self.copy is cached
        return [(t.shape, t.dtype) for t in self.copy.tensors()] == [
            (t.shape, t.dtype) for t in cached.tensors()
        ]

    def hold(self, cached: WeightCache) -> bool:
        """Whether these weights were copied last."""
        return self.copy is cached or (self._of is not None and self._of() is cached)

    def load(self, cached: WeightCache) -> None:
        if not self.hold(cached):
            self.copy.load_(cached)
            self._of = ref(cached)


class _Given:
    """Copies of the other inputs of a pass: injection, row indices, token IDs, dropout masks."""

    def __init__(self, f: BoundMap) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.own = {name: t.detach().clone() for name, t in _given(f)}
        self._of: list[ReferenceType[Tensor]] = []

    def alike(self, f: BoundMap) -> bool:
        """Whether the inputs have these names, shapes, dtypes and devices."""
        kinds = [(name, t.shape, t.dtype, t.device) for name, t in self.own.items()]
        return kinds == [(name, t.shape, t.dtype, t.device) for name, t in _given(f)]

    def hold(self, f: BoundMap) -> bool:
        """Whether these inputs were copied last."""
        given = _given(f)
        return len(given) == len(self._of) and all(
            known() is t for known, (_, t) in zip(self._of, given, strict=True)
        )

    def load(self, f: BoundMap) -> None:
        if not self.hold(f):
            given = _given(f)
            for name, t in given:
                self.own[name].copy_(t)
            self._of = [ref(t) for _, t in given]


class _Buffers:
    """The input buffers of graphs of one shape, which graphs of other shapes may share in part."""

    def __init__(self, f: BoundMap, weights: _Weights | None, given: _Given | None = None) -> None:
        self.weights = weights if weights is not None else _Weights(f.weights)
        self.given = given if given is not None else _Given(f)

    def hold(self, f: BoundMap) -> bool:
        """Whether the buffers contain the inputs of this map."""
        return self.weights.hold(f.weights) and self.given.hold(f)

    @torch.no_grad()
    def load(self, f: BoundMap) -> None:
        """Copy the inputs of a pass into the buffers."""
        self.weights.load(f.weights)
        self.given.load(f)

    def bind(self, f: BoundMap, *, with_gradients: bool) -> BoundMap:
        """Return the map on these buffers; with gradients they are autograd leaves on the same memory."""
        weights, own = self.weights.copy, self.given.own
        u, e = own.get("u"), own.get("e")
        if with_gradients:
            weights = weights.as_leaves(f.weights)
            u, e = _leaf(u, f.u_BLU), _leaf(e, f.e_BLD)
        # The initial states and the rotations are the same in every plain window.
        window, mixers = f.window, [context.mixer for context in f.contexts]
        if "rows" in own or "ids" in own:
            window = replace(window, u_rows_BL=own.get("rows"), ids_BL=own.get("ids"), shared={})
            mixers = [block.mixer.prepare(window) for block in f.stack.blocks()]
        contexts = tuple(
            BlockContext(mixer, None if context.masks is None else (own[layer, 0], own[layer, 1]))
            for layer, (mixer, context) in enumerate(zip(mixers, f.contexts, strict=True))
        )
        stack: Any = proxy(f.stack)  # it refers to the graphs: a weak reference avoids a reference cycle
        return replace(f, stack=stack, window=window, contexts=contexts, weights=weights, u_BLU=u, e_BLD=e)


class _SearchGraph:
    """Calls of the map without gradients: eager the first time, then captured and replayed.

    The first call compiles and tunes kernels, which is impossible during a capture. Values are returned in
    buffers of a pool. Where the input of a call is the value of another, as in an undamped iteration, the
    graph reads it in place: at 512 × 256 tokens of width 256, copying points in and out took 5 % of a step. A
    graph has two fixed addresses, so there is one for each pair of buffers; and one for each mode, because a
    third-party mixer may compute something else in training.
    """

    def __init__(self, f: BoundMap, z_BLD: Tensor) -> None:
        with torch.inference_mode(False):
            self._z = z_BLD.detach().clone(memory_format=torch.contiguous_format)  # for other points
        self._values = BufferPool(self._z, VALUES)
        self._kept: Tensor | None = None
        self._f = f
        self._graphs: dict[tuple[int | None, int | None, bool], torch.cuda.CUDAGraph] = {}
        self._ready: set[bool] = set()

    def takes(self, z_BLD: Tensor) -> bool:
        """Whether the graphs accept points of this shape, dtype and device."""
        own = self._z
        return z_BLD.shape == own.shape and z_BLD.dtype == own.dtype and z_BLD.device == own.device

    def call(self, z_BLD: Tensor, pool: Any) -> Tensor:
        """Return ``f(z)``; it is not overwritten as long as it is referenced."""
        given, free = self._values.index_of(z_BLD), self._values.free()
        if given is None:
            self._z.copy_(z_BLD)
        training = self._f.stack.training
        graph = self._graphs.get((given, free, training))
        if graph is not None:
            graph.replay()
        else:
            self._first(given, free, training, pool)
        return self._values.acquire(free) if free is not None else self._spare().clone()

    def _first(self, given: int | None, free: int | None, training: bool, pool: Any) -> None:
        """Run the first call of a mode eagerly; capture and replay the first call of each pair of buffers."""
        point = self._z if given is None else self._values.acquire(given)
        value = self._spare() if free is None else self._values.acquire(free)
        if training not in self._ready:
            self._ready.add(training)
            with cast_cache_disabled():
                self._f.compute(point, out=value)
            return
        graph = self._graphs[given, free, training] = self._captured(point, value, pool)
        graph.replay()

    def _spare(self) -> Tensor:
        """Return the buffer for a value while all others are in use."""
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
    """Differentiated steps with captured forward and backward; one call at a time may await its backward."""

    def __init__(self, f: BoundMap, z_BLD: Tensor, steps: Steps, pool: Any) -> None:
        self._z = z_BLD.detach().clone().requires_grad_(z_BLD.requires_grad)
        self._f, self._steps = f, steps
        self._call: ReferenceType[_Call] | None = None
        try:
            with temporary_leaves(*f.modules):
                self._capture(pool)
        except RuntimeError as error:
            raise _NotCapturedError from error

    def _capture(self, pool: Any) -> None:
        f, given = self._f, _inputs(self._f, self._z)
        leaves = [t for t in given if t.requires_grad]
        with cast_cache_disabled():
            # Later steps differ from the first in the gradient of their z: two steps compile everything.
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
        """Whether the backward of a call has yet to run."""
        return self._call is not None and self._call() is not None

    def call(self, given: list[Tensor]) -> Tensor:
        """Return the point after the steps, with its gradient, given the tensors of ``_inputs``, z first."""
        value: Tensor = _Step.apply(self, *given)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return value

    def replay(self, z_BLD: Tensor, call: _Call) -> Tensor:
        self._call = ref(call)
        with torch.no_grad():
            self._z.copy_(z_BLD)
        self._forward.replay()
        return self._out.clone()

    def replay_backward(self, dout: Tensor, call: _Call, given: list[bool]) -> list[Tensor | None]:
        """Return the gradients of the inputs; those of leaves, as flagged in ``given``, are copied."""
        if self._call is None or self._call() is not call:
            raise RuntimeError(
                "backward ran a second time through a map captured as a CUDA graph, whose activations are "
                "gone; keep the gradients of the first backward, or call model.capture_graphs(False)"
            )
        self._dout.copy_(dout)
        self._backward.replay()
        self._call = None
        # Autograd may keep the tensor it is given as a leaf's gradient: it must not be a buffer of the graph.
        kept = [g for g, leaf in zip(self._grads, given, strict=True) if leaf and g is not None]
        own = [torch.empty_like(g) for g in kept]
        if own:
            torch._foreach_copy_(own, kept)  # one launch for hundreds of small tensors
        copies = iter(own)
        return [
            None if g is None else next(copies) if leaf else g.detach()
            for g, leaf in zip(self._grads, given, strict=True)
        ]


class _Call:
    """A token for one forward replay; it is alive as long as its backward may run."""


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _StepGraph, z: Tensor, *others: Tensor) -> Tensor:
        ctx.graph, ctx.call = graph, _Call()
        ctx.leaves = [t.is_leaf for t in (z, *others)]
        return graph.replay(z, ctx.call)

    @staticmethod
    @first_derivatives_only(
        "a map captured as a CUDA graph",
        "disable captured graphs with model.capture_graphs(False)",
    )
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graph.replay_backward(dout, ctx.call, ctx.leaves))
