"""The contracts of an initial state; each is a function of its spec.

``check_start(MySpec(...))`` runs all; ``START_CONTRACTS`` names them, to write one test each.

Shape legend: B batch, L tokens of a window, D model width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from implicit_blocks.registry import build
from implicit_blocks.specs import StartSpec
from implicit_blocks.starts.start import Start
from implicit_blocks.testing.contract import named, relative_error, require

ROWS, LENGTH, WIDTH, OTHER_WIDTH = 3, 10, 16, 24


def _build_start(spec: StartSpec, *, width: int = WIDTH) -> Start:
    torch.manual_seed(0)
    start: Start = build(spec, width=width)
    return start.eval()


def _inputs(seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return embedded tokens and the prelude's output, (B, L, D), and positions that differ by row."""
    generator = torch.Generator().manual_seed(seed)
    x, e = (torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return x, e, torch.arange(LENGTH) + torch.tensor([[0], [3], [40]])


def _run(
    start: Start, x: Tensor, e: Tensor, positions: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    z: Tensor = start(x_BLD=x, e_BLD=e, positions_BL=positions, width=start.width, dtype=dtype or x.dtype)
    return z


@torch.no_grad()
def shape_and_dtype(spec: StartSpec) -> None:
    """Check shape and type of the state, in training and evaluation, also with one row of positions."""
    start = _build_start(spec)
    x, e, positions = _inputs()
    for training in (False, True):
        start.train(training)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for places in (positions, positions[:1]):
                z = _run(start, x, e, places, dtype=dtype)
                require(
                    z.shape == (ROWS, LENGTH, WIDTH) and z.dtype == dtype and bool(z.isfinite().all()),
                    start,
                    "shape and dtype",
                    f"it returned {tuple(z.shape)} of {z.dtype} for {ROWS} rows, {LENGTH} tokens, width "
                    f"{WIDTH} and {dtype}; return finite values (B, L, width) of the requested type",
                )


@torch.no_grad()
def windows(spec: StartSpec) -> None:
    """Check that in evaluation windows and single tokens have the state of one pass."""
    start = _build_start(spec)
    x, e, positions = _inputs()
    whole = _run(start, x, e, positions)
    for cuts in ([4, LENGTH], list(range(1, LENGTH + 1))):
        edges = list(zip([0, *cuts], cuts, strict=False))
        parts = [_run(start, x[:, a:b], e[:, a:b], positions[:, a:b]) for a, b in edges]
        error = relative_error(torch.cat(parts, dim=1), whole)
        require(
            error < 1e-6,
            start,
            "windows",
            f"windows that end at {cuts} have another state than one pass, by {error:.1e}; in evaluation it "
            "must be a function of the token, its position and the channel",
        )


@torch.no_grad()
def rows_apart(spec: StartSpec) -> None:
    """Check that in evaluation a row's state does not depend on the other rows or their order."""
    start = _build_start(spec)
    x, e, positions = _inputs()
    whole, rows = _run(start, x, e, positions), torch.tensor([2, 0])
    error = relative_error(_run(start, x[rows], e[rows], positions[rows]), whole[rows])
    require(
        error < 1e-6,
        start,
        "rows apart",
        f"rows 2 and 0 alone have another state than in the batch, by {error:.1e}; use positions, not rows",
    )


@torch.no_grad()
def repeatable_evaluation(spec: StartSpec) -> None:
    """Check that evaluation repeats its values and leaves torch's global generator alone."""
    start = _build_start(spec)
    x, e, positions = _inputs()
    before = torch.get_rng_state()
    first = _run(start, x, e, positions)
    untouched = torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    require(
        untouched and torch.equal(_run(start, x, e, positions), first),
        start,
        "repeatable evaluation",
        "two calls differ, or the call uses torch's global generator; use Start.noise",
    )


@torch.no_grad()
def token_dependence(spec: StartSpec) -> None:
    """Check the spec's ``depends_on_tokens``."""
    start = _build_start(spec)
    x, e, positions = _inputs()
    (other_x, other_e, _) = _inputs(seed=2)
    changed = not torch.equal(_run(start, x, e, positions), _run(start, other_x, other_e, positions))
    require(
        changed == spec.depends_on_tokens,
        start,
        "token dependence",
        f"depends_on_tokens is {spec.depends_on_tokens}, but other tokens {'' if changed else 'do not '}"
        "change the state",
    )


@torch.no_grad()
def added_noise(spec: StartSpec) -> None:
    """Check the noise that ``noise_std`` adds, by its size and its generator in training."""
    x, e, positions = (part[:1].repeat(8, *([1] * (part.ndim - 1))) for part in _inputs())
    clean = _build_start(spec.model_copy(update={"noise_std": 0.0}))
    noisy = _build_start(spec.model_copy(update={"noise_std": 0.5}))
    size = float((_run(noisy, x, e, positions) - _run(clean, x, e, positions))[0].std())
    noisy.train()
    torch.manual_seed(5)
    first = _run(noisy, x, e, positions)
    second = _run(noisy, x, e, positions)
    torch.manual_seed(5)
    again = _run(noisy, x, e, positions)
    rows_differ = not torch.equal(first[0], first[1])
    require(
        0.35 < size < 0.65 and torch.equal(first, again) and not torch.equal(first, second) and rows_differ,
        noisy,
        "added noise",
        f"noise_std 0.5 gives noise of standard deviation {size:.2f} in evaluation; in training it must come "
        "from torch's global generator, new in each call and row; override point, not forward",
    )


def widths(spec: StartSpec) -> None:
    """Check that ``check`` refuses the widths that the module refuses, and names both."""
    x, e, positions = _inputs()
    messages = []
    for run in (
        lambda: spec.check(WIDTH, OTHER_WIDTH),
        lambda: _run(_build_start(spec, width=OTHER_WIDTH), x, e, positions),
    ):
        try:
            run()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    equal = bool(messages[0]) == bool(messages[1])
    both = all(str(WIDTH) in text and str(OTHER_WIDTH) in text for text in messages if text)
    require(
        equal and both,
        spec,
        "widths",
        f"for a core of width {OTHER_WIDTH} and d_model {WIDTH}, check gives {messages[0]!r} and the module "
        f"{messages[1]!r}; both must accept the widths, or refuse them and name both",
    )
    spec.check(WIDTH, WIDTH)


@torch.no_grad()
def copies(spec: StartSpec) -> None:
    """Check deep copies, state dicts, the meta device and the spec's ``parameter_count``."""
    start = _build_start(spec)
    for parameter in start.parameters():
        parameter.normal_()
    x, e, positions = _inputs()
    expected = _run(start, x, e, positions)
    with torch.device("meta"):
        empty: Start = build(spec, width=WIDTH)
    loaded = empty.to_empty(device="cpu").eval()
    loaded.load_state_dict(start.state_dict())
    same = [torch.equal(_run(other, x, e, positions), expected) for other in (copy.deepcopy(start), loaded)]
    require(
        all(same),
        start,
        "copies",
        "a deep copy, or a module built on the meta device that loads the state dict, gives another state; "
        "store everything learned in parameters",
    )
    counted = sum(parameter.numel() for parameter in start.parameters())
    require(
        counted == spec.parameter_count(WIDTH),
        start,
        "copies",
        f"parameter_count({WIDTH}) returns {spec.parameter_count(WIDTH)}, but there are {counted} parameters",
    )


START_CONTRACTS: dict[str, Callable[[StartSpec], None]] = named(
    (
        shape_and_dtype,
        windows,
        rows_apart,
        repeatable_evaluation,
        token_dependence,
        added_noise,
        widths,
        copies,
    )
)


def check_start(spec: StartSpec) -> None:
    """Run every contract on the initial state that a registered spec builds.

    Raises:
        ContractError: names the component, the broken contract and a remedy.

    """
    for contract in START_CONTRACTS.values():
        contract(spec)
