"""``python -m trainer.experiments catbabi``: training, scores per task, and invalid requests."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from trainer.data.babi import SPLITS, TASKS, CatbAbI, read_stories
from trainer.experiments.catbabi import experiment as catbabi
from trainer.experiments.catbabi.experiment import score_answers
from trainer.experiments.catbabi.plot import draw
from trainer.experiments.cli import main
from trainer.experiments.common.runs import load_spec

NARROW = [
    "model.vocab_size=40", "model.d_model=16", "model.mixer.d_state=4", "model.mixer.head_dim=8",
    "data.seq_len=16", "training.max_steps=3", "training.batch_size=4", "training.threads=1",
    "phases.unrolled.model.gradient={kind: unrolled, steps: 2}",
    "model.at_evaluation.stopping.max_iterations=8", "evaluation.sequences=2",
]  # fmt: skip


@pytest.fixture
def archive(tmp_path):
    folder = tmp_path / "babi"
    folder.mkdir()
    for task, split in itertools.product(TASKS, SPLITS):
        text = f"1 Mary went to the hall{task}.\n2 Where is Mary? \thall{task}\t1\n"
        (folder / f"qa{task}_{split}.txt").write_text(text)
    return folder


def test_models_are_trained_once_and_scored_per_task(archive, tmp_path, capsys):
    folder = tmp_path / "out"
    (archive / "en").mkdir()
    (archive / "qa3_train.txt").rename(archive / "en/qa3_three-supporting-facts_train.txt")
    arguments = ["catbabi", "--data", str(archive), "--models", "implicit-1", "explicit-2", "--device", "cpu"]
    arguments += ["--output", str(folder), "--set", *NARROW]
    alone = ["--scoring", "answers"]
    assert main([*arguments, *alone]) == 0
    written = json.loads((folder / "catbabi.json").read_text())
    implicit, explicit = written["models"]
    assert (implicit["model"], explicit["model"]) == ("implicit-1", "explicit-2")
    assert written["answers"] == len(TASKS)  # one a task
    for row in written["models"]:
        right = [row["by_task"][str(task)] for task in TASKS]
        assert set(right) <= {0.0, 1.0}
        assert (
            row["accuracy"] == pytest.approx(sum(right) / len(TASKS)) == pytest.approx(row["mean_of_tasks"])
        )
        assert row["steps"] == 3
    assert explicit["search"] is None
    assert 1 <= implicit["search"]["iterations"] <= implicit["search"]["iterations_max"] <= 8
    assert (folder / "catbabi.png").read_bytes().startswith(b"\x89PNG")
    message = capsys.readouterr().out
    assert "qa20" in message
    # In this test all stories of the split are also in another split.
    assert "qa3_train.txt is missing: replaced by 0 stories of the set en" in message
    assert written["stand_ins"] == {"qa3_train.txt": 0}

    summary = folder / "runs/implicit-1-answers-0/summary.json"
    before = summary.stat().st_mtime_ns
    assert main([*arguments, "--split", "test", "--only-finished", "--scoring", "answers", "all"]) == 0
    assert json.loads((folder / "catbabi.json").read_text())["split"] == "test"
    assert summary.stat().st_mtime_ns == before
    assert not (folder / "runs/implicit-1-all-0").exists()

    assert main([*arguments, *alone, "--only-finished", "--lengths", "16", "64"]) == 0
    written = json.loads((folder / "catbabi.json").read_text())
    rows = [(row["model"], row["length"], row["answers"]) for row in written["models"]]
    models = ("implicit-1", "explicit-2")
    assert rows == [(model, length, len(TASKS)) for model in models for length in (16, 64)]
    assert main([*arguments, *alone, "--lengths", "0"]) == 2
    assert "length is 0; choose at least 1" in capsys.readouterr().err

    assert main([*arguments[:-1], "evaluation.sequences=1", *alone]) == 2
    assert "contains a run with different settings (evaluation.sequences: 2 → 1)" in capsys.readouterr().err


def test_a_twin_reads_what_its_implicit_model_reads(archive, tmp_path):
    arguments = ["catbabi", "--data", str(archive), "--models", "implicit-1", "explicit-1", "--device", "cpu"]
    arguments += ["--scoring", "answers", "--output", str(tmp_path), "--set", *NARROW]
    first = (
        "phases=[{name: first, until: 1, data: {tasks: [16]}, training: {batch_size: 2}, model: {gradient: "
    )
    assert main([*arguments, first + "{kind: unrolled, steps: 2}}}, {name: all}]"]) == 0
    folders = [tmp_path / f"runs/{name}-answers-0" for name in ("implicit-1", "explicit-1")]
    phases = [load_spec(folder / "spec.yaml").phase_specs() for folder in folders]
    assert [[phase.data for phase in one] for one in phases] == [[phase.data for phase in phases[0]]] * 2
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    assert [[row["tokens"] for row in one] for one in rows] == [[32, 96, 160]] * 2
    assert phases[1][0].model == phases[1][1].model


class Knows(torch.nn.Module):
    """Predicts the correct label where it is even."""

    def forward(self, ids, *, labels, return_logits):
        return SimpleNamespace(predictions=labels * (labels % 2 == 0), solution=None)


def test_answers_are_counted_by_task_and_only_right_ones_as_right(archive):
    stories = read_stories(archive)
    source = CatbAbI(stories.by_split["valid"], stories.vocabulary, length=7, seed=0)
    counted = score_answers(
        Knows(), source, rows=source.samples, batch_size=3, device=torch.device("cpu"), precision="float32"
    )
    ids = {word: number for number, word in enumerate(stories.vocabulary)}
    assert counted["scored"] == {str(task): 1 for task in TASKS}
    assert counted["correct"] == {str(task): int(ids[f"hall{task}"] % 2 == 0) for task in TASKS}
    assert 0 < sum(counted["correct"].values()) < len(TASKS)


def test_the_task_mean_is_unweighted_and_the_accuracy_weights_answers():
    none = dict.fromkeys(map(str, TASKS), 0)
    answers = {"scored": {**none, "1": 8, "2": 2}, "correct": {**none, "1": 8, "2": 1}, "search": None}
    finished = SimpleNamespace(summary=dict.fromkeys(("parameters", "steps", "seconds"), 1))
    row = catbabi._row(catbabi._candidate("explicit-2"), "answers", 0, 200, finished, answers)
    assert (row["accuracy"], row["mean_of_tasks"], row["answers"]) == (0.9, 0.75, 10)
    assert (row["by_task"]["1"], row["by_task"]["2"], row["by_task"]["3"]) == (1.0, 0.5, None)


def test_answers_are_cached_per_row_length_and_number_of_steps(tmp_path, monkeypatch):
    """A run that was extended has other answers."""
    monkeypatch.setattr(catbabi, "load_model", lambda finished, device: finished.summary["steps"])
    monkeypatch.setattr(
        catbabi, "score_answers", lambda model, source, **more: {"of": [source.length, more["rows"], model]}
    )
    evaluation, data = SimpleNamespace(batch_size=8), SimpleNamespace(seq_len=16)
    spec = SimpleNamespace(evaluation=evaluation, data=data, training=SimpleNamespace(precision="float32"))
    for length, rows, steps in ((16, 2, 5), (64, 2, 5), (64, 3, 5), (64, 3, 9), (16, 2, 5)):
        source = SimpleNamespace(length=length)
        finished = SimpleNamespace(folder=tmp_path, spec=spec, summary={"steps": steps})
        found = catbabi._answers(finished, source, split="valid", rows=rows, device=torch.device("cpu"))
        assert found == {"of": [length, rows, steps]}
    assert len(list(tmp_path.iterdir())) == 4


def test_invalid_requests_are_refused(archive, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    assert main(["catbabi", "--data", str(archive), "--models", "deep-1", *out]) == 2
    assert "'deep-1' is not a model; give its kind and layers" in capsys.readouterr().err
    assert main(["catbabi", "--data", str(archive), "--spec", "word_problem_s3", *out]) == 2
    assert "the data of word_problem_s3 are of kind 'word_problem'" in capsys.readouterr().err
    for change, option in (("data.scoring=all", "--scoring"), ("model.n_layers=2", "--models")):
        assert main(["catbabi", "--data", str(archive), "--set", change, *out]) == 2
        assert f"--set {change} conflicts with {option}" in capsys.readouterr().err
    (archive / "qa3_train.txt").unlink()
    assert main(["catbabi", "--data", str(archive), *out]) == 2
    assert "lacks 1 of bAbI's 60 files: qa3_train.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_models_of_the_laptop_setting_learn(shared_data, tmp_path):
    archive = shared_data / "babi/en-valid-10k.tar.xz"
    arguments = ["catbabi", "--data", str(archive), "--setting", "laptop", "--sequences", "64"]
    assert main([*arguments, "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out/catbabi.json").read_text())
    assert len(written["models"]) == 8
    assert (tmp_path / "out/catbabi.png").stat().st_size > 10_000
    # A few minutes of training beat a random word, which is correct with probability 1/179.
    for row in written["models"]:
        assert row["accuracy"] > (0.2 if row["scoring"] == "answers" else 0.05), row["model"]
        assert row["search"] is None or row["search"]["converged"] > 0.7, row["model"]


@pytest.mark.parametrize(
    ("layers", "first"), [((1, 2, 4), "explicit-1"), ((1, 2, 4, 8, 16), "explicit\n1")], ids=["few", "many"]
)
def test_long_model_names_are_wrapped(layers, first):
    row = {
        "scoring": "answers",
        "length": 200,
        "accuracy": 0.5,
        "by_task": dict.fromkeys(map(str, TASKS), 0.5),
    }
    models = [{**row, "model": f"explicit-{count}"} for count in layers]
    figure = draw({"models": models, "split": "test", "published": {}})
    assert figure.axes[0].get_xticklabels()[0].get_text() == first
