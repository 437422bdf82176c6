"""``python -m trainer.experiments jacobian``: its file, its picture, its refusals."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib", reason="the picture needs the extra 'train'")

from trainer.experiments.cli import main


def test_it_writes_numbers_and_a_picture(tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["jacobian", "--width", "16", "--output", str(folder)]) == 0
    written = json.loads((folder / "jacobian.json").read_text())
    implicit, explicit = written["models"]
    assert (implicit["kind"], explicit["kind"]) == ("implicit", "explicit")
    for one in (implicit, explicit):
        assert one["formula_against_autograd"] <= 1e-6
        assert one["formula_against_differences"] <= 1e-5
    assert explicit["off_diagonal_mass"] == 0 < implicit["off_diagonal_mass"]
    assert (folder / "jacobian.png").read_bytes().startswith(b"\x89PNG")
    assert "off-diagonal mass" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        assert main(["jacobian", "--width", "8", "--seed", "3", "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a/jacobian.json").read_text() == (tmp_path / "b/jacobian.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1"], "1 tokens"),
        (["--max-iterations", "2"], "was not found"),
        (["--dt", "0.5", "0.1"], "dt_min 0.5 is above dt_max 0.1"),
        (["--dt", "-1", "0.1"], "dt_min: should be greater than 0; got -1.0\n"),
        (["--seed", "-1"], "seed is -1; choose one from 0"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_sentence(tmp_path, capsys, options, message):
    assert main(["jacobian", "--width", "8", *options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_laptop_setting(tmp_path):
    """The paper's: a state of 64 entries."""
    folder = tmp_path / "out"
    assert main(["jacobian", "--output", str(folder)]) == 0
    implicit, explicit = json.loads((folder / "jacobian.json").read_text())["models"]
    for one in (implicit, explicit):
        assert one["formula_against_autograd"] <= 1e-6
        assert one["formula_against_differences"] <= 1e-5
        assert one["rank"] == 64
    assert implicit["feedback_rank"] > 32 > explicit["feedback_rank"] == 0
    assert (folder / "jacobian.png").stat().st_size > 10_000
