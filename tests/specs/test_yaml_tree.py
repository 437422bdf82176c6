"""YAML with places: values, places, merging, and rejected input."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from implicit_blocks.specs import tree as tree_module
from implicit_blocks.specs.loading import merge
from implicit_blocks.specs.tree import Place, SpecError, dump_yaml, parse_yaml, place_of, read_yaml

NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
integers = st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | integers | st.floats(allow_nan=False) | texts
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


@given(trees)
@example({"0E0": ["0E0"]})  # a number in YAML 1.2, which PyYAML does not quote
def test_parse_yaml_reads_what_pyyaml_writes(tree: object) -> None:
    assert parse_yaml(yaml.safe_dump(tree), source="x") == as_yaml_1_2(tree)


def as_yaml_1_2(tree: object) -> object:
    """Return a tree in which texts that PyYAML writes unquoted are the numbers that YAML 1.2 reads."""
    if isinstance(tree, dict):
        return {key: as_yaml_1_2(value) for key, value in tree.items()}  # keys are texts
    if isinstance(tree, list):
        return [as_yaml_1_2(value) for value in tree]
    if isinstance(tree, str) and yaml.safe_dump(tree).startswith(tree) and NUMBER.fullmatch(tree):
        return float(tree)
    return tree


@given(st.dictionaries(texts, trees, max_size=3))
def test_parse_yaml_reads_what_dump_yaml_writes(tree: dict[str, object]) -> None:
    assert parse_yaml(dump_yaml(tree), source="x") == tree


def test_numeric_strings_and_infinities_round_trip() -> None:
    tree = {"a": "1e-3", "b": "0o17", "c": [0.001, math.inf, -math.inf], "d": "yes", "e": 1e-5}
    assert parse_yaml(dump_yaml(tree), source="x") == tree
    assert math.isnan(parse_yaml(dump_yaml({"a": math.nan}), source="x")["a"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3E4", 3e4),
        ("207e9", 207e9),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("0x10", 16),
        ("0o10", 8),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("True", True),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("1e-3x", "1e-3x"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text, source="x")
    assert parsed == value
    assert type(parsed) is type(value)


def test_keys_values_and_list_elements_have_places() -> None:
    tree = parse_yaml("a:\n  b: 1\n  c: [x, {d: 2}]\n", source="f.yaml")
    assert str(place_of(tree, ("a", "b"))) == "f.yaml:2:6"
    assert str(place_of(tree, ("a", "b"), key=True)) == "f.yaml:2:3"
    assert str(place_of(tree, ("a", "c", 1, "d"))) == "f.yaml:3:14"
    assert str(place_of(tree, ("a", "c", 0))) == "f.yaml:3:6"
    assert str(place_of(tree, ("a", "nothing"))) == "f.yaml:2:3"
    assert place_of(tree, ("nothing",)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "f:1:9: not valid YAML"),
        ("a: 1\n b: 2", "f:2:3: not valid YAML"),
        ("a:\n\t- 1", "f:2:1: not valid YAML"),
        ("a: 1\na: 2", "f:2:1: key 'a' is given twice, first at f:1:1; keep one"),
        ("a: &x [*x]", "f:1:4: an anchor that contains itself"),
        ("a: *x", "f:1:4: not valid YAML: found undefined alias"),
        ("a: !!python/object:os.system {}", "is not supported"),
        ("a: !tuple [1]", "f:1:4: tag '!tuple' is not supported"),
        ("a: !!int x", "f:1:4: 'x' is not a valid int"),
        ("a: !!int ٣", "f:1:4: '٣' is not a valid int"),
        ("a: !!bool yes", "f:1:4: 'yes' is not a valid bool; write true or false"),
        ("a: !!null x", "f:1:4: 'x' is not a valid null; write null"),
        ("a: 1\nb: 18446744073709551616", "f:2:4: '18446744073709551616' is outside the range of 64-bit"),
        (f"a: {'9' * 5000}", "(5,002 characters) is outside the range of 64-bit integers"),
        ('a: 1\nb: "\\UFFFFFFFF"', "f:2:7: not valid YAML: an escape or directive whose number is out of"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "not valid YAML: an escape or directive whose number"),
        ('a: "\\uD800"', "f:1:4: '\\ud800' contains NUL or a surrogate; remove it"),
        ('a: "\\0"', "f:1:4: '\\x00' contains NUL or a surrogate; remove it"),
        ("a: " + "[" * 2000, "f:1:67: not valid YAML: nested more than 64 levels deep"),
        ("- " * 2000, "not valid YAML: nested more than 64 levels deep"),
        ("a: !!map x", "f:1:4: tag 'tag:yaml.org,2002:map' is not supported"),
        ("{a: 1}: 2", "f:1:1: a key must be a scalar"),
        ("a: 1\n---\nb: 2", "f:2:1: not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_invalid_yaml_is_rejected_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, source="f")
    assert message in str(caught.value)


def test_more_values_than_allowed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree_module.MAX_VALUES == 100_000
    monkeypatch.setattr(tree_module, "MAX_VALUES", 1_000)  # so many values take seconds
    assert parse_yaml("[" + "a," * 1_000 + "]", source="f") == ["a"] * 1_000
    with pytest.raises(SpecError, match="not valid YAML: more than 1,000 values"):
        parse_yaml("[" + "a," * 2_001 + "]", source="f")


def test_expanded_aliases_are_counted() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    with pytest.raises(SpecError, match=r"f:1:\d+: the spec has more than 100,000 values once its aliases"):
        parse_yaml("\n".join(levels), source="f")
    nested = "a0: &a0 {a: {a: {a: {a: 1}}}}\n" + "\n".join(
        f"a{n}: &a{n} {{a: *a{n - 1}}}" for n in range(1, 100)
    )
    with pytest.raises(SpecError, match="nested more than 64 levels deep"):
        parse_yaml(nested, source="f")


def test_explicit_tags_are_read() -> None:
    tags = {"!!null ~": None, "!!null ''": None, "!!bool True": True, "!!int 0x10": 16, "!!float 5": 5.0}
    for text, value in tags.items():
        assert parse_yaml(text, source="f") == value


def test_anchors_are_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x", source="f") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f:1:1: a spec is a mapping"),
        (b"- 1", "f:1:1: a spec is a mapping"),
        (b"a: \xff", "f: byte 3 is not UTF-8"),
    ],
)
def test_a_file_without_a_mapping_is_rejected(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_yaml(path, name="f")


def test_a_file_that_is_too_large_is_rejected(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_text("# \n" * (1 << 20))
    with pytest.raises(SpecError, match="f: a spec file has at most 1,048,576 bytes, and this one has more"):
        read_yaml(path, name="f")


def test_a_directory_is_rejected(tmp_path) -> None:
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path, name="folder")


def test_merging_keeps_places_and_does_not_change_its_arguments() -> None:
    base = parse_yaml("a: {b: 1, c: 2}\nd: [1]", source="base")
    over = parse_yaml("a: {c: 3}\nd: [2, 3]", source="over")
    merged = merge(base, over)
    assert merged == {"a": {"b": 1, "c": 3}, "d": [2, 3]}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1]}
    assert place_of(merged, ("a", "b")) == Place("base", 1, 8)
    assert place_of(merged, ("a", "c")) == Place("over", 1, 8)


def test_a_mapping_of_another_kind_replaces() -> None:
    base = {"solver": {"kind": "picard", "damping": 0.5}}
    assert merge(base, {"solver": {"kind": "anderson"}}) == {"solver": {"kind": "anderson"}}
    assert merge(base, {"solver": {"kind": "picard"}}) == base
    assert merge(base, {"solver": {"damping": 0.8}}) == {"solver": {"kind": "picard", "damping": 0.8}}
    assert merge(base, {"solver": None}) == {"solver": None}


@given(trees.filter(lambda tree: isinstance(tree, dict)))
def test_merging_with_itself_or_nothing_changes_nothing(tree: dict[str, object]) -> None:
    assert merge(tree, {}) == tree == merge({}, tree) == merge(tree, tree)
