"""The contracts of a mixer, each a function of its spec.

``check_mixer(MySpec(...))`` runs them all; ``MIXER_CONTRACTS`` names them, for a test each:

```python
@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
def test_shift(contract):
    MIXER_CONTRACTS[contract](ShiftSpec(distance=2))
```
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.committed import Committed
from implicit_blocks.interfaces import Mixer, State
from implicit_blocks.registry import build
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require

D_MODEL, BATCH, LENGTH = 16, 3, 9
TOLERANCE = 1e-9  # everything runs in float64


def _make(spec: MixerSpec, d_model: int) -> Mixer:
    torch.manual_seed(0)
    mixer: Mixer = build(spec, d_model=d_model).double()
    require(
        isinstance(mixer, Mixer), type(mixer).__name__, "is a Mixer", "derive it from implicit_blocks.Mixer"
    )
    with torch.no_grad():  # parameters that start at 0 or 1 would hide mistakes
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def _inputs(mixer: Mixer, d_model: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(BATCH, LENGTH, d_model, dtype=torch.float64, generator=generator)
    u = torch.randn(BATCH, LENGTH, mixer.injection_width, dtype=torch.float64, generator=generator)
    return z, u


def _begin(mixer: Mixer, batch: int = BATCH) -> Committed:
    state = mixer.initial_state(batch, device=torch.device("cpu"), dtype=torch.float64)
    return Committed(batch, 0, torch.zeros(1, dtype=torch.int64), (state,))


def _run(
    mixer: Mixer, z: Tensor, u: Tensor | None, cuts: Sequence[int], *, valid: Tensor | None = None
) -> tuple[Tensor, State]:
    """Mix windows that end at ``cuts``, committing each; return all outputs and the last state."""
    committed, outputs, first = _begin(mixer, z.shape[0]), [], 0
    for end in cuts:
        part = slice(first, end)
        window = committed.window(
            end - first,
            valid_BL=None if valid is None else valid[:, part],
            documents_BL=None,
            dtype=torch.float64,
        )
        context = mixer.prepare(window)
        y, state = mixer.advance(z[:, part], None if u is None else u[:, part], committed.layers[0], context)
        committed = committed.after(window, (state,))
        outputs.append(y)
        first = end
    return torch.cat(outputs, dim=1), committed.layers[0]


def _forward(mixer: Mixer, z: Tensor, u: Tensor | None, *, valid: Tensor | None = None) -> Tensor:
    committed = _begin(mixer, z.shape[0])
    window = committed.window(z.shape[1], valid_BL=valid, documents_BL=None, dtype=torch.float64)
    y: Tensor = mixer(z, u, committed.layers[0], mixer.prepare(window))
    return y


@torch.no_grad()
def causality(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """No token's output depends on a later token."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    z_other, u_other = _inputs(mixer, d_model, seed=2)
    whole = _forward(mixer, z, u)
    for position in range(1, LENGTH):
        changed = _forward(
            mixer,
            torch.cat((z[:, :position], z_other[:, position:]), dim=1),
            torch.cat((u[:, :position], u_other[:, position:]), dim=1),
        )
        error = relative_error(changed[:, :position], whole[:, :position])
        require(
            error < TOLERANCE,
            type(mixer).__name__,
            "causality",
            f"changing the tokens from {position} on moved earlier outputs by {error:.1e}; mask later tokens",
        )


