"""Groups and monoids: axioms, element order, and invalid definitions."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from implicit_blocks.specs import SpecError
from trainer.data.word_problem import build
from trainer.specs.groups import PUBLISHED_MONOID, Generators, group, group_order, monoid, product
from trainer.specs.run import WordProblemSpec

ORDERS = {
    "S1": 1,
    "S3": 6,
    "S4": 24,
    "S5": 120,
    "A2": 1,
    "A3": 3,
    "A4": 12,
    "A5": 60,
    "Z1": 1,
    "Z7": 7,
    "Z2xZ3": 6,
    "A5xZ2": 120,
    "S3xZ2xA4": 144,
}


@pytest.mark.parametrize("name", ORDERS)
def test_groups_have_their_order_an_identity_and_inverses(name: str) -> None:
    g = group(name)
    index = np.arange(g.order)
    assert g.order == group_order(name) == ORDERS[name]
    assert g.identity == 0
    assert np.array_equal(g.table[0], index)
    assert np.array_equal(g.table[:, 0], index)
    # A Latin square with an identity: every element has one inverse, on both sides.
    assert (np.sort(g.table, axis=0) == index[:, None]).all()
    assert (np.sort(g.table, axis=1) == index).all()


@settings(max_examples=200)
@given(name=st.sampled_from(sorted(ORDERS)), data=st.data())
def test_group_composition_is_associative(name: str, data: st.DataObject) -> None:
    g = group(name)
    a, b, c = (data.draw(st.integers(0, g.order - 1)) for _ in range(3))
    assert g.compose(g.compose(a, b), c) == g.compose(a, g.compose(b, c))


@pytest.mark.parametrize("name", ["S3", "S4", "A4", "S5", "A5"])
def test_permutations_are_lexicographic_and_compose_as_functions(name: str) -> None:
    n = int(name[1:])
    elements = list(itertools.permutations(range(n)))
    if name[0] == "A":
        elements = [p for p in elements if sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0]
    g = group(name)
    generator = np.random.default_rng(0)
    for a, b in generator.integers(0, g.order, (200, 2)):
        composed = tuple(elements[a][elements[b][i]] for i in range(n))
        assert g.compose(a, b) == elements.index(composed)


def test_the_last_factor_of_a_product_varies_fastest() -> None:
    g = group("Z2xS3")
    s3 = group("S3")
    for (a, b), (c, d) in itertools.product(itertools.product(range(2), range(6)), repeat=2):
        assert g.compose(6 * a + b, 6 * c + d) == 6 * ((a + c) % 2) + s3.compose(b, d)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Q8", r"group 'Q8' is not known; use S_n, A_n or Z_n"),
        ("", r"group '' is not known"),
        ("S0", r"group 'S0' is not known"),
        ("s3", r"group 's3' is not known"),
        ("A5xQ2", r"group 'A5xQ2' is not known \(at 'Q2'\)"),
        ("A5x", r"not known \(at ''\)"),
        ("S8", r"group 'S8' has more than 5040 elements"),
        ("S999999", r"more than 5040"),
        ("Z5041", r"more than 5040"),
        ("S6xS3xZ2", r"more than 5040"),
    ],
)
def test_unknown_groups_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(name)


@pytest.mark.parametrize("name", ["EABX", "published"])
def test_the_published_monoid_has_its_table(name: str) -> None:
    m = monoid(name)
    assert m.order == 4
    assert m.identity == 0
    assert m.table.tolist() == [list(row) for row in PUBLISHED_MONOID]
    assert monoid(PUBLISHED_MONOID).table.tolist() == m.table.tolist()


def test_the_published_monoid_allows_an_a_at_the_end_only() -> None:
    m = monoid("EABX")
    for word in itertools.chain.from_iterable(itertools.product((1, 2), repeat=n) for n in range(1, 8)):
        state = m.identity
        for letter in word:
            state = m.compose(state, letter)
        assert state == (3 if 1 in word[:-1] else word[-1])


def test_products_of_monoids_by_name() -> None:
    m = monoid("EABXxEABX")
    one = monoid("EABX")
    assert m.order == 16
    assert np.array_equal(m.table, product(one, one).table)


def test_the_identity_of_a_monoid_may_have_any_index() -> None:
    assert monoid([[1, 0], [0, 1]]).identity == 1


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("EAB", "monoid 'EAB' is not known; use EABX or published"),
        ("x".join(["EABX"] * 5), "more than 256 elements"),
        ([], "must have 1 to 256 rows, got 0"),
        ([[0, 1], [1]], "not square: row 1 has 1 entries"),
        ([[0, 1], [1, 2]], r"entry \[1\]\[1\] of the monoid table is 2, not an element"),
        ([[0, 1], [1, -1]], r"entry \[1\]\[1\] of the monoid table is -1"),
        ([[0, 1], [1, 0.5]], r"entry \[1\]\[1\] of the monoid table is 0.5"),
        (["01", "10"], r"entry \[0\]\[0\] of the monoid table is '0'"),
        ([0, 1], r"row 0 of the monoid table is 0; expected a row of 2 indices"),
        ([[0, 0], [0, 0]], "no identity"),
        ([[0, 1, 2], [1, 2, 0], [2, 1, 0]], r"not associative: \(1∘1\)∘1 is"),
    ],
)
def test_invalid_monoids_are_refused(definition: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        monoid(definition)  # type: ignore[arg-type]  # wrong on purpose


KLEIN = [[a ^ b for b in range(4)] for a in range(4)]


def test_a_group_by_its_table() -> None:
    klein = group(KLEIN)
    assert group_order(KLEIN) == klein.order == 4
    assert np.array_equal(klein.table, group("Z2xZ2").table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "a group table must have 1 to 256 rows, got 0"),
        ([[0, 1], [1, 2]], r"entry \[1\]\[1\] of the group table is 2, not an element"),
        ([[0, 1, 2], [1, 2, 0], [2, 1, 0]], r"the group table is not associative: \(1∘1\)∘1 is"),
        ([[0, 1], [1, 1]], "element 1 of the group table has no inverse"),
        ([[1, 0], [0, 1]], "is element 1, not 0; renumber the elements"),
        ([[0, 0], [0, 0]], "the group table has no identity"),
        ([0, 1], "row 0 of the group table is 0"),
    ],
)
def test_a_table_that_is_not_a_group_is_rejected(table: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(table)
    with pytest.raises(ValueError, match=message):
        WordProblemSpec(group=table, seq_len=4)


def test_a_group_given_by_table_equals_the_named_group() -> None:
    by_table, by_name = (
        WordProblemSpec(group=one, seq_len=6, identity_probability=0.3) for one in (KLEIN, "Z2xZ2")
    )
    assert by_table.vocab_size == by_name.vocab_size == 4
    assert by_table.describe(sequences=1, vocab_size=4)[0].startswith("word problem over a table: 4 tokens")
    first, second = (build(spec, seed=3).batch(0, 5) for spec in (by_table, by_name))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.labels, second.labels)
    with pytest.raises(ValueError, match="a group must be a name such as S5"):
        WordProblemSpec(group=5, seq_len=4)


def test_the_groups_import_no_torch() -> None:
    code = "import sys; import trainer.specs.groups; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "generators"),
    [
        ("S4", ((1, 0, 2, 3), (1, 2, 3, 0))),
        ("A5", ((1, 2, 0, 3, 4), (0, 1, 3, 4, 2))),
        ("Z7", ((1, 2, 3, 4, 5, 6, 0),)),
    ],
)
def test_generators_give_the_group_of_that_name(name, generators):
    spec = WordProblemSpec.model_validate({"group": {"generators": generators}, "seq_len": 8})
    assert spec.vocab_size == group(name).order
    assert np.array_equal(group(Generators(generators=generators)).table, group(name).table)
    assert WordProblemSpec.model_validate(spec.model_dump()) == spec
    assert build(spec).batch(0, 2).inputs.max() < spec.vocab_size


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ([], "at least one generator"),
        ([[]], "generator 0 is empty"),
        ([[1, 2, 3]], r"generator 0, \[1, 2, 3\], is not a permutation of 0 to 2; list each number once"),
        ([[0, 0]], r"generator 0, \[0, 0\], is not a permutation of 0 to 1"),
        ([[1, 0], [1, 2, 0]], "generator 1"),
        ([[1, 2, 3, 4, 5, 6, 7, 0], [1, 0, 2, 3, 4, 5, 6, 7]], "more than 5040 elements"),
    ],
)
def test_generators_that_give_no_group_are_refused(generators, message):
    with pytest.raises(SpecError, match=rf"(?s)group.*{message}"):
        WordProblemSpec.model_validate({"group": {"generators": generators}, "seq_len": 8})
