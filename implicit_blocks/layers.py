"""The layers in and around a mixer, their initial values and weight norm.

They are RMS norm, linear maps, the weights of a short convolution, and the SwiGLU MLP.

Weight norm: T. Salimans and D. Kingma, "Weight normalization", NeurIPS 2016: ``w = g · v / ‖v‖`` for each
output row. While weights are cached (``implicit_blocks.weights.cache``) it is computed once per forward pass.

Shape legend: B batch, L tokens of a window, D model width, F hidden width, C convolved channels,
W convolution taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses
from torch.nn.utils import parametrize

from implicit_blocks._utils.module_hooks import has_hooks
from implicit_blocks.ops.accelerated import available
from implicit_blocks.ops.backends import is_transformed
from implicit_blocks.ops.float8 import Float8Weight, float8_linear, float8_swiglu
from implicit_blocks.specs import SwiGLUSpec
from implicit_blocks.weights.computed_weight import ComputedWeight

WeightLayout = tuple[torch.dtype, int, int]
"""How a cached weight is laid out: its dtype, and the numbers of rows and columns of zeros added to it."""

PADDING = 64  # the fast matrix kernels need bfloat16 rows aligned to multiples of this width


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged in float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in float32 or better.

    With ``groups`` the width is divided into that many equal parts, each with its own mean.

    The output has the dtype of ``x``, so that a float32 residual stream stays float32 in a bfloat16 model.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(width))

    def forward(
        self,
        x: Tensor,
        added: Tensor | None = None,
        *,
        out: Tensor | None = None,
        damped: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Normalize (…, width): ``x``, or ``x + added``, a sum that a compiler fuses.

        ``damped`` is a point and a damping λ: the value is then ``(1 − λ) point + λ norm(x)``, which a
        compiler fuses as well. With ``out`` the value is written there.
        """
        normed = self._normed(x if added is None else x + added)
        if damped is not None:
            normed = torch.lerp(damped[0], normed, damped[1])
        return normed if out is None else out.copy_(normed)

    def _normed(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        if self.groups > 1:
            parts = wide.unflatten(-1, (self.groups, -1))
            normed = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)
            return (normed * self.weight.to(wide.dtype)).to(x.dtype)
        return F.rms_norm(wide, wide.shape[-1:], self.weight.to(wide.dtype), self.eps).to(x.dtype)

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)