@torch.no_grad()
def window_splits(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Any way of cutting the sequence into windows gives the same outputs, with and without injection."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    for injection in (u, None):
        whole = _forward(mixer, z, injection)
        require(
            whole.shape == z.shape,
            type(mixer).__name__,
            "shape",
            f"{tuple(whole.shape)} came out of {tuple(z.shape)}",
        )
        for cuts in ([LENGTH], [1, LENGTH], [4, 5, LENGTH], list(range(1, LENGTH + 1))):
            parts, _ = _run(mixer, z, injection, cuts)
            error = relative_error(parts, whole)
            require(
                error < TOLERANCE,
                type(mixer).__name__,
                "window splits",
                f"windows ending at {cuts} differ from one window by {error:.1e}; "
                "look at the state and positions",
            )


@torch.no_grad()
def state_untouched(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that iterating on a window changes neither the committed state nor later answers."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    _, state = _run(mixer, z, u, [4])
    committed = Committed(BATCH, 4, torch.full((1,), 4), (state,))
    before = copy.deepcopy(state)
    window = committed.window(3, valid_BL=None, documents_BL=None, dtype=torch.float64)
    context = mixer.prepare(window)
    first = mixer(z[:, 4:7], u[:, 4:7], state, context)
    mixer(z[:, :3], u[:, :3], state, context)
    mixer.advance(z[:, 1:4], u[:, 1:4], state, context)
    again = mixer(z[:, 4:7], u[:, 4:7], state, context)
    same = all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(pytree.tree_leaves(before), pytree.tree_leaves(state), strict=True)
    )
    require(
        same and torch.equal(first, again),
        type(mixer).__name__,
        "state untouched by iteration",
        "forward and advance must return new tensors and leave the state given to them as it was",
    )


@torch.no_grad()
def batch_independence(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that no row depends on other rows, and that ``select_rows`` picks the rows of a state."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    whole, state = _run(mixer, z, u, [5, LENGTH])
    for row in range(BATCH):
        index = torch.tensor([row])
        alone, alone_state = _run(mixer, z[index], u[index], [5, LENGTH])
        error = relative_error(alone, whole[index])
        require(
            error < TOLERANCE,
            type(mixer).__name__,
            "batch independence",
            f"row {row} alone differs by {error:.1e} from row {row} of the batch",
        )
        leaves = zip(
            pytree.tree_leaves(mixer.select_rows(state, index)), pytree.tree_leaves(alone_state), strict=True
        )
        fits = all(relative_error(a, b) < TOLERANCE if isinstance(a, Tensor) else a == b for a, b in leaves)
        require(
            fits,
            type(mixer).__name__,
            "select_rows",
            f"row {row} of the state is not what row {row} alone leaves",
        )


@torch.no_grad()
def padding(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that padding, left or right, changes no real token's output, whatever stands there."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    for name, real in (("left", slice(3, LENGTH)), ("right", slice(0, LENGTH - 3))):
        valid = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        valid[:, real] = True
        error = relative_error(
            _forward(mixer, z, u, valid=valid)[:, real], _forward(mixer, z[:, real], u[:, real])
        )
        require(
            error < TOLERANCE,
            type(mixer).__name__,
            "padding",
            f"padding on the {name} moved real tokens by {error:.1e}; "
            "honour window.valid_BL and positions_BL",
        )


def gradients(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Gradients in z, u and every parameter agree with finite differences in float64."""
    mixer = _make(spec, d_model)
    z, u = (part[:1, :4] for part in _inputs(mixer, d_model))
    parameters = dict(mixer.named_parameters())
    tensors = {"z": z.clone().requires_grad_(), "u": u.clone().requires_grad_(), **parameters}
    weights = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss() -> Tensor:
        return (_forward(mixer, tensors["z"], tensors["u"]) * weights).sum()

    found = torch.autograd.grad(loss(), list(tensors.values()), allow_unused=True)
    step, generator = 1e-6, torch.Generator().manual_seed(4)
    for (name, tensor), gradient in zip(tensors.items(), found, strict=True):
        direction = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            tensor += step * direction
            above = loss()
            tensor -= 2 * step * direction
            below = loss()
            tensor += step * direction
        numeric = float((above - below) / (2 * step))
        analytic = 0.0 if gradient is None else float((gradient * direction).sum())
        require(
            abs(numeric - analytic) <= 1e-6 * max(1.0, abs(numeric)),
            type(mixer).__name__,
            "gradients",
            f"along a random direction of {name} the gradient says {analytic:.8g}, "
            f"finite differences {numeric:.8g}",
        )


def copies(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that a deep copy, and a mixer that loads the state dict, compute the same."""
    mixer = _make(spec, d_model)
    z, u = _inputs(mixer, d_model)
    loaded: Mixer = build(spec, d_model=d_model).double()
    loaded.load_state_dict(mixer.state_dict())
    with torch.no_grad():
        expected = _forward(mixer, z, u)
        for name, other in (("deepcopy", copy.deepcopy(mixer)), ("state dict", loaded)):
            require(
                torch.equal(_forward(other, z, u), expected),
                type(mixer).__name__,
                name,
                "the copy computes something else; "
                "keep everything learned in parameters or persistent buffers",
            )


def meta_build(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that it builds on the meta device, and computes the same once it has loaded a state dict."""
    mixer = _make(spec, d_model)
    with torch.device("meta"):
        empty: Mixer = build(spec, d_model=d_model)
    on_meta = all(p.is_meta for p in empty.parameters())
    require(on_meta, type(mixer).__name__, "meta build", "a parameter was made on a device of its own choice")
    empty = empty.to_empty(device="cpu").double()
    for module in empty.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    require(
        all(bool(p.isfinite().all()) for p in empty.parameters()),
        type(mixer).__name__,
        "meta build",
        "reset_parameters must initialize every parameter of its module",
    )
    empty.load_state_dict(mixer.state_dict())
    z, u = _inputs(mixer, d_model)
    with torch.no_grad():
        require(
            torch.equal(_forward(empty, z, u), _forward(mixer, z, u)),
            type(mixer).__name__,
            "meta build",
            "something beyond parameters and persistent buffers was lost; make it in prepare",
        )


MIXER_CONTRACTS: dict[str, Callable[..., Any]] = {
    contract.__name__: contract
    for contract in (
        causality,
        window_splits,
        state_untouched,
        batch_independence,
        padding,
        gradients,
        copies,
        meta_build,
    )
}


def check_mixer(spec: MixerSpec, *, d_model: int = D_MODEL) -> None:
    """Run every contract on the mixer that the spec builds.

    Args:
        spec: a registered mixer spec that fits ``d_model``; small widths keep it fast.
        d_model: width of the residual stream.

    Raises:
        ContractError: naming the mixer, the contract and what to look at.

    """
    for contract in MIXER_CONTRACTS.values():
        contract(spec, d_model)
