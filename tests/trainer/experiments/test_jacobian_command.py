"""``python -m trainer.experiments jacobian``: its numbers, plot, and invalid requests."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from trainer.experiments.cli import main

SMALL = ["jacobian", "--width", "8", "--seed", "3"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run the command once; return its folder and what it printed."""
    folder, shown = tmp_path_factory.mktemp("jacobian"), io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([*SMALL, "--output", str(folder)]) == 0
    return folder, shown.getvalue()


def test_the_command_writes_numbers_and_a_plot(written):
    folder, shown = written
    implicit, explicit = json.loads((folder / "jacobian.json").read_text())["models"]
    assert (implicit["kind"], explicit["kind"]) == ("implicit", "explicit")
    for one in (implicit, explicit):
        assert one["formula_against_autograd"] <= 1e-6
        assert one["formula_against_differences"] <= 1e-5
    assert explicit["off_diagonal_mass"] == 0 < implicit["off_diagonal_mass"]
    assert (folder / "jacobian.png").read_bytes().startswith(b"\x89PNG")
    assert "off-diagonal mass" in shown


def test_the_same_seed_gives_the_same_numbers(written, tmp_path):
    assert main([*SMALL, "--output", str(tmp_path)]) == 0
    assert (tmp_path / "jacobian.json").read_text() == (written[0] / "jacobian.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1"], "got 1 and 8"),
        (["--max-iterations", "2"], "was not found"),
        (["--dt", "0.5", "0.1"], "dt_min 0.5 is above dt_max 0.1"),
        (["--dt", "-1", "0.1"], "dt_min: should be greater than 0; got -1.0\n"),
        (["--seed", "-1"], "seed must be from 0 to 2^63 - 1, got -1"),
    ],
)
def test_invalid_requests_are_reported(tmp_path, capsys, options, message):
    assert main(["jacobian", "--width", "8", *options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_jacobian_of_the_paper_s_size_has_full_rank(tmp_path):
    """The paper's setting: a state of 64 entries."""
    folder = tmp_path / "out"
    assert main(["jacobian", "--output", str(folder)]) == 0
    implicit, explicit = json.loads((folder / "jacobian.json").read_text())["models"]
    for one in (implicit, explicit):
        assert one["formula_against_autograd"] <= 1e-6
        assert one["formula_against_differences"] <= 1e-5
        assert one["rank"] == 64
    assert implicit["feedback_rank"] > 32 > explicit["feedback_rank"] == 0
    assert (folder / "jacobian.png").stat().st_size > 10_000
