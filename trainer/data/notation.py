"""Token IDs of word problems as elements: their names, and the permutations that they stand for.

IDs are those of `trainer.data.word_problem`. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.data import groups

Permutation = tuple[int, ...]
"""Images of 0, 1, …; ``(a∘b)[i] = a[b[i]]``."""

MAX_POINTS = 12
"""Elements that move more points have no permutation here: a picture of one could not be read."""
MAX_NAMED = 256
"""Maximum number of elements that are listed."""


@dataclass(frozen=True, eq=False)
class Notation:
    """The elements of a word problem by token ID.

    ``names`` and ``permutations`` are empty for more than `MAX_NAMED` elements, and ``permutations`` also
    where they would move too many points.
    """

    name: str
    names: Sequence[str]
    permutations: Sequence[Permutation]
    group: groups.Algebra
    monoid: groups.Algebra | None

    def products(self, tokens: Sequence[int]) -> list[int]:
        """Return the product of the tokens up to each, the labels of the word problem."""
        size = 1 if self.monoid is None else self.monoid.order
        found: list[int] = []
        for token in tokens:
            if found:
                left, right = divmod(found[-1], size), divmod(token, size)
                both = self.group.compose(left[0], right[0]) * size
                token = both + (0 if self.monoid is None else self.monoid.compose(left[1], right[1]))
            found.append(token)
        return found


def notation(group: groups.Definition, monoid: str | Sequence[Sequence[int]] | None = None) -> Notation:
    """Return the elements of a group, or of its product with a monoid.

    Raises:
        ValueError: as `groups.group` and `groups.monoid`.

    """
    of_group = groups.group(group)
    of_monoid = None if monoid is None else groups.monoid(monoid)
    name = of_group.name if of_monoid is None else f"{of_group.name}x{of_monoid.name}"
    order = of_group.order * (1 if of_monoid is None else of_monoid.order)
    if order > MAX_NAMED:
        return Notation(name, (), (), of_group, of_monoid)
    permutations = _permutations(group, of_group)
    names = [cycles(each) for each in permutations] or [f"g{g}" for g in range(of_group.order)]
    if of_monoid is not None:
        letters = list("EABX") if of_monoid.name == "EABX" else [f"m{m}" for m in range(of_monoid.order)]
        permutations = [each for each in permutations for _ in letters]
        names = [f"{each} {letter}" for each in names for letter in letters]
    return Notation(name, names, permutations, of_group, of_monoid)


def cycles(permutation: Permutation) -> str:
    """Return a permutation in cycle notation, points from 1: ``(1 2)(3 4 5)``; ``e`` is the identity."""
    seen: set[int] = set()
    found = ""
    for start in range(len(permutation)):
        cycle, point = [], start
        while point not in seen:
            seen.add(point)
            cycle.append(str(point + 1))
            point = permutation[point]
        if len(cycle) > 1:
            found += f"({' '.join(cycle)})"
    return found or "e"


def _permutations(definition: groups.Definition, group: groups.Algebra) -> list[Permutation]:
    if isinstance(definition, groups.Generators):
        return list(groups.elements(definition)) if len(definition.generators[0]) <= MAX_POINTS else []
    if not isinstance(definition, str):  # every group acts on itself from the left
        return [tuple(map(int, row)) for row in group.table] if group.order <= MAX_POINTS else []
    elements: list[Permutation] = [()]
    for family, size in groups.factors(definition):
        if len(elements[0]) + size > MAX_POINTS:
            return []
        elements = [_beside(left, right) for left in elements for right in _factor(family, size)]
    return elements


def _factor(family: str, size: int) -> Iterator[Permutation]:
    if family == "Z":
        yield from (tuple((point + shift) % size for point in range(size)) for shift in range(size))
        return
    for permutation in itertools.permutations(range(size)):
        inversions = sum(a > b for a, b in itertools.combinations(permutation, 2))
        if family == "S" or inversions % 2 == 0:
            yield permutation


def _beside(left: Permutation, right: Permutation) -> Permutation:
    return (*left, *(len(left) + point for point in right))
