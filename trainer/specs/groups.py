"""Word problems: their spec, and groups and monoids by name, generators or multiplication table. No torch.

Element order and composition follow the published state-tracking data (Schöne et al., "Implicit Language
Models are RNNs", ICML 2025): the permutations of S_n are in lexicographic order, so that index 0 is the
identity; A_n contains the even ones in the same order; composition is ``(a∘b)[i] = a[b[i]]``. Tables are
indexed ``table[a, b] = a∘b``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from implicit_blocks.specs import Spec
from trainer.data.notation import Notation, Permutation, named
from trainer.specs.data import DataSpec, Probability

Table = npt.NDArray[np.int32]


class Generators(Spec):
    """A permutation group given by generators."""

    generators: tuple[tuple[int, ...], ...]
    """Permutations of the numbers below n, each as the list of the images: [1, 0, 2] exchanges 0 and 1."""


Definition = str | Sequence[Sequence[int]] | Generators
"""A name, generators, or a multiplication table given by its rows."""

MAX_ORDER = 5040
"""Maximum group order, that of S7, whose table takes 100 MB; S8's would take 6.5 GB."""

MAX_POINTS = 12
"""Elements that move more points have no permutation here: a picture of one could not be read."""

MAX_MONOID = 256
"""Maximum order of a monoid or group given by a table; associativity is checked over all triples."""

PUBLISHED_MONOID: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (1, 3, 3, 3), (2, 1, 2, 3), (3, 3, 3, 3))
"""Rows of the published monoid, for E, A, B, X: E is the identity, X is absorbing.

The published source describes it as words over a and b without "aa", but the table is stricter, since A∘B is
X: a product of A's and B's is X unless A occurs only at its end. The published data follow the table.
"""

_MONOIDS = {"EABX": PUBLISHED_MONOID, "published": PUBLISHED_MONOID}
_FACTOR = re.compile(r"([SAZ])([0-9]{1,6})")
_GROUP_REMEDY = "use S_n, A_n or Z_n with a number, such as S5, A5 or Z7, a product such as A5xZ2, or a table"


@dataclass(frozen=True, eq=False)
class Algebra:
    """A finite set with an associative product and an identity: a monoid or a group.

    ``table[a, b]`` is the index of ``a∘b``, a read-only array of shape (order, order).
    """

    name: str
    table: Table
    identity: int

    @property
    def order(self) -> int:
        """Number of elements."""
        return int(self.table.shape[0])

    def compose(self, a: int, b: int) -> int:
        """Return the index of ``a∘b``."""
        return int(self.table[a, b])


def product(left: Algebra, right: Algebra) -> Algebra:
    """Return the direct product; the pair (a, b) has index ``right.order·a + b``."""
    size = left.order * right.order
    table = left.table[:, None, :, None] * right.order + right.table[None, :, None, :]
    return Algebra(
        name=f"{left.name}x{right.name}",
        table=_frozen(table.reshape(size, size)),
        identity=left.identity * right.order + right.identity,
    )


