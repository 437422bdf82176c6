"""Random specs: each is either read, described, counted and written, or refused with a `SpecError`.

The number of a case determines its spec file and overrides, which are mutations of a spec of the zoo, as text
or as a tree. To run one case: ``FUZZ_CASE=1234 pytest tests/fuzzing/test_spec_fuzzing.py``.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from implicit_blocks import registry
from implicit_blocks.describing import changes, draw_run
from implicit_blocks.describing.drawing import show
from implicit_blocks.specs import SpecError, load_spec, resolve, zoo_names
from implicit_blocks.specs.counting import count_parameters
from implicit_blocks.specs.loading import zoo_folder
from implicit_blocks.specs.tree import dump_yaml
from trainer.estimate.dry_run import dry_run_report

CASES = int(os.environ.get("FUZZ_CASES", "10000"))
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    10**6,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -(10**30),
    0.0,
    -0.0,
    0.5,
    1.5,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "x",
    "picard",
    "null",
    "S3",
    "A5",
    "S12",
    "S99",
    "A20",
    "Z100000",
    "Z99999999999",
    "S3xS3xS3",
    "A5xA5xA5xA5",
    "Z2xZ2",
    "yes",
    "1e-3",
    "x" * 300,
    "x" * 5000,
    "\x00",
    "\ud800",
    "é",
    "🙂",
    "/",
    ".",
    "..",
    "a/b",
    "word_problem_s3",
    "~",
    "1 tokens",
    "2e9 tokens",
    "50%",
    "auto",
    "1e400",
    "9" * 5000,
    [],
    {},
    [[]],
    {"": {}},
    ["x"] * 3,
    [1, 2, 3],
    [-1],
    [0.5],
    [None],
    {"kind": "picard"},
    {"kind": "anderson", "memory": 3},
    {"kind": "attention", "n_heads": 2},
    {"kind": "mamba2"},
    {"kind": []},
    {"kind": {}},
    {"kind": "explicit_lm"},
    {"kind": "implicit_lm"},
    {"kind": None},
    {"kind": "transformers", "architecture": "llama"},
    {"kind": "word_problem", "group": "A4", "seq_len": 8},
    {"kind": "tokens", "path": "x", "seq_len": 8},
    {"kind": "mixture", "seq_len": 8, "sources": []},
    {"kind": "unrolled", "steps": 2},
    {"kind": "jacobian_penalty"},
    {"kind": "jacobian_penalty", "gradient": {"kind": "jacobian_penalty"}},
    {"kind": "implicit_function"},
    {"kind": "hybrid", "mixers": {}},
    {"name": "a"},
    {"name": "a", "until": 0.5},
    [{"name": "a"}, {"name": "a"}],
]
TOKENS = [
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    "- ",
    "? ",
    "|",
    ">",
    "&a ",
    "*a",
    "!!bool yes",
    "!!null x",
    "!!int 3x",
    "!!float 1",
    "!!python/object:os.system ",
    "!!binary x",
    "! ",
    "!<x> ",
    "%YAML 1.2\n---\n",
    "---\n",
    "...\n",
    "\t",
    "\n",
    "\r",
    "#",
    "'",
    '"',
    '"\\UFFFFFFFF"',
    '"\\uD800"',
    '"\\x00"',
    "\x00",
    "\ufeff",
    "\x85",
    "\u2028",
    "<<: *a",
    "9" * 5000,
    "1e999",
    ".inf",
    ".nan",
    "-.inf",
    "[" * 2000,
    "{a: " * 2000,
    "- " * 2000,
    "extends: ",
    "extends: [x, x]\n",
    "kind: ",
    "x" * 2000,
    "é",
    "\\",
    "@",
    "`",
    "0x",
    "0o",
    "1_",
    "~",
]
PATHS = ["model", "data", "training", "phases", "evaluation", "callbacks", "kind", "extends"]


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for key, value in entries for found in _paths(value, (*path, key)))]


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list) else tree


def _fields(spec: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the paths of all fields of a spec, with their values as YAML has them."""
    found = []
    dumped = spec.model_dump(mode="json")
    for name, value in spec:
        found.append((f"{path}{name}", dumped[name]))
        if hasattr(type(value), "model_fields"):
            found += _fields(value, f"{path}{name}.")
    return found


