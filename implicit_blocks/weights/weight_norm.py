"""Weight norm for the matrices of a fixed-point map, computed once a forward pass.

T. Salimans and D. Kingma, "Weight normalization", NeurIPS 2016: ``w = g · v / ‖v‖`` for each output row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import is_transformed


class ComputedWeight(Tensor):
    """A weight computed from ``g`` and ``v`` that supports in-place writes like a parameter.

    ``torch.nn.init``, functions given to ``Module.apply`` and tools such as peft write to ``layer.weight`` or
    ``layer.weight.data`` in place. The next call computes the weight again and would lose the new values, so
    they are written to ``g`` and ``v`` as well. Views (``weight[0]``, ``weight.T``, ``weight.data``,
    ``weight.detach()``) are of this class too; other results of operations are ordinary tensors.

    Raises:
        RuntimeError: for an in-place operation while gradients are recorded, as for a leaf.

    """

    sources: tuple[Tensor, Tensor]
    whole: Tensor
    """The whole weight, an ordinary tensor in the same memory."""

    @classmethod
    def of(cls, weight: Tensor, *, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight, with its gradient, as a tensor that supports in-place writes."""
        return cls._sharing(weight, (g, v), weight.detach())

    @classmethod
    def _sharing(cls, tensor: Tensor, sources: tuple[Tensor, Tensor], whole: Tensor) -> ComputedWeight:
        made = tensor.as_subclass(cls)
        made.sources, made.whole = sources, whole
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute as for ordinary tensors; then write in-place changes to ``g`` and ``v``."""
        with torch._C.DisableTorchFunctionSubclass():
            given = [one for one in _leaves((args, kwargs)) if isinstance(one, cls)]
            # Before: adding a tensor with a gradient to weight.data, as peft does, gives that one a gradient.
            before = [(_version(one), one.requires_grad) for one in given]
            result = func(*args, **(kwargs or {}))
            for weight, (version, recorded) in zip(given, before, strict=True):
                if _version(weight) != version or (weight.is_inference() and _is_in_place(func)):
                    of_init = getattr(func, "__module__", "") == "torch.nn.init"  # records no gradients
                    if torch.is_grad_enabled() and recorded and not of_init:
                        raise RuntimeError(
                            "a weight with weight norm was changed in place while gradients are recorded; "
                            "change it within torch.no_grad()"
                        )
                    _assign(weight.sources, weight.whole)
            if getattr(func, "__name__", "") == "as_subclass":
                return result
            if type(result) in (tuple, list):  # of split or unbind
                return type(result)(cls._view(one, given) for one in result)
            return cls._view(result, given)

    @classmethod
    def _view(cls, value: Any, given: list[ComputedWeight]) -> Any:
        """Return a view of one of the weights as a ComputedWeight; other values unchanged."""
        if type(value) is Tensor:
            for weight in given:
                if value.untyped_storage()._cdata == weight.untyped_storage()._cdata:
                    return cls._sharing(value, weight.sources, weight.whole)
        return value

    @property
    def data(self) -> Tensor:
        """The values, without gradients."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"the weight has shape {tuple(self.shape)}, what is assigned to its data {tuple(value.shape)}"
            )
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.detach().copy_(value)
            _assign(self.sources, self.whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of arguments or results: nested tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [value]


def _version(weight: Tensor) -> int:
    """Return the version counter of the memory; 0 in inference mode, which has none."""
    return 0 if weight.is_inference() else weight._version


def _is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")


@torch.no_grad()
def _assign(sources: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Set ``g`` and ``v`` to those of a weight; rows of zeros keep their direction in ``v``."""
    g, v = sources
    found_g, found_v = decomposed(weight.to(v), directions=v)
    g.copy_(found_g)
    v.copy_(found_v)


class WeightNorm(nn.Module):
    """The parametrization ``(g, v) → g · v / ‖v‖``, rows being the first dimension.

    ``g`` has the weight's number of dimensions, (rows, 1, …), ``v`` its shape. While a weight is *cached*
    (see ``implicit_blocks.weights.cache``) the cached value is returned and nothing is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cached: Tensor | None = None

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight, which supports in-place writes except under a compiler or transform."""
        if self.cached is not None:
            return self.cached
        weight = self.compute(g, v)
        if type(weight) is not Tensor or is_transformed():
            return weight
        return ComputedWeight.of(weight, g=g, v=v)

    @staticmethod
    def compute(g: Tensor, v: Tensor) -> Tensor:
        """Return ``g · v / ‖v‖`` in ``v``'s dtype, 0 for rows of zeros; the norm is in float32 or better."""
        v_wide = v.to(torch.promote_types(v.dtype, torch.float32))
        norm = _row_norm(v_wide)
        return (g * (v_wide / norm.masked_fill(norm == 0, 1.0))).to(v.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``g = ‖weight‖`` and ``v = weight``: assigning a weight leaves it as it is."""
        return decomposed(weight)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached": None}  # a cached value belongs to a forward pass, never to a file

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightNorm:
        return WeightNorm()  # a cached value belongs to a forward pass, never to a copy


def decomposed(weight: Tensor, *, directions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``g`` and ``v`` of a weight: the length of each row, and the row itself.

    A row of zeros has no direction. Its gain is 0, and its direction is that of ``directions``, or equal
    entries where that is 0 too: if both were 0, no gradient would ever change the row.
    """
    norm = _row_norm(weight)
    plain = torch.ones_like(weight)
    if directions is not None:
        plain = torch.where(_row_norm(directions) > 0, directions, plain)
    return norm, torch.where(norm == 0, plain, weight)


def normed_parts(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return ``g`` and ``v`` of a module's weight; None if it has no weight norm or more than weight norm.

    Hooks, such as those of ``torch.nn.utils.prune`` on ``v``, and row norms over several ranks count as more.
    """
    # Reads the plain dictionaries: the device waits while this runs for a hundred matrices.
    parts: Any = module._modules.get("parametrizations")
    chain: Any = None if parts is None else parts._modules.get("weight")
    made = [] if chain is None else list(chain._modules.values())
    if len(made) != 1 or type(made[0]) is not WeightNorm or chain._forward_pre_hooks:
        return None
    return chain.original0, chain.original1


def fused(
    modules: Sequence[nn.Module], layouts: Sequence[tuple[torch.dtype, int, int]], groups: Sequence[int]
) -> dict[int, Tensor]:
    """Return the normed weights computed by Triton kernels, by the modules' index in the list.

    Each has the dtype of its layout and is padded by the layout's zero rows and columns. Modules without
    weight norm, on other devices, or in precisions that the kernels do not support are left out. The weights
    of one group come from one autograd node, which runs backward once.
    """
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return {}  # the kernels read addresses from a table: compilers cannot trace that
    if not available("triton"):
        return {}
    from implicit_blocks.ops.kernels.weight_norm import LARGEST_ROW, Layout, normed_weights

    served: dict[int, tuple[Tensor, Tensor, Layout]] = {}
    devices = set()
    for place, (module, layout) in enumerate(zip(modules, layouts, strict=True)):
        if (parts := normed_parts(module)) is None:
            continue
        g, v = parts
        row = v.numel() // max(1, len(v)) + layout[2]
        whole = v.ndim == 2 or not any(layout[1:])  # only matrices are padded
        plain = g.is_contiguous() and g.dtype == v.dtype == torch.float32
        if v.is_cuda and plain and whole and 0 < row <= LARGEST_ROW:
            served[place] = (*parts, Layout(*layout))
            devices.add(v.device)
    if len(devices) != 1:  # none, or several
        return {}
    gains, weights, kept = zip(*served.values(), strict=True)
    numbers = [groups[place] for place in served]
    return dict(zip(served, normed_weights(gains, weights, kept, numbers), strict=True))


def normed_weight(chain: Any) -> Tensor:
    """Return ``g · v / ‖v‖`` of a module's parametrizations, of which weight norm is the first."""
    for hook in chain._forward_pre_hooks.values():  # torch.nn.utils.prune sets v by one
        hook(chain, ())
    weight: Tensor = chain[0].compute(chain.original0, chain.original1)
    return weight


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _row_norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norm.view(-1, *[1] * (weight.ndim - 1))


def add_weight_norm(module: nn.Module) -> None:
    """Put weight norm on every parameter called ``weight`` of two or more dimensions in ``module``.

    State-dict names become ``….parametrizations.weight.original0`` (g) and ``….original1`` (v). Modules of
    one type share one class afterwards, so torch's ``parametrize``, which modifies the class of a module,
    affects all of them: removing the parametrization fails, and a parametrized bias is expected in all.
    """
    for part in list(module.modules()):
        weight = part._parameters.get("weight")
        if weight is not None and weight.ndim >= 2:
            plain = type(part)
            parametrize.register_parametrization(part, "weight", WeightNorm(), unsafe=weight.is_meta)
            part.__class__ = _shared_class(plain, type(part))


def _shared_class(plain: type[nn.Module], parametrized: type[nn.Module]) -> type[nn.Module]:
    """Return the class of all modules of type ``plain`` with weight norm, derived from torch's for one."""
    # torch creates a class for each instance; with one for all, compiled code serves every layer. It inherits
    # the property ``weight``: torch's removal from one layer, which deletes the property from the layer's own
    # class, then fails before any change, instead of removing the weights of all layers.
    if plain not in _CLASSES:

        def reduce(self: Any, protocol: Any) -> Any:
            return _restored, (plain,), plain.__getstate__(self)

        def register_parameter(self: Any, name: str, param: Any) -> None:
            if name == "weight_orig":  # the first step of torch.nn.utils.prune
                raise ValueError(
                    f"the weight of {plain.__name__} is computed by weight norm and cannot be pruned; "
                    'prune v instead: name="original1" of module.parametrizations.weight'
                )
            plain.register_parameter(self, name, param)

        methods = {"__reduce_ex__": reduce, "register_parameter": register_parameter}
        _CLASSES[plain] = type(parametrized.__name__, (parametrized,), methods)
    return _CLASSES[plain]


def _restored(plain: type[nn.Module]) -> nn.Module:
    """Return an empty module of the class that ``plain`` has with weight norm, for pickle."""
    made = plain.__new__(plain)
    if plain not in _CLASSES:  # another process: create the class from a module with a weight
        nn.Module.__init__(made)
        made.weight = nn.Parameter(torch.ones(1, 1))
        add_weight_norm(made)
        made.__dict__.clear()
    made.__class__ = _CLASSES[plain]
    return made


def plain_weight(module: nn.Module) -> Tensor:
    """Return ``module.weight`` as an ordinary tensor, for compilers."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.as_subclass(Tensor) if isinstance(weight, ComputedWeight) else weight


@torch.no_grad()
def assign_weight(module: nn.Module, weight: Tensor) -> None:
    """Set ``module.weight`` to these values, whether it is a parameter or parametrized."""
    if parametrize.is_parametrized(module, "weight"):
        module.weight = weight
    else:
        parameter = module.weight
        assert isinstance(parameter, Tensor)
        parameter.copy_(weight)
