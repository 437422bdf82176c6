"""A weight that is computed from parameters and still supports in-place writes, like a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ComputedWeight(Tensor):
    """A computed weight, such as one with weight norm, that supports in-place writes like a parameter.

    ``torch.nn.init``, functions given to ``Module.apply`` and tools such as peft write to ``layer.weight`` or
    ``layer.weight.data`` in place. The next call computes the weight again and would lose the new values, so
    ``assign`` writes them to the parameters as well. Views (``weight[0]``, ``weight.T``, ``weight.data``,
    ``weight.detach()``) are of this class too; other results of operations are ordinary tensors.

    Raises:
        RuntimeError: for an in-place operation while gradients are recorded, as for a leaf.

    """

    assign: Callable[[Tensor], None]
    """Sets the parameters to those of a weight."""
    whole: Tensor
    """The whole weight, an ordinary tensor in the same memory."""

    @classmethod
    def of(cls, weight: Tensor, assign: Callable[[Tensor], None]) -> Tensor:
        """Return the weight, with its gradient, as a tensor that supports in-place writes."""
        return cls._sharing(weight, assign, weight.detach())

    @classmethod
    def _sharing(cls, tensor: Tensor, assign: Callable[[Tensor], None], whole: Tensor) -> ComputedWeight:
        made = tensor.as_subclass(cls)
        made.assign, made.whole = assign, whole
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute as for ordinary tensors; then write in-place changes to the parameters."""
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
                    weight.assign(weight.whole)
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
                    return cls._sharing(value, weight.assign, weight.whole)
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
            self.assign(self.whole)

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