class Linear(nn.Linear):
    """A linear map that accepts inputs of any floating dtype and computes in the dtype of its weight.

    While weights are cached on a GPU, ``pad_out`` and ``pad_in`` pad the rows or columns with zeros to a
    multiple of 64, because the fast matrix kernels need aligned widths. With ``pad_out`` the output is wider
    by the padding, which is 0. The owner of the layers sets both flags.
    """

    pad_in = False
    pad_out = False
    cached: tuple[Any, Tensor | None] | None = None
    """The weight, a tensor or in searches with 8-bit floats a ``Float8Weight``, and the bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        weight, bias = (self.weight, self.bias) if self.cached is None else self.cached
        if isinstance(weight, Float8Weight):
            return float8_linear(input, weight, bias)
        return F.linear(input.to(weight.dtype), weight, bias)

    def current(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias that a call uses: the cached ones, if any."""
        return (plain_weight(self), self.bias) if self.cached is None else self.cached

    def layout(self) -> WeightLayout:
        """Return the layout of the cached weight."""
        return self._layout(_normed_parts(self))

    def _layout(self, parts: tuple[Tensor, Tensor] | None) -> WeightLayout:
        parameter = next(iter(self.parameters())) if parts is None else parts[1]
        device, dtype = parameter.device.type, parameter.dtype
        if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        rows = -self.out_features % PADDING if self.pad_out and device == "cuda" else 0
        columns = -self.in_features % PADDING if self.pad_in and device == "cuda" else 0
        return dtype, rows, columns

    def prepared(
        self, layout: WeightLayout | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in this layout, with ``weight`` in place of the weight if given."""
        (dtype, rows, columns), bias = self.layout() if layout is None else layout, self.bias
        if weight is None:
            weight = plain_weight(self).to(dtype)
            if rows or columns:
                weight = F.pad(weight, (0, columns, 0, rows))
        if bias is None:
            return weight, None
        return weight, F.pad(bias.to(dtype), (0, rows)) if rows else bias.to(dtype)


class DepthwiseConv(nn.Module):
    """Weights (C, W), oldest tap first, and bias (C,) or None of a causal convolution, channel by channel."""

    def __init__(self, channels: int, taps: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch does for convolutions."""
        reset_linear_(self)


class SwiGLU(nn.Module):
    """``W_out (silu(W_gate z) · W_up z)``: N. Shazeer, "GLU variants improve transformer", 2020.

    Args:
        spec: the hidden width F, and whether the layers have biases.
        d_model: width of the residual stream.

    """

    def __init__(self, spec: SwiGLUSpec, *, d_model: int) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up_proj = Linear(d_model, spec.d_ff, bias=spec.bias)
        self.out_proj = Linear(spec.d_ff, d_model, bias=spec.bias)

    def choose_padding(self) -> None:
        """Pad the hidden width while weights are cached, unless a layer is wrapped or replaced."""
        layers = self._modules.values()
        plain = all(isinstance(layer, Linear) for layer in layers)
        out = self._modules["out_proj"]
        for layer in layers if plain else self.modules():
            if isinstance(layer, Linear):
                own = vars(layer)  # a module's assignment of attributes is slow, and the device waits
                own["pad_out"], own["pad_in"] = plain and layer is not out, plain and layer is out

    def forward(self, z_BLD: Tensor) -> Tensor:
        """Map each token, (B, L, D) to (B, L, D)."""
        gate, up = self.gate_proj(z_BLD), self.up_proj(z_BLD)
        weight, bias = getattr(self.out_proj, "cached", None) or (None, None)
        if isinstance(weight, Float8Weight) and not has_hooks(self.out_proj):
            return float8_swiglu(gate, up, weight, bias)
        out: Tensor = self.out_proj(F.silu(gate) * up)
        return out

    def output_projections(self) -> Sequence[nn.Module]:
        """Return the layer that writes into the residual stream."""
        return (self.out_proj,)


def reset_linear_(module: nn.Module) -> None:
    """Initialize a linear or convolution layer as torch does: uniform in ±1/√fan_in."""
    fresh = torch.empty_like(plain_weight(module), requires_grad=False)
    nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
    assign_weight(module, fresh)
    bias = getattr(module, "bias", None)
    if bias is not None:
        bound = 1 / math.sqrt(fresh[0].numel())
        nn.init.uniform_(bias, -bound, bound)


def reset_parameters_(root: nn.Module) -> None:
    """Initialize every descendant of ``root`` that has parameters, in the order of ``modules()``."""
    for module in root.modules():
        if module is root:
            continue
        if parametrize.is_parametrized(module, "weight") or isinstance(module, nn.Linear):
            reset_linear_(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


# ------------------------------------------------------------------------------------ weight norm


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
        return ComputedWeight.of(weight, partial(_assign, g, v))

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
    if weight.is_meta:  # only shapes; the operations on this device are slow
        return weight.new_empty(len(weight), *[1] * (weight.ndim - 1)), torch.empty_like(weight)
    norm = _row_norm(weight)
    plain = torch.ones_like(weight)
    if directions is not None:
        plain = torch.where(_row_norm(directions) > 0, directions, plain)
    return norm, torch.where(norm == 0, plain, weight)


@torch.no_grad()
def _assign(g: Tensor, v: Tensor, weight: Tensor) -> None:
    """Set ``g`` and ``v`` to those of a weight; rows of zeros keep their direction in ``v``."""
    found_g, found_v = decomposed(weight.to(v), directions=v)
    g.copy_(found_g)
    v.copy_(found_v)


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
            # unsafe: without torch's check that the weight, which it computes, has its shape and dtype
            parametrize.register_parametrization(part, "weight", WeightNorm(), unsafe=True)
            part.__class__ = _shared_class(plain, type(part))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


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
    """Return ``module.weight`` as an ordinary tensor, for reading: without support for in-place writes."""
    if (parts := _normed_parts(module)) is not None:
        return WeightNorm.compute(*parts)
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


# ------------------------------------------------------------------------------------ cached weights


def prepare_weights(modules: Iterable[nn.Module], groups: Mapping[int, int]) -> list[tuple[Any, Any]]:
    """Prepare the weights of linear layers and those with weight norm, all together.

    Args:
        modules: other modules among them are skipped.
        groups: number of a module by its ``id``; modules that are not listed have one number in common.
            Weights of one number run backward together.

    Returns:
        pairs of the module with the attribute ``cached``, a ``Linear`` or a ``WeightNorm``, and its value.

    """
    found = [one for module in modules if (one := _found(module)) is not None]
    normed = _fused(found, [groups.get(id(module), -1) for module, *_ in found])
    cached: list[tuple[Any, Any]] = []
    for place, (module, layout, _) in enumerate(found):
        weight = normed.get(place)
        if isinstance(module, Linear):
            cached.append((module, module.prepared(layout, weight)))
        else:
            chain = _parametrizations(module)
            cached.append((chain[0], _normed_weight(chain) if weight is None else weight))
    return cached


class _Found(NamedTuple):
    """A module whose weight is cached, its layout, and ``g`` and ``v`` if it has weight norm and no more."""

    module: nn.Module
    layout: WeightLayout
    parts: tuple[Tensor, Tensor] | None


def _found(module: nn.Module) -> _Found | None:
    """Return how the weight of a module is cached; None: it is not."""
    if isinstance(module, Linear):
        parts = _normed_parts(module)
        return _Found(module, module._layout(parts), parts)
    chain = _parametrizations(module)
    return None if chain is None else _Found(module, (chain.original1.dtype, 0, 0), _normed_parts(module))


def _fused(found: Sequence[_Found], groups: Sequence[int]) -> dict[int, Tensor]:
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
    for place, (_, layout, parts) in enumerate(found):
        if parts is None:
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


def _parametrizations(module: nn.Module) -> Any:
    """Return the parametrizations of a module's weight if weight norm is the first of them, else None."""
    # Reads the plain dictionaries: the device waits while this runs for a hundred matrices.
    parts: Any = module._modules.get("parametrizations")
    chain = None if parts is None else parts._modules.get("weight")
    if chain is None or not isinstance(next(iter(chain._modules.values())), WeightNorm):
        return None
    return chain


def _normed_parts(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return ``g`` and ``v`` of a module's weight; None if it has no weight norm or more than weight norm.

    Hooks, such as those of ``torch.nn.utils.prune`` on ``v``, and row norms over several ranks count as more.
    """
    chain = _parametrizations(module)
    if chain is None or chain._forward_pre_hooks or list(map(type, chain._modules.values())) != [WeightNorm]:
        return None
    return chain.original0, chain.original1


def _normed_weight(chain: Any) -> Tensor:
    """Return ``g · v / ‖v‖`` of a module's parametrizations, of which weight norm is the first."""
    for hook in chain._forward_pre_hooks.values():  # torch.nn.utils.prune sets v by one
        hook(chain, ())
    weight: Tensor = chain[0].compute(chain.original0, chain.original1)
    return weight