def group_order(definition: Definition) -> int:
    """Return the order of a group; for a group given by name, without building its table.

    Raises:
        ValueError: the name is not ``S_n``, ``A_n``, ``Z_n`` or a product of them, or the group has more than
            `MAX_ORDER` elements; for tables, as `group`.

    """
    if not isinstance(definition, str):
        return group(definition).order
    name, order = definition, 1
    for family, n in factors(name):
        # Clamped to avoid the factorial of a large n: 8! already exceeds the limit.
        symmetric = math.factorial(min(n, 12))
        order *= n if family == "Z" else symmetric if family == "S" else max(1, symmetric // 2)
        if order > MAX_ORDER:
            raise ValueError(
                f"group {name!r} has more than {MAX_ORDER} elements, too many for a composition table; "
                "choose a smaller one (S7, A7 and Z5040 are the largest)"
            )
    return order


def group(definition: Definition) -> Algebra:
    """Build a finite group from a name, generators or its table.

    Names are ``S5``, ``A5``, ``Z7``, or products such as ``A5xZ2``. The elements of a group given by
    generators are in lexicographic order, as those of S_n are. Index 0 is the identity. Z_n is 0 … n-1 under
    addition; in a product the index of the last factor varies fastest. ``rows[a][b]`` is the index of
    ``a∘b``.

    Raises:
        ValueError: as `group_order`; a table that does not define a monoid (see `monoid`), whose identity is
            not element 0, or with an element without an inverse.

    """
    if isinstance(definition, Generators):
        return _generated(definition)
    return _named_group(definition) if isinstance(definition, str) else _group_from_rows(definition)


@lru_cache(maxsize=8)
def _named_group(name: str) -> Algebra:
    group_order(name)
    result: Algebra | None = None
    for family, n in factors(name):
        factor = _cyclic(n) if family == "Z" else _permutations(n, even_only=family == "A")
        result = factor if result is None else product(result, factor)
    assert result is not None
    return Algebra(name=name, table=result.table, identity=result.identity)


def monoid(definition: str | Sequence[Sequence[int]]) -> Algebra:
    """Build a monoid from a name (``"EABX"``, also called ``"published"``) or its table.

    Names can be multiplied, as in ``"EABXxEABX"``. ``rows[a][b]`` is the index of ``a∘b``; the identity may
    have any index.

    Raises:
        ValueError: an unknown name; a table that is not square, has invalid entries, is not associative or
            has no two-sided identity; more than `MAX_MONOID` elements.

    """
    if not isinstance(definition, str):
        return _monoid_from_rows("table", definition)
    result: Algebra | None = None
    for part in definition.split("x"):
        if part not in _MONOIDS:
            raise ValueError(
                f"monoid {definition!r} is not known; use {' or '.join(_MONOIDS)}, or give a table of rows"
            )
        factor = _monoid_from_rows(part, _MONOIDS[part])
        if result is not None and result.order * factor.order > MAX_MONOID:
            raise ValueError(f"monoid {definition!r} has more than {MAX_MONOID} elements; use fewer factors")
        result = factor if result is None else product(result, factor)
    assert result is not None
    return result


def factors(name: str) -> list[tuple[str, int]]:
    """Return the factors of a group's name: S, A or Z, and a number.

    Raises:
        ValueError: an unknown name.

    """
    found = []
    for part in name.split("x"):
        match = _FACTOR.fullmatch(part)
        if match is None or int(match[2]) < 1:
            where = "" if part == name else f" (at {part!r})"
            raise ValueError(f"group {name!r} is not known{where}; {_GROUP_REMEDY}")
        found.append((match[1], int(match[2])))
    return found


def _cyclic(n: int) -> Algebra:
    index = np.arange(n, dtype=np.int32)
    return Algebra(f"Z{n}", _frozen((index[:, None] + index[None, :]) % n), 0)


def _permutations(n: int, *, even_only: bool) -> Algebra:
    elements = np.array(list(itertools.permutations(range(n))), dtype=np.int64)
    if even_only:
        inversions = sum(
            (elements[:, i] > elements[:, j]).astype(np.int64) for i, j in itertools.combinations(range(n), 2)
        )
        elements = elements[np.broadcast_to(np.asarray(inversions), len(elements)) % 2 == 0]
    return Algebra(f"{'A' if even_only else 'S'}{n}", _composed(elements), 0)


def _composed(elements: npt.NDArray[np.int64]) -> Table:
    """Return the composition table of permutations (order, n)."""
    # Sums of images with random 64-bit weights, distinct for all elements, allow a binary search.
    weights = np.random.Philox(key=elements.shape[1]).random_raw(elements.shape[1])
    codes = elements.astype(np.uint64) @ weights
    order = np.argsort(codes)
    codes = codes[order]
    assert (codes[1:] != codes[:-1]).all()
    table = np.empty((len(elements), len(elements)), dtype=np.int32)
    for index, a in enumerate(elements):
        table[index] = order[np.searchsorted(codes, a[elements].astype(np.uint64) @ weights)]
    return _frozen(table)


@lru_cache(maxsize=8)
def _generated(definition: Generators) -> Algebra:
    found = elements(definition)
    return Algebra(f"a group of {len(found)} permutations", _composed(np.array(found, dtype=np.int64)), 0)


def elements(definition: Generators) -> list[tuple[int, ...]]:
    """Return the elements of a permutation group in lexicographic order; the identity is the first.

    Raises:
        ValueError: there are no generators, one is not a permutation, or they generate too many elements.

    """
    generators = definition.generators
    if not generators:
        raise ValueError("a group needs at least one generator, such as [1, 0, 2]")
    points = len(generators[0])
    if not points:
        raise ValueError("generator 0 is empty; list the images of 0 to n - 1, such as [1, 0, 2]")
    for number, generator in enumerate(generators):
        if len(generator) != points or sorted(generator) != list(range(points)):
            raise ValueError(
                f"generator {number}, {list(generator)}, is not a permutation of 0 to {points - 1}; list "
                "each number once"
            )
    identity = tuple(range(points))
    found, fresh = {identity}, [identity]
    while fresh:
        products = {tuple(g[i] for i in element) for element in fresh for g in generators}
        fresh = [element for element in products if element not in found]
        found.update(fresh)
        if len(found) > MAX_ORDER:
            raise ValueError(
                f"the generators generate more than {MAX_ORDER} elements, too many for a composition table; "
                "choose others"
            )
    return sorted(found)


def _group_from_rows(rows: Sequence[Sequence[int]]) -> Algebra:
    algebra = _monoid_from_rows("table", rows, what="group")
    if algebra.identity != 0:
        raise ValueError(
            f"the identity of the group table is element {algebra.identity}, not 0; renumber the elements so "
            "that it is the first (tokens are set to the identity with probability p)"
        )
    without = np.flatnonzero((algebra.table != 0).all(axis=1))
    if without.size:
        raise ValueError(
            f"element {without[0]} of the group table has no inverse: no product with it is the identity, 0; "
            "correct the table, or use it as the monoid of another group"
        )
    return algebra


def _monoid_from_rows(name: str, rows: Sequence[Sequence[int]], *, what: str = "monoid") -> Algebra:
    size = len(rows)
    if not 1 <= size <= MAX_MONOID:
        raise ValueError(f"a {what} table must have 1 to {MAX_MONOID} rows, got {size}")
    for a, row in enumerate(rows):
        if not isinstance(row, Sequence | np.ndarray):
            raise ValueError(f"row {a} of the {what} table is {row!r}; expected a row of {size} indices")
        if len(row) != size:
            raise ValueError(
                f"the {what} table is not square: row {a} has {len(row)} entries but the table has "
                f"{size} rows; give {size} rows of {size} entries"
            )
        for b, entry in enumerate(row):
            if not isinstance(entry, int | np.integer) or isinstance(entry, bool) or not 0 <= entry < size:
                raise ValueError(
                    f"entry [{a}][{b}] of the {what} table is {entry!r}, not an element; "
                    f"entries must be indices from 0 to {size - 1}"
                )
    table = np.array(rows, dtype=np.int32)
    for a in range(size):
        left, right = table[table[a]], table[a][table]  # (a∘b)∘c and a∘(b∘c), over all b and c
        if not np.array_equal(left, right):
            b, c = (int(i) for i in np.argwhere(left != right)[0])
            raise ValueError(
                f"the {what} table is not associative: ({a}∘{b})∘{c} is {left[b, c]} but {a}∘({b}∘{c}) is "
                f"{right[b, c]}; correct the table (prefix products require associativity)"
            )
    index = np.arange(size)
    for e in range(size):
        if np.array_equal(table[e], index) and np.array_equal(table[:, e], index):
            return Algebra(name, _frozen(table), e)
    raise ValueError(
        f"the {what} table has no identity (an element whose row and column are the indices in order); "
        "add one"
    )


def _frozen(table: npt.NDArray[np.integer]) -> Table:
    result = np.ascontiguousarray(table, dtype=np.int32)
    result.setflags(write=False)
    return result


# ------------------------------------------------------------------------------------ permutations


def notation(definition: Definition, of_monoid: str | Sequence[Sequence[int]] | None = None) -> Notation:
    """Return the elements of a group, or of its product with a monoid.

    Raises:
        ValueError: as `group` and `monoid`.

    """
    of_group = group(definition)
    return named(of_group, None if of_monoid is None else monoid(of_monoid), _images(definition, of_group))


def _images(definition: Definition, group: Algebra) -> list[Permutation]:
    """Return the elements as permutations; an empty list where they would move too many points."""
    if isinstance(definition, Generators):
        return list(elements(definition)) if len(definition.generators[0]) <= MAX_POINTS else []
    if not isinstance(definition, str):  # every group acts on itself from the left
        return [tuple(map(int, row)) for row in group.table] if group.order <= MAX_POINTS else []
    found: list[Permutation] = [()]
    for family, size in factors(definition):
        if len(found[0]) + size > MAX_POINTS:
            return []
        found = [_beside(left, right) for left in found for right in _factor(family, size)]
    return found


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


# ------------------------------------------------------------------------------------ the spec


class WordProblemSpec(DataSpec):
    """Prefix products in a finite group, optionally times a monoid, generated on the fly."""

    changeable: ClassVar[frozenset[str]] = frozenset({"seq_len", "identity_probability"})

    kind: Literal["word_problem"] = "word_problem"
    group: str | Generators | tuple[tuple[int, ...], ...]
    """S_n, A_n, Z_n or a product: S3, A5, Z7, A5xZ2. Or a permutation group, as
    `{generators: [[1, 0, 2], [1, 2, 0]]}`, or a multiplication table whose first row is the identity."""
    monoid: str | tuple[tuple[int, ...], ...] | None = None
    """Monoid to multiply the group with: EABX (the published one), or a multiplication table."""
    identity_probability: Probability | Annotated[tuple[Probability, ...], Field(min_length=1)] = 0.5
    """Fraction of tokens forced to the group's identity; the others are uniform over the group. Several:
    they alternate from sequence to sequence."""
    draw_order: Literal["fast", "published"] = "fast"
    """`published` reproduces the random draws of the published generator exactly, at about a third of the
    speed."""

    @property
    def vocab_size(self) -> int:
        """|G|·|M|."""
        return group_order(self.group) * (1 if self.monoid is None else monoid(self.monoid).order)

    @property
    def group_name(self) -> str:
        """Name of the group, or `a table`."""
        if isinstance(self.group, Generators):
            return group(self.group).name
        return self.group if isinstance(self.group, str) else "a table"

    def notation(self) -> Notation:
        """Return the elements that the token IDs stand for."""
        return notation(self.group, self.monoid)

    @property
    def task(self) -> str:
        """Products in the group and in the monoid."""
        monoid = "EABX" if self.monoid == "published" else self.monoid
        group = self.group.generators if isinstance(self.group, Generators) else self.group
        return f"products in {group}" + ("" if monoid is None else f" times the monoid {monoid}")

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        named = self.monoid if isinstance(self.monoid, str) else "of a table"
        monoid = "" if self.monoid is None else f" x monoid {named}"
        p = self.identity_probability
        several = f"{p:g}" if isinstance(p, float) else ", ".join(f"{each:g}" for each in p)
        return [
            f"word problem over {self.group_name}{monoid}: {self.vocab_size} tokens, "
            f"p = {several}, length {self.seq_len}, generated on the fly"
        ]

    @field_validator("group", mode="before")
    @classmethod
    def _known_group(cls, value: object) -> object:
        if isinstance(value, Mapping):
            value = Generators.model_validate(value)
        if not isinstance(value, str | list | tuple | Generators):
            raise ValueError("a group must be a name such as S5, generators, or a multiplication table")
        group_order(value)
        return value

    @field_validator("monoid", mode="before")
    @classmethod
    def _known_monoid(cls, value: object) -> object:
        if value is not None:
            if not isinstance(value, str | list | tuple):
                raise ValueError("a monoid must be a name such as EABX or a multiplication table")
            monoid(value)
        return value
