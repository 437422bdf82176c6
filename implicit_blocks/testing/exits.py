"""The contracts of an exit criterion; each is a function of a criterion or its spec.

``check_exit(MySpec(...))`` runs all; ``EXIT_CONTRACTS`` names them, to write one test each. A criterion that
reads a model is bound to a small readout, unless it is bound already.

Shape legend: E elements of a search, F features of an element, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.exits.exit import Exit, Readout
from implicit_blocks.registry import build
from implicit_blocks.search.search import Search
from implicit_blocks.solution import Solution
from implicit_blocks.solvers.picard import Picard
from implicit_blocks.specs import ExitSpec, Stopping
from implicit_blocks.testing.contract import named, relative_error, require

ROWS, TOKENS, FEATURES, WORDS = 4, 6, 8, 7
MOST_CALLS = 400


@dataclass(frozen=True)
class CausalMap:
    """``f(z)_t = r_t tanh(z_t W + z_{t-1} / 2) + x_t``, a contraction with another rate r for each token.

    A ``RowMap`` and a ``SequenceMap``: x is (B, T, F), r (B, T, 1), and ``before`` (B, 1, F) the solution of
    the token before the first one.
    """

    weight: Tensor
    rate: Tensor
    offset: Tensor
    before: Tensor

    @classmethod
    def random(cls, *, seed: int = 0) -> CausalMap:
        """Return a map of 4 rows and 6 tokens in float64, whose rows converge one after the other."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(FEATURES, FEATURES, dtype=torch.float64, generator=generator)
        offset = torch.randn(ROWS, TOKENS, FEATURES, dtype=torch.float64, generator=generator)
        share = torch.rand(ROWS, TOKENS, 1, dtype=torch.float64, generator=generator)
        rows = torch.linspace(0.2, 0.8, ROWS, dtype=torch.float64)[:, None, None]
        weight = weight / torch.linalg.matrix_norm(weight, ord=2)
        return cls(weight, rows + 0.1 * share, offset, torch.zeros_like(offset[:, :1]))

    def __call__(self, z: Tensor) -> Tensor:
        """Return ``f(z)``, (B, T, F)."""
        previous = torch.cat((self.before, z[:, :-1]), dim=1)
        # A sum over features instead of a matrix product, whose rounding depends on the number of tokens.
        mixed = (z[..., None] * self.weight).sum(-2)
        return self.rate * torch.tanh(mixed + previous / 2) + self.offset

    def select_rows(self, rows: Tensor) -> CausalMap:
        """Return the map of these rows, (R,) int64."""
        return CausalMap(self.weight, self.rate[rows], self.offset[rows], self.before[rows])

    def first(self, tokens: int) -> CausalMap:
        """Return the map of the first tokens."""
        return replace(self, rate=self.rate[:, :tokens], offset=self.offset[:, :tokens])

    def after(self, z: Tensor) -> CausalMap:
        """Return the map of the tokens after those with the solution ``z`` (B, T, F)."""
        tokens = z.shape[1]
        return replace(
            self, rate=self.rate[:, tokens:], offset=self.offset[:, tokens:], before=z[:, tokens - 1 :]
        )


def small_readout() -> Readout:
    """Return predictions of 7 words and a gate, as functions of single points (E, F)."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(FEATURES, WORDS, dtype=torch.float64, generator=generator)
    gate = 0.3 * torch.randn(FEATURES, dtype=torch.float64, generator=generator)
    return Readout(
        predict=lambda points: (points[..., None] * head.to(points.dtype)).sum(-2),
        gate=lambda points: (points * gate.to(points.dtype)).sum(-1),
    )


def _built(subject: Exit | ExitSpec) -> Exit:
    criterion = build(subject) if isinstance(subject, ExitSpec) else subject
    require(isinstance(criterion, Exit), criterion, "is an Exit", "pass an instance of implicit_blocks.Exit")
    if isinstance(subject, ExitSpec):
        require(
            (subject.per_token, subject.reads) == (criterion.per_token, criterion.reads),
            criterion,
            "is an Exit",
            f"per_token and reads are {subject.per_token} and {subject.reads} in the spec, "
            f"{criterion.per_token} and {criterion.reads} in the criterion",
        )
    return criterion if criterion.readout is not None else criterion.bind(small_readout())


def _search(criterion: Exit, f: CausalMap, **options: Any) -> Solution:
    most = max(MOST_CALLS, criterion.exact_calls or 0)
    stopping = Stopping(tolerance=1e-5, max_iterations=most, scope="prefix")
    search = Search(solver=Picard(), stopping=stopping, exit=criterion, **{"compact": False, **options})
    return search(f, torch.zeros_like(f.offset))


def _calls(criterion: Exit, elements: int = ROWS) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the points, values and residuals of five calls, for elements of one token."""
    f = CausalMap.random().first(1).select_rows(torch.arange(elements) % ROWS)
    z, calls = torch.zeros_like(f.offset), []
    for _ in range(5):
        fz = f(z)
        residual = (fz - z).norm(dim=-1) / fz.norm(dim=-1)
        calls.append((z[:, 0], fz[:, 0], residual))
        z = fz
    return calls


