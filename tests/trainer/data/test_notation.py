"""The elements behind token IDs: permutations that compose as the table does, names, and products."""

from __future__ import annotations

import pytest

from trainer.data.notation import cycles
from trainer.data.word_problem import WordProblem
from trainer.specs.groups import MAX_POINTS, notation

KLEIN = [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]


@pytest.mark.parametrize("group", ["S3", "A4", "Z5", "A4xZ2", "S3xS3", KLEIN], ids=str)
def test_permutations_compose_as_the_elements_do(group):
    found = notation(group)
    order = found.group.order
    assert len(set(map(tuple, found.permutations))) == len(set(found.names)) == order
    for a in range(order):
        for b in range(order):
            left, right = found.permutations[a], found.permutations[b]
            composed = tuple(left[point] for point in right)
            assert composed == tuple(found.permutations[found.group.compose(a, b)])


@pytest.mark.parametrize(("group", "monoid"), [("S3", None), ("A4", "EABX"), ("Z7", None)], ids=str)
def test_products_are_the_labels_of_the_word_problem(group, monoid):
    problem = WordProblem(group=group, monoid=monoid, identity_probability=0.2)
    inputs, labels = problem.sample(4, 9)
    found = notation(group, monoid)
    assert [found.products(row) for row in inputs.tolist()] == labels.tolist()


def test_names_are_cycles_with_the_element_of_the_monoid():
    assert notation("S3").names == ["e", "(2 3)", "(1 2)", "(1 2 3)", "(1 3 2)", "(1 3)"]
    assert cycles((1, 0, 3, 2)) == "(1 2)(3 4)"
    joint = notation("A4", "EABX")
    assert joint.names[:5] == ["e E", "e A", "e B", "e X", "(2 3 4) E"]
    assert joint.permutations[4] == joint.permutations[7] == (0, 2, 3, 1)


def test_large_groups_have_products_without_pictures():
    assert not notation("S6").names
    assert notation("S6").products([5, 7])[0] == 5
    wide = notation(f"Z{MAX_POINTS + 1}")
    assert not wide.permutations
    assert wide.names[3] == "g3"
