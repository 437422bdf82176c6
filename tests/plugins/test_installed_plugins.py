"""Third-party distributions, installed from wheels and used in subprocesses, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RUN = """
extends: word_problem_s3
model:
  d_model: 16
  mixer: {kind: acme.shift, distance: 2}
  solver: {kind: acme.relaxed, first: 0.7}
  gradient: {kind: phantom, steps: 2}
  stopping: {max_iterations: 6}
  at_evaluation: {solver: {kind: acme.relaxed}, stopping: {max_iterations: 12}}
training: {max_steps: 2, batch_size: 4, log_every: 1}
phases: []
evaluation: {lengths: [32], identity_probabilities: [0.5], sequences: 8, batch_size: 8}
"""

USE_AS_LIBRARY = """
import warnings
import torch
import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.testing import check_mixer, check_solver

spec = ib.load_spec("run.yaml", ["model.mixer.distance=3"])
check_mixer(spec.model.mixer)
check_solver(ib.build(spec.model.solver))

model = ib.build(spec.model)
assert type(model.backbone.blocks()[0].mixer).__module__ == "acme_blocks.shift"
assert type(model.solver).__name__ == type(model.evaluation_solver).__name__ == "Relaxed"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(0, 6, (4, 12))
losses = []
for _ in range(2):
    out = model(tokens, labels=tokens)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(out.loss.item())
assert losses[1] < losses[0], losses
model.eval()
with torch.no_grad():
    out = model(tokens, window_length=5, return_state=True)
assert out.solution.token_iterations.shape == (4, 12) and out.state.length == 12

try:
    ib.build(registry.entry("mixer", "acme.missing").spec(), d_model=16)
except ImportError as error:
    assert "mixer 'acme.missing' of acme-blocks" in str(error) and "acme_blocks.nowhere" in str(error), error
else:
    raise AssertionError("what is missing was built")
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def table(text: str) -> dict[str, list[str]]:
    """Return the listing's rows by kind, and those of plugins that are not in use by name."""
    rows = [line.split() for line in text.splitlines() if len(line.split()) > 1]
    return {row[0] if row[0].startswith("acme_") else row[1]: row for row in rows}


def test_the_listing_shows_owners_versions_and_failures(run):
    done = run("-m", "implicit_blocks", "list")
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert rows["acme.relaxed"][:4] == ["solver", "acme.relaxed", "acme-blocks", "2.5.0"]
    assert rows["acme.shift"][:4] == ["mixer", "acme.shift", "acme-blocks", "2.5.0"]
    assert rows["picard"][2] == "implicit_blocks"
    assert "word_problem" in rows
    broken, clash = " ".join(rows["acme_broken"]), " ".join(rows["acme_clash"])
    assert broken.startswith("acme_broken acme-broken 0.3 ModuleNotFoundError: No module named")
    assert "acme_dependency_that_is_not_installed" in broken
    assert clash.startswith("acme_clash acme-clash 0.3 ValueError: solver 'picard' is already registered by")
    assert "acme.own" not in rows  # all of its kinds are registered or none


def test_the_schema_contains_the_kinds_of_plugins(run):
    done = run("-m", "implicit_blocks", "schema")
    assert done.returncode == 0, done.stderr
    definitions = json.loads(done.stdout)["$defs"]
    assert definitions["ShiftSpec"]["properties"]["kind"]["const"] == "acme.shift"
    assert "first" in definitions["RelaxedSpec"]["properties"]


@pytest.mark.parametrize(
    ("plugins", "in_use", "listed_off", "failed"),
    [
        ("none", False, {"acme", "acme_broken", "acme_clash"}, set()),
        ("acme", True, {"acme_broken", "acme_clash"}, set()),
        ("acme, acme_broken", True, {"acme_clash"}, {"acme_broken"}),
        ("acme_clash", False, {"acme", "acme_broken"}, {"acme_clash"}),
    ],
)
def test_the_variable_selects_the_plugins(run, plugins, in_use, listed_off, failed):
    done = run("-m", "implicit_blocks", "list", plugins=plugins)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert ("acme.shift" in rows) == in_use
    assert {name for name in ("acme_broken", "acme_clash") if name in rows} == failed
    _, _, off = done.stdout.partition("Disabled by IMPLICIT_BLOCKS_PLUGINS: ")
    assert listed_off <= set(off.strip().split(", "))
    assert {"picard", "mamba2", "word_problem", "adamw"} <= rows.keys()


def test_the_trainer_uses_third_party_mixers_and_solvers_from_yaml(run, spec_file):
    output = spec_file.with_name("output")
    done = run("-m", "trainer", "--spec", spec_file.name, "--output", str(output))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record][:2] == [1, 2]


def test_the_library_builds_trains_and_checks_third_party_components(run, spec_file):
    script = spec_file.with_name("use.py")
    script.write_text(USE_AS_LIBRARY)
    done = run(str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "plugins", "messages"),
    [
        (
            ["model.gradient.kind=unrolled"],
            None,
            [
                "gradient 'unrolled' differentiates the solver's updates",
                "'acme.relaxed' is not differentiable",
            ],
        ),
        (
            ["model.mixer.distance=0", "model.solver.kind=acme.own"],
            None,
            [
                *("model.mixer.distance", "0", "greater than 0"),
                *("acme.own", "plugin 'acme_clash' could not be used"),
            ],
        ),
        (
            [],
            "none",
            ["run.yaml:5", "unknown mixer 'acme.shift'", "IMPLICIT_BLOCKS_PLUGINS disables: acme"],
        ),
    ],
    ids=["undifferentiable", "out-of-range and rejected-plugin", "disabled"],
)
def test_invalid_settings_are_reported_without_a_traceback(run, spec_file, changes, plugins, messages):
    done = run(
        "-m", "trainer", "--spec", spec_file.name, "--dry-run", "--output", "out", *changes, plugins=plugins
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for message in messages:
        assert message in done.stderr
