"""Weights prepared once per forward pass: weight norm computed, cast for autocast, padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_blocks.layers import Linear, SwiGLU, prepare_weights
from implicit_blocks.ops.backends import first_derivatives_only

WEIGHTS_COME_AND_GO = "weights_come_and_go"
"""Name of the attribute that is true for modules whose weights exist only while they run."""


_THREADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The thread that last used a cache, by the first module whose weight is cached."""


class WeightCache:
    """The current weights of modules, prepared for any number of calls.

    A cache is built once per forward pass, outside the fixed-point loop, in the gradient and autocast mode of
    the caller. Calls inside ``with weights.activate():`` use it, in the loop and in later recomputations for
    backward. Gradients flow to the parameters through this single computation.

    Layers whose weights exist only while they run (`WEIGHTS_COME_AND_GO`, as where each layer is gathered
    from other processes) are excluded; they prepare their weights themselves.
    """

    low_precision = False
    """Whether weights of linear layers are in 8-bit floats, for searches."""

    def __init__(self, *modules: nn.Module) -> None:
        # Holders have an attribute ``cached``: Linear layers, and the WeightNorm of other modules.
        self._cached: list[tuple[Any, Any]]
        self._joined: dict[nn.Module, list[tuple[Any, Any]]] = {}
        parts = [part for module in modules for part in modules_of(module)]
        for part in parts:
            if isinstance(part, SwiGLU):
                part.choose_padding()  # before its layers are prepared
        self._cached = prepare_weights(parts, _layers(modules))

    def copied(self) -> WeightCache:
        """Return a copy of the weights, without gradients."""
        copy = WeightCache()
        copy._cached = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value))
            for holder, value in self._cached
        ]
        return copy

    @torch.no_grad()
    def load_(self, other: WeightCache) -> None:
        """Copy the values of another cache of the same modules."""
        torch._foreach_copy_(self.tensors(), other.tensors())

    def fuse(self, *layers: Linear) -> Tensor | None:
        """Concatenate the weights of these layers, which become views of the returned tensor.

        Returns None where one of them is not cached. For weights without gradients.
        """
        places = [at for layer in layers for at, (holder, _) in enumerate(self._cached) if holder is layer]
        if len(places) < len(layers):
            return None
        values = [self._cached[at][1] for at in places]
        whole = torch.cat([weight.detach() for weight, _ in values])
        parts = whole.split([len(weight) for weight, _ in values])
        for at, part, (_, bias) in zip(places, parts, values, strict=True):
            self._cached[at] = (self._cached[at][0], (part, bias))
        return whole

    def as_leaves(self, other: WeightCache) -> WeightCache:
        """Return autograd leaves on the same memory, which require gradients where ``other``'s tensors do."""
        leaves = WeightCache()
        carry = iter([t.requires_grad for t in other.tensors()])
        leaves._cached = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(next(carry)), value))
            for holder, value in self._cached
        ]
        return leaves

    def items(self) -> list[tuple[Any, Any]]:
        """Return the modules and their cached weights."""
        return list(self._cached)

    def append(self, holder: nn.Module, value: Any) -> None:
        """Add the cached weight of a module: a tensor, or of a ``Linear`` the pair of weight and bias."""
        self._cached.append((holder, value))

    def tensors(self) -> list[Tensor]:
        """Return all cached tensors, in a fixed order."""
        leaves = pytree.tree_leaves([value for _, value in self._cached])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def sync_layer_gradients(self, layer: nn.Module) -> None:
        """Complete the gradients of a layer's parameters as soon as backward leaves the layer.

        Call it within ``activate``, before the layer, while gradients are recorded. Otherwise the preparation
        of the weights, which precedes all calls of the map, runs backward after all of them, and processes
        cannot exchange any gradients before the end.
        """
        if (joined := self._joined.get(layer)) is None:
            inside = {id(module) for module in layer.modules()}
            own = [(holder, value) for holder, value in self._cached if id(holder) in inside]
            joined = self._joined[layer] = join(own, list(layer.parameters()))
        for holder, value in joined:
            holder.cached = value

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use the cached weights in the ``with`` block; free of cost where they are active already.

        Raises:
            RuntimeError: if another thread is using weights of these modules.

        """
        if self._cached and self._cached[0][0].cached is self._cached[0][1]:
            yield
            return
        before = [holder.cached for holder, _ in self._cached]
        if self._cached and not torch.compiler.is_compiling():
            _require_one_thread(self._cached[0][0])
        for holder, value in self._cached:
            holder.cached = value
        try:
            yield
        finally:
            for (holder, _), value in zip(self._cached, before, strict=True):
                holder.cached = value


def _require_one_thread(holder: Any) -> None:
    """Raise if another thread has activated these weights; record the current thread."""
    thread = get_ident()
    # On a GPU backward runs in a thread of its own, which recomputes checkpointed steps.
    if torch._C._current_graph_task_id() != -1:
        return
    if holder.cached is not None and _THREADS.get(holder, thread) != thread:
        raise RuntimeError(
            "the model is in use by another thread; protect its calls by a lock, or give each thread its own "
            "copy beforehand (copy.deepcopy)"
        )
    _THREADS[holder] = thread


def join(cached: list[tuple[Any, Any]], parameters: list[nn.Parameter]) -> list[tuple[Any, Any]]:
    """Return the same values behind a new autograd node, which passes their gradients on together.

    Backward visits nodes in the reverse order of their creation.
    """
    leaves, form = pytree.tree_flatten([value for _, value in cached])
    made = [leaf for leaf in leaves if _was_computed(leaf)]
    if not made:
        return cached
    sources = [parameter for parameter in parameters if parameter.requires_grad]
    joined = iter(_Join.apply(made, *sources))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    leaves = [next(joined) if _was_computed(leaf) else leaf for leaf in leaves]
    values = pytree.tree_unflatten(leaves, form)
    return [(holder, value) for (holder, _), value in zip(cached, values, strict=True)]


def _was_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


class _Join(torch.autograd.Function):
    """The identity on tensors computed from parameters; backward returns the parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.made, ctx.parameters = made, parameters
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    @first_derivatives_only(
        "a model whose layers' gradients are divided among processes",
        "use the model without DDP or FSDP",
    )
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        reached = [(tensor, grad) for tensor, grad in zip(ctx.made, given, strict=True) if grad is not None]
        if not reached:
            return (None,) * (1 + len(ctx.parameters))
        outputs, grads = zip(*reached, strict=True)
        # The graph of the weights is retained: uses that were not joined run backward through it themselves.
        found = torch.autograd.grad(outputs, ctx.parameters, grads, retain_graph=True, allow_unused=True)
        return (None, *found)


def _layers(modules: Sequence[nn.Module]) -> dict[int, int]:
    """Return each module's layer number, where gradients are delivered layer by layer."""
    layers: list[nn.Module] = []
    for module in modules:
        if getattr(module, "gradients_by_layer", False) and module.divides_gradients:
            layers += module.blocks()  # type: ignore[operator]  # a backbone's method
    return {id(part): number for number, layer in enumerate(layers) for part in layer.modules()}


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and its descendants, parents first, except those whose weights come and go.

    The GPU is idle until a pass's weights are prepared, and ``nn.Module.modules`` takes 2 ms for the 500
    modules of 24 layers.
    """
    found: list[nn.Module] = []
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is None or vars(part).get(WEIGHTS_COME_AND_GO) or getattr(type(part), WEIGHTS_COME_AND_GO, 0):
            continue
        found.append(part)
        waiting += reversed(part._modules.values())
    return found
