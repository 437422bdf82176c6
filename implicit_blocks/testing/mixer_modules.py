"""Contracts of a mixer as a module: gradients, types, copies, the meta device, costs in its spec."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Mixer
from implicit_blocks.layers import add_weight_norm
from implicit_blocks.registry import build
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import check_gradients, relative_error, require
from implicit_blocks.testing.mixer_runs import D_MODEL, LENGTH, TOLERANCE, begin, forward, inputs, make, run


def gradients(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check the gradients of z, u and every parameter, also through states, against finite differences."""
    mixer = make(spec, d_model)
    z, u = (part[:1, :5].clone() for part in inputs(mixer, d_model))
    tensors = {"z": z.requires_grad_(), "u": u.requires_grad_(), **dict(mixer.named_parameters())}
    weights = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for way, cuts in (("forward", []), ("advance, in windows of 3 and 2 tokens", [3, 5])):

        def loss(cuts: list[int] = cuts) -> Tensor:
            y = run(mixer, z, u, cuts)[0] if cuts else forward(mixer, z, u)
            return (y * weights).sum()

        check_gradients(mixer, loss, tensors, seed=4, way=f"through {way}, ")


@torch.no_grad()
def low_precision(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check the accuracy with bfloat16 weights, and under autocast with a float32 residual stream."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    expected = forward(mixer, z, u)
    for name, dtype in (("bfloat16 weights", torch.bfloat16), ("bfloat16 autocast", torch.float32)):
        lower = copy.deepcopy(mixer).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            injection = u.to(torch.bfloat16)
            for cuts in ([LENGTH], [4, LENGTH]):
                y, _ = run(lower, z.float(), injection, cuts, start=begin(lower, dtype=dtype))
                error = relative_error(y.double(), expected)
                require(
                    y.is_floating_point() and error < 0.1,
                    mixer,
                    "low precision",
                    f"with {name} outputs have error {error:.2f} (windows ending at {cuts}); cast inputs to "
                    "the type of the weights, and keep sums and states over many tokens in float32",
                )


def copies(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that a deep copy, and a mixer that loads the state dict, compute the same values."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    forward(mixer, z, u)  # with gradients: the module must keep nothing of this call
    torch.manual_seed(7)
    loaded: Mixer = build(spec, d_model=d_model).double()
    loaded.load_state_dict(mixer.state_dict())
    with torch.no_grad():
        expected = forward(mixer, z, u)
        for name, other in (("deepcopy", copy.deepcopy(mixer)), ("state dict", loaded)):
            require(
                torch.equal(forward(other, z, u), expected),
                mixer,
                name,
                "the copy computes different values; "
                "store everything learned in parameters or persistent buffers",
            )


def meta_build(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that the mixer builds on the meta device and computes the same after loading a state dict."""
    mixer = make(spec, d_model)
    with torch.device("meta"):
        empty: Mixer = build(spec, d_model=d_model)
    on_meta = all(p.is_meta for p in empty.parameters())
    require(on_meta, mixer, "meta build", "a parameter was created on an explicit device")
    empty = empty.to_empty(device="cpu").double()
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(torch.nan)
    for module in empty.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    require(
        all(bool(p.isfinite().all()) for p in empty.parameters()),
        mixer,
        "meta build",
        "reset_parameters must initialize every parameter of its module",
    )
    empty.load_state_dict(mixer.state_dict())
    z, u = inputs(mixer, d_model)
    with torch.no_grad():
        require(
            torch.equal(forward(empty, z, u), forward(mixer, z, u)),
            mixer,
            "meta build",
            "state outside of parameters and persistent buffers was lost; create it in prepare",
        )


@torch.no_grad()
def injection_width(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check the injection's width, that it changes the output, and that zeros equal no injection."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    stated = spec.injection_width(d_model)
    require(
        stated is None or stated == mixer.injection_width,
        mixer,
        "injection width",
        f"the spec's width is {stated}, the mixer's {mixer.injection_width}",
    )
    plain = forward(mixer, z, None)
    error = relative_error(forward(mixer, z, torch.zeros_like(u)), plain)
    require(
        error < TOLERANCE,
        mixer,
        "injection width",
        f"an injection of zeros differs from no injection by {error:.1e}; add u to the input projection",
    )
    require(
        relative_error(forward(mixer, z, u), plain) > TOLERANCE,
        mixer,
        "injection width",
        "the injection has no effect; add u to the input projection: it carries the tokens",
    )


def costs(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check the spec's parameter shapes, parameter counts, FLOPs and state size, where they are not None."""
    with torch.device("meta"):
        mixer: Mixer = build(spec, d_model=d_model)
    listed = spec.parameter_shapes(d_model)
    built = {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
    require(
        listed is None or listed == built,
        mixer,
        "costs",
        f"parameter_shapes({d_model}) returns {listed}; the mixer has {built}",
    )
    weights = sum(parameter.numel() for parameter in mixer.parameters())
    add_weight_norm(mixer)
    gains = sum(parameter.numel() for parameter in mixer.parameters()) - weights
    counted = spec.parameter_count(d_model)
    require(
        counted is None or tuple(counted) == (weights, gains),
        mixer,
        "costs",
        f"parameter_count({d_model}) returns {counted and tuple(counted)}; the mixer has {weights} weights, "
        f"and {gains} rows with a gain of weight norm",
    )
    operations = spec.flops_per_token(d_model, 64)
    require(
        operations is None or operations > 0,
        mixer,
        "costs",
        f"flops_per_token({d_model}, 64) returns {operations}; return None if unknown",
    )
    z, u = (part[:1] for part in inputs(mixer, d_model))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        stated = spec.state_bytes(d_model, tokens=LENGTH, itemsize=dtype.itemsize)
        if stated is not None:
            cast = make(spec, d_model).to(dtype)
            _, state = run(cast, z.to(dtype), u.to(dtype), [LENGTH], start=begin(cast, 1, dtype=dtype))
            size = sum(leaf.nbytes for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
            require(
                stated == size,
                mixer,
                "costs",
                f"state_bytes({d_model}, tokens={LENGTH}, itemsize={dtype.itemsize}) returns {stated}; the "
                f"state of a sequence takes {size}",
            )
