"""Weights made ready once a forward pass: weight norm computed, cast for autocast, padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_blocks.layers import Linear, SwiGLU
from implicit_blocks.ops.transforms import first_derivatives_only
from implicit_blocks.weights.weight_norm import WeightNorm, fused, normed_weight

WEIGHTS_COME_AND_GO = "weights_come_and_go"
"""Name of the attribute that is true for a module that has its weights only while it runs."""


_THREADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By the first module whose weight is cached, the thread that last used it."""


class WeightCache:
    """The weights of modules as they are now, to be used for as many calls as wanted.

    Layers that have their weights only while they run (`WEIGHTS_COME_AND_GO`, as where each is gathered from
    other processes for its turn) are left to make them ready themselves.

    Made once a forward pass, outside the fixed-point loop, in the gradient and autocast mode of the caller; a
    call made inside ``with weights.activate():`` uses them, in the loop as in a later recomputation for
    backward. Gradients flow to the parameters through the one computation.
    """

    def __init__(self, *modules: nn.Module) -> None:
        # Holders have an attribute ``cached``: our linear layers, and the weight norm of anything else.
        self._cached: list[tuple[Any, Any]]
        self._joined: dict[nn.Module, list[tuple[Any, Any]]] = {}
        parts = [part for module in modules for part in modules_of(module)]
        for part in parts:
            if isinstance(part, SwiGLU):
                part.choose_padding()  # before its layers' turn
        self._cached = _ready([part for part in parts if _is_cached(part)], _layers(modules))

    def copied(self) -> WeightCache:
        """Return the same weights in memory of their own, without gradients."""
        copy = WeightCache()
        copy._cached = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value))
            for holder, value in self._cached
        ]
        return copy

    @torch.no_grad()
    def load_(self, other: WeightCache) -> None:
        """Take the values of the same modules' weights."""
        torch._foreach_copy_(self.tensors(), other.tensors())

    def fuse(self, *layers: Linear) -> Tensor | None:
        """Return the weights of these layers as one, of which each one's becomes a part, in the same memory.

        None where some of them aren't cached. For weights without gradients.
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
        """Return the same memory as leaves of autograd, where the weights of ``other`` carry gradients."""
        leaves = WeightCache()
        carry = iter([t.requires_grad for t in other.tensors()])
        leaves._cached = [
            (holder, pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(next(carry)), value))
            for holder, value in self._cached
        ]
        return leaves

    def tensors(self) -> list[Tensor]:
        """Return all of them, in a fixed order."""
        leaves = pytree.tree_leaves([value for _, value in self._cached])
        return [leaf for leaf in leaves if leaf is not None]

    def sync_layer_gradients(self, layer: nn.Module) -> None:
        """Have the gradients of a layer's parameters ready as soon as backward is through with the layer.

        To be called within ``activate``, before the layer, where gradients are recorded. Otherwise what made
        the weights ready, before all calls of the map, goes backwards after all of them, and processes that
        exchange gradients have nothing to exchange until the very end.
        """
        if (joined := self._joined.get(layer)) is None:
            inside = {id(module) for module in layer.modules()}
            own = [(holder, value) for holder, value in self._cached if id(holder) in inside]
            joined = self._joined[layer] = join(own, list(layer.parameters()))
        for holder, value in joined:
            holder.cached = value

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use the cached weights within; where they are in use already this costs nothing.

        Raises:
            RuntimeError: another thread is using weights of these modules, perhaps of another precision.

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
    """Refuse weights that another thread holds at this moment; note which one does from here on."""
    thread = get_ident()
    # On a GPU a backward pass has a thread of its own, in which steps are computed once more.
    if torch._C._current_graph_task_id() != -1:
        return
    if holder.cached is not None and _THREADS.get(holder, thread) != thread:
        raise RuntimeError(
            "the model is in use by another thread; let threads call it in turn, behind a lock, or make each "
            "a copy of its own beforehand (copy.deepcopy)"
        )
    _THREADS[holder] = thread


def join(cached: list[tuple[Any, Any]], parameters: list[nn.Parameter]) -> list[tuple[Any, Any]]:
    """Return the same values behind one node of autograd made now, which hands their gradients on at once.

    Backward goes through nodes in the order opposite to that in which they were made.
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
    """The identity on tensors made of parameters; in backward their gradients become the parameters'."""

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
        # What made the weights is kept: a use of them that was not joined goes back through it by itself.
        found = torch.autograd.grad(outputs, ctx.parameters, grads, retain_graph=True, allow_unused=True)
        return (None, *found)


def _layers(modules: Sequence[nn.Module]) -> dict[int, int]:
    """Return the number of the layer of each module in it, where layers' gradients are wanted one by one."""
    layers: list[nn.Module] = []
    for module in modules:
        if getattr(module, "divides_gradients", False):
            layers += module.blocks()  # type: ignore[operator]  # a backbone's method
    return {id(part): number for number, layer in enumerate(layers) for part in layer.modules()}


def _is_cached(part: nn.Module) -> bool:
    """Whether a module's weight is made ready: a linear layer's, or one with weight norm."""
    if isinstance(part, Linear):
        return True
    parts: Any = part._modules.get("parametrizations")
    chain = None if parts is None else parts._modules.get("weight")
    return chain is not None and isinstance(next(iter(chain._modules.values())), WeightNorm)


def _chain(part: nn.Module) -> Any:
    return part.parametrizations["weight"]  # type: ignore[index]  # a ModuleDict, once parametrized


def _ready(parts: list[nn.Module], layers: dict[int, int]) -> list[tuple[Any, Any]]:
    """Make weights ready, all together; they go backwards so, or layer by layer, as numbered."""
    layouts = [
        part.layout() if isinstance(part, Linear) else (_chain(part).original1.dtype, 0, 0) for part in parts
    ]
    normed = fused(parts, layouts, [layers.get(id(part), -1) for part in parts])
    cached: list[tuple[Any, Any]] = []
    for place, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        if isinstance(part, Linear):
            cached.append((part, part.prepared(layout, normed.get(place))))
            continue
        chain, weight = _chain(part), normed.get(place)
        if weight is None:
            weight = normed_weight(chain)
        cached.append((chain[0], weight))
    return cached


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and those within it, parents first, but for those whose weights come and go.

    A GPU has nothing to do until a pass's weights are ready, and ``nn.Module``'s own walk takes 2 ms for the
    500 modules of 24 layers.
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