def state_layout(subject: Exit | ExitSpec) -> None:
    """Check the measure's shape, that the state leads with the elements, and that no argument changes."""
    criterion = _built(subject)
    calls = _calls(criterion)
    state = criterion.init(calls[0][0])
    for z, fz, residual in calls:
        arguments = [z, fz, residual, *pytree.tree_leaves(state)]
        require(
            all(isinstance(leaf, Tensor) and leaf.shape[:1] == (ROWS,) for leaf in arguments),
            criterion,
            "state layout",
            "every leaf of the state must be a tensor that leads with the elements, counters included",
        )
        copies = [argument.clone() for argument in arguments]
        measure, after = criterion.measure(z, fz, residual, state)
        require(
            isinstance(measure, Tensor) and measure.shape == (ROWS, 1) and bool(measure.isfinite().all()),
            criterion,
            "state layout",
            f"measure must return finite numbers ({ROWS}, 1), UNDECIDED before it can decide",
        )
        require(
            all(torch.equal(a, b) for a, b in zip(arguments, copies, strict=True)),
            criterion,
            "state layout",
            "measure must return a new state and must not modify its arguments",
        )
        (old, old_form), (new, new_form) = pytree.tree_flatten(state), pytree.tree_flatten(after)
        require(
            old_form == new_form
            and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(old, new, strict=True)),
            criterion,
            "state layout",
            "structure, shapes and types of the state must stay as init creates them",
        )
        state = after


def elements_apart(subject: Exit | ExitSpec) -> None:
    """Check that an element's measure does not depend on the others, one of which is NaN or left out."""
    criterion = _built(subject)
    calls, rows = _calls(criterion), torch.tensor([3, 1])
    clean = dirty = few = criterion.init(calls[0][0])
    few = pytree.tree_map(lambda leaf: leaf[rows], few)
    for number, (z, fz, residual) in enumerate(calls):
        poisoned = fz.clone()
        poisoned[0] = torch.nan if number > 1 else fz[0]
        expected, clean = criterion.measure(z, fz, residual, clean)
        found, dirty = criterion.measure(z, poisoned, residual, dirty)
        alone, few = criterion.measure(z[rows], fz[rows], residual[rows], few)
        error = max(relative_error(found[1:], expected[1:]), relative_error(alone, expected[rows]))
        require(
            error < 1e-9,
            criterion,
            "elements apart",
            f"other elements change a measure by {error:.1e}; reduce over features, not over elements, and "
            "keep all memory in the state",
        )


def met(subject: Exit | ExitSpec) -> None:
    """Check that a contraction meets the criterion, and that the solution reports its value's residual."""
    criterion = _built(subject)
    f = CausalMap.random()
    solution = _search(criterion, f, trace=True)
    require(
        bool(solution.converged.all()),
        criterion,
        "met",
        f"{int(solution.converged.sum())} of {ROWS} rows met it in {MOST_CALLS} calls of a contraction; the "
        "measure must reach the threshold at a fixed point",
    )
    assert solution.trace is not None
    assert solution.token_iterations is not None
    assert solution.token_residual is not None
    last = solution.trace.gather(0, solution.token_iterations[None] - 1)[0]
    require(
        relative_error(solution.token_residual, last) < 1e-6,
        criterion,
        "met",
        "the value returned must be that of the call in which a token leaves; let the measure fall below all "
        "measures before it",
    )


def causality(subject: Exit | ExitSpec) -> None:
    """Check that later tokens change neither the value nor the exit of an earlier one."""
    criterion = _built(subject)
    f = CausalMap.random()
    cut = TOKENS // 2
    offset = f.offset.clone()
    offset[:, cut:] += 3.0
    whole, changed = (_search(criterion, g) for g in (f, replace(f, offset=offset)))
    _require_same(criterion, "causality", whole, changed, "later tokens", tokens=cut)


def batch_mates(subject: Exit | ExitSpec) -> None:
    """Check that a row alone has the values and exits that it has in a batch."""
    criterion = _built(subject)
    f = CausalMap.random()
    whole = _search(criterion, f)
    for row in range(ROWS):
        index = torch.tensor([row])
        alone = _search(criterion, f.select_rows(index))
        _require_same(criterion, "batch mates", whole, alone, "the other rows", rows=index)


def compaction(subject: Exit | ExitSpec) -> None:
    """Check that rows and tokens that leave the working set change neither values nor exits."""
    criterion = _built(subject)
    f = CausalMap.random()
    whole = _search(criterion, f)
    for what, options in (("dropped rows", {"compact": True}), ("committed tokens", {"commit_prefix": 1})):
        found = _search(criterion, f, **options)
        _require_same(criterion, "compaction", whole, found, what)


def _require_same(
    criterion: Exit,
    contract: str,
    expected: Solution,
    found: Solution,
    what: str,
    *,
    tokens: int = TOKENS,
    rows: Tensor | None = None,
) -> None:
    index = torch.arange(ROWS) if rows is None else rows
    assert expected.token_iterations is not None
    assert found.token_iterations is not None
    error = relative_error(found.z[:, :tokens], expected.z[index, :tokens])
    same = torch.equal(found.token_iterations[:, :tokens], expected.token_iterations[index, :tokens])
    require(
        same and error < 1e-9,
        criterion,
        contract,
        f"{what} change the values by {error:.1e}{'' if same else ' and the number of calls'}; measure each "
        "element by itself, with all memory in the state",
    )


EXIT_CONTRACTS: dict[str, Callable[[Exit | ExitSpec], None]] = named(
    (state_layout, elements_apart, met, causality, batch_mates, compaction)
)


def check_exit(subject: Exit | ExitSpec) -> None:
    """Run every contract on an exit criterion, or on the one that a registered spec builds.

    Raises:
        ContractError: names the criterion, the broken contract and a remedy.

    """
    for contract in EXIT_CONTRACTS.values():
        contract(subject)