def _near(value: Any, rng: random.Random) -> Any:
    """Return a plausible replacement of a value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            [1, 2, 3, value + 1, 2 * value, value // 2, 10 * value, 2**20, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
        )
    if isinstance(value, float):
        return rng.choice([value / 2, value * 2, 1e-12, 5e-324, 1e300, 1.0, 0.0, 0.999999, 1])
    if value is None:
        return rng.choice([1, 8, 2**40, 0.5, 1e-4, 1e300, "prefix", "absolute", True, {}, "x"])
    if isinstance(value, str) and rng.random() < 0.4:
        return value
    if isinstance(value, str):
        return rng.choice(
            [
                value,
                "none",
                "auto",
                "prefix",
                "sequence",
                "relative",
                "absolute",
                "torch",
                "bfloat16",
                "A4",
                "S5",
                "A5xZ2",
                "Z100",
                "Z5000",
                "EABX",
                "embedding",
                "steps",
                "layers",
                "50%",
                "3 steps",
            ]
        )
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(sorted(value))
        return {**value, key: _near(value[key], rng)}
    if isinstance(value, list):
        return rng.choice([[], value * 2, value[:1], [_near(entry, rng) for entry in value]])
    return rng.choice(
        [
            {},
            {"kind": "anderson"},
            {"kind": "picard", "damping": 0.5},
            {"kind": "attention", "n_heads": 4},
            {"kind": "unrolled", "steps": 2**62},
            {"kind": "implicit_function"},
            {"kind": "phantom", "steps": 2**40},
            {"kind": "mamba2", "head_dim": 1, "d_state": 2**60},
            {"kind": "swiglu", "d_ff": 2**62},
            value,
        ]
    )


class Maker:
    """Creates the spec and the overrides of a case."""

    def __init__(self) -> None:
        self.names = names = sorted(zoo_names())
        self.trees = [_plain(resolve(name)) for name in names[:: max(1, len(names) // 12)]]
        folder = zoo_folder()
        assert folder is not None
        self.texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.yaml"))]
        self.texts += [yaml.safe_dump(tree, sort_keys=False) for tree in self.trees]
        self.fields = [pair for name in ("word_problem_s3", "books_10m") for pair in _fields(load_spec(name))]

    def make(self, case: int, folder: Path) -> tuple[str, list[str]]:
        rng = random.Random(case)
        path = folder / "fuzzed.yaml"
        match case % 4:
            case 0:
                path.write_text(self.text(rng), encoding="utf-8", errors="surrogatepass")
            case 1:
                tree = self.tree(rng)
                path.write_text(
                    yaml.dump(tree, Dumper=yaml.SafeDumper), encoding="utf-8", errors="surrogatepass"
                )
            case 2:
                data = self.text(rng).encode("utf-8", "surrogatepass")
                cut = rng.randrange(len(data) + 1)
                path.write_bytes(
                    data[:cut] + rng.randbytes(rng.randrange(4)) + data[cut + rng.randrange(40) :]
                )
            case _:
                base = rng.choice(["word_problem_s3", "books_10m", rng.choice(self.names)])
                path.write_text(f"extends: {base}\n")
                return str(path), self.overrides(rng)
        return str(path), self.overrides(rng) if rng.random() < 0.1 else []

    def text(self, rng: random.Random) -> str:
        text = rng.choice(self.texts)
        for _ in range(rng.choice([1, 1, 2, 3, 8])):
            lines = text.split("\n")
            at = rng.randrange(len(text) + 1)
            match rng.randrange(6):
                case 0:
                    text = text[:at] + rng.choice(TOKENS) + text[at:]
                case 1:
                    text = text[:at] + text[at + rng.randrange(1, 20) :]
                case 2:
                    index = rng.randrange(len(lines))
                    text = "\n".join([*lines[:index], *lines[index + 1 :]])
                case 3:
                    rng.shuffle(lines)
                    text = "\n".join(lines)
                case 4:
                    index = rng.randrange(len(lines))
                    key = lines[index].partition(":")[0]
                    value = rng.choice(
                        [*TOKENS, *(repr(value)[:5000] for value in SCALARS if not _too_long(value))]
                    )
                    lines[index] = f"{key}: {value}"
                    text = "\n".join(lines)
                case _:
                    text = text[:at] + rng.choice(self.texts)[at:]
        return text

    def tree(self, rng: random.Random) -> Any:
        tree = copy.deepcopy(rng.choice(self.trees))
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            *parents, last = rng.choice(_paths(tree)[1:] or [("model",)])
            target = tree
            for key in parents:
                target = target[key]
            value = copy.deepcopy(rng.choice([value for value in SCALARS if not _too_long(value)]))
            if rng.random() < 0.8:
                target[last] = _near(target[last], rng)
            elif rng.random() < 0.2 and isinstance(target, dict):
                target[str(rng.choice([*PATHS, "", "x", "dampng", "learning_rate", "é"]))] = value
            elif rng.random() < 0.2 and isinstance(target, dict):
                del target[last]
            else:
                target[last] = value
        return tree

    def overrides(self, rng: random.Random) -> list[str]:
        made = []
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            path, value = rng.choice(self.fields)
            value = _near(value, rng) if rng.random() < 0.85 else rng.choice([*SCALARS, *TOKENS])
            if rng.random() < 0.05:
                path = rng.choice(
                    [*PATHS, "", ".", "a..b", "phases.0.model", "phases.9", "phases.free.until", "a." * 3000]
                )
            text = (
                value
                if isinstance(value, str) or _too_long(value)
                else yaml.safe_dump(value, default_flow_style=True)
            )
            made.append(f"{path}={str(text).removesuffix(chr(10)).removesuffix('...').strip()}"[:6000])
            if rng.random() < 0.05:
                made[-1] = rng.choice(["", "=", "x", "=3", "a=b=c", "model.solver.kind=anderson"])
        return made


def _too_long(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > 10**4000


def _use(source: str, overrides: list[str], folder: Path, is_ours: Callable[[BaseException], bool]) -> bool:
    """Load a spec and run what programs run before building it; return whether it was read."""
    try:
        spec: Any = load_spec(source, overrides)
    except SpecError as error:
        if len(str(error)) > 60_000:
            raise AssertionError("the message has more than 60,000 characters") from error
        return False
    dumped = spec.model_dump(mode="json")
    again = folder / "again.yaml"
    again.write_text(dump_yaml(dumped), encoding="utf-8")
    assert load_spec(again) == spec or "nan" in repr(spec)
    assert changes(spec, spec) == []
    repr(spec)
    count_parameters(spec.model)
    with (folder / "drawn.txt").open("w", encoding="utf-8") as stream:
        for function in (
            lambda: show(draw_run(spec, name="fuzzed"), stream=stream),
            lambda: dry_run_report(spec, name="fuzzed"),
            lambda: dry_run_report(spec, name="fuzzed", ranks=2, rate="1000"),
            lambda: _build(spec),
        ):
            try:
                function()
            except Exception as error:
                if not is_ours(error):
                    raise
    return True


def _build(spec: Any) -> None:
    counts = count_parameters(spec.model)
    if counts is None or counts.total is None or counts.total > 300_000 or spec.model.n_layers > 20:
        return
    registry.build(spec.model)


def _run(cases: range, folder: Path, time_limit: Any, is_ours: Any) -> int:
    maker, read = Maker(), 0
    for case in cases:
        source, overrides = maker.make(case, folder)
        try:
            with time_limit():
                read += _use(source, overrides, folder, is_ours)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            error.add_note(f"case {case}, changes {overrides!r}"[:2000])
            raise
    return read


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_random_specs_are_read_or_refused(tmp_path: Path, time_limit: Any, is_ours: Any) -> None:
    first = int(os.environ.get("FUZZ_CASE", "0"))
    cases = range(first, first + 1) if "FUZZ_CASE" in os.environ else range(160)
    read = _run(cases, tmp_path, time_limit, is_ours)
    assert read > 20 or "FUZZ_CASE" in os.environ  # some specs are read


@pytest.mark.slow
def test_many_random_specs_are_read_or_refused(tmp_path: Path, time_limit: Any, is_ours: Any) -> None:
    assert _run(range(1_000, 1_000 + CASES), tmp_path, time_limit, is_ours) > CASES // 10
