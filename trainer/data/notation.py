"""Token IDs of word problems as elements: their names, and the permutations that they stand for.

IDs are those of `trainer.data.word_problem`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.specs.groups import Algebra

Permutation = tuple[int, ...]
"""Images of 0, 1, …; ``(a∘b)[i] = a[b[i]]``."""

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
    group: Algebra
    monoid: Algebra | None

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


def named(group: Algebra, monoid: Algebra | None, permutations: Sequence[Permutation]) -> Notation:
    """Return the elements of a group, or of its product with a monoid.

    ``permutations`` are the group's elements, or empty.
    """
    name = group.name if monoid is None else f"{group.name}x{monoid.name}"
    order = group.order * (1 if monoid is None else monoid.order)
    if order > MAX_NAMED:
        return Notation(name, (), (), group, monoid)
    names = [cycles(each) for each in permutations] or [f"g{g}" for g in range(group.order)]
    if monoid is not None:
        letters = list("EABX") if monoid.name == "EABX" else [f"m{m}" for m in range(monoid.order)]
        permutations = [each for each in permutations for _ in letters]
        names = [f"{each} {letter}" for each in names for letter in letters]
    return Notation(name, names, permutations, group, monoid)


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
