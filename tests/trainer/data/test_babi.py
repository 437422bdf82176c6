"""catbAbI: stories, their order, scored answers, and missing files."""

from __future__ import annotations

import json
import tarfile
from itertools import product
from pathlib import Path

import pytest
import torch

from trainer.data.babi import SPLITS, TASKS, CatbAbI, build, parse, read_stories
from trainer.data.source import IGNORED
from trainer.errors import DataError
from trainer.run.build import build as build_run
from trainer.specs.run import CatbAbISpec, EvaluationSpec, RunSpec

REAL = Path(__file__).resolve().parents[4] / "shared/data/babi/en-valid-10k.tar.xz"
TEXT = """1 Mary moved to the bathroom.
2 Where is Mary? \tbathroom\t1
3 How do you go there?\ts,e\t1
1 John {task} went to the {split}.
2 Where is John? \t{split}\t1
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "en-valid-10k"
    place.mkdir()
    for task in TASKS:
        for split in SPLITS:
            (place / f"qa{task}_{split}.txt").write_text(TEXT.format(task=f"task{task}", split=split))
    return place


def source(folder, **changes) -> CatbAbI:
    return build(CatbAbISpec(path=str(folder), **{"seq_len": 16, **changes}), seed=1)


def words(data: CatbAbI, ids: torch.Tensor) -> list[str]:
    return [data._vocabulary[number] for number in ids.tolist()]


def test_a_file_is_split_into_stories_including_the_last():
    first, last = parse(TEXT.format(task="two", split="hall"), task=2)
    assert " ".join(first.words) == (
        "mary moved to the bathroom . where is mary ? bathroom how do you go there ? s,e"
    )
    assert [word for word, answer in zip(first.words, first.answers, strict=True) if answer] == [
        "bathroom",
        "s,e",
    ]
    assert " ".join(last.words) == "john two went to the hall . where is john ? hall"
    with pytest.raises(DataError, match="qa2, line 1: '2 Mary' is not a line of a story"):
        parse("2 Mary", task=2)


def test_an_epoch_contains_every_story_once_in_its_own_order(folder):
    data = source(folder)
    epochs = [data.batch(epoch * data.samples, data.samples).inputs.flatten() for epoch in (0, 1)]
    for epoch in epochs:
        assert int((epoch > 0).sum()) == data.total
        text = words(data, epoch)
        assert {f"task{task}" for task in TASKS} <= set(text)
        assert text.count("john") == 2 * len(TASKS)
    assert not torch.equal(*epochs)
    again = source(folder)
    assert torch.equal(again.batch(3, 9).inputs, data.batch(3, 9).inputs)
    assert torch.equal(data.batch(4, 1).labels[0], data.batch(3, 2).labels[1])
    assert not torch.equal(
        build(CatbAbISpec(path=str(folder), seq_len=16), seed=2).batch(0, 4).inputs, data.batch(0, 4).inputs
    )


@pytest.mark.parametrize("scoring", ["answers", "all"])
def test_labels_are_the_next_tokens(folder, scoring):
    data = source(folder, scoring=scoring)
    batch = data.batch(0, data.samples)
    stream, labels = batch.inputs.flatten(), batch.labels.flatten()
    scored = labels != IGNORED
    assert torch.equal(labels[:-1][scored[:-1]], stream[1:][scored[:-1]])
    if scoring == "answers":
        assert int(scored.sum()) == 3 * len(TASKS)
        assert set(words(data, stream[scored])) == {"?"}
    else:
        assert int(scored.sum()) == data.total - 1


def test_selected_tasks_keep_the_full_vocabulary(folder):
    every, some = source(folder), source(folder, tasks=[16, 3])
    assert some.vocab_size == every.vocab_size
    assert some.total == every.total // 10
    text = words(some, some.batch(0, some.samples).inputs.flatten())
    assert {word for word in text if word.startswith("task")} == {"task3", "task16"}
    evaluation = EvaluationSpec(sequences=1000).at(16)
    assert list(some.evaluation_sets(evaluation)) == list(every.evaluation_sets(evaluation))
    assert CatbAbISpec(tasks=[16, 3]) == CatbAbISpec(tasks=[3, 16])
    assert CatbAbISpec(tasks=[3]).describe(sequences=1, vocab_size=None) == [
        "catbabi, length 200, of tasks 3"
    ]


def test_a_repeated_task_repeats_its_stories(folder):
    spec = CatbAbISpec(tasks=[*TASKS, 16, 16])
    assert spec.describe(sequences=1, vocab_size=None)[0].endswith("15, 16 (3 times), 17, 18, 19, 20")
    every, more = source(folder), source(folder, tasks=spec.tasks)
    assert more.total == every.total * 22 // 20
    text = words(more, more.batch(0, more.samples).inputs.flatten())
    assert {f"task{task}": text.count(f"task{task}") for task in TASKS} == {
        f"task{task}": 3 if task == 16 else 1 for task in TASKS
    }


@pytest.mark.parametrize(
    ("tasks", "message"),
    [([0], "greater than or equal to 1"), ([21], "less than or equal to 20"), ([], "at least 1 item")],
)
def test_unknown_bAbI_tasks_are_rejected(tasks, message):
    with pytest.raises(ValueError, match=message):
        CatbAbISpec(tasks=tasks)


def small_run(folder, *, max_steps, **sections):
    """Return the spec of a run of an explicit layer on the stories, with further sections."""
    return RunSpec.model_validate(
        {
            "model": {
                "kind": "explicit_lm",
                "vocab_size": source(folder).vocab_size,
                "d_model": 16,
                "n_layers": 1,
                "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
            },
            "data": {"kind": "catbabi", "path": str(folder), "seq_len": 16},
            "training": {
                "max_steps": max_steps,
                "batch_size": 4,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
                "schedule": {"kind": "warmup_linear"},
                "threads": 1,
            },
            **sections,
        }
    )


def test_a_phase_reads_some_tasks_and_shorter_rows_first(folder, tmp_path):
    first = {"name": "first", "until": 2, "data": {"tasks": [16], "seq_len": 8}}
    spec = small_run(folder, max_steps=4, phases=[first, {"name": "all"}])
    assert [phase.data.tasks for phase in spec.phase_specs()] == [(16,), None]
    build_run(spec, output=tmp_path / "run", device="cpu").train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [32, 64, 128, 192]
    first["data"] = {"scoring": "all"}
    with pytest.raises(ValueError, match="a phase cannot change 'scoring' of data of kind 'catbabi'"):
        small_run(folder, max_steps=4, phases=[first, {"name": "all"}]).phase_specs()


def test_evaluation_sets_score_each_task(folder):
    evaluation = EvaluationSpec(sequences=1000).at(16)
    sets = source(folder).evaluation_sets(evaluation)
    assert list(sets) == ["L16", *(f"qa{task}_L16" for task in TASKS)]
    counts = {}
    for name, one in sets.items():
        batches = list(one.batches(7))
        counts[name] = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    assert counts.pop("L16") == 60
    assert set(counts.values()) == {3}


def test_rows_of_a_task_contain_its_answers(folder):
    for length, task in product((3, 4, 5, 6, 7), TASKS):
        of_task = source(folder, seq_len=length).only(task)
        labels = of_task.batch(0, of_task.samples).labels
        assert (
            (labels != IGNORED).any(1).all()
        )  # an answer that only begins a row is scored in the one before


def test_an_archive_equals_its_directory(folder, tmp_path):
    with tarfile.open(tmp_path / "babi.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname="en-valid-10k")
    assert read_stories(tmp_path / "babi.tar.xz") == read_stories(folder)


def test_missing_files_are_listed(folder, tmp_path):
    (folder / "qa3_train.txt").unlink()
    (folder / "qa17_valid.txt").write_text("\n")  # a copy that broke off
    with pytest.raises(ValueError, match=r"lacks 2 of bAbI's 60 files: qa3_train.txt, qa17_valid.txt"):
        source(folder)
    with pytest.raises(ValueError, match="there is no bAbI archive at"):
        source(tmp_path / "nowhere")
    (tmp_path / "cut.tar.xz").write_bytes(b"\xfd7zXZ\x00broken")
    with pytest.raises(ValueError, match="cannot be read as an archive"):
        source(tmp_path / "cut.tar.xz")
    # A damaged archive, an unknown format, and a file that is not text each give a one-line message.
    with tarfile.open(tmp_path / "whole.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname="en-valid-10k")
    damaged = bytearray((tmp_path / "whole.tar.xz").read_bytes())
    damaged[200:232] = bytes(32)
    (tmp_path / "damaged.tar.xz").write_bytes(damaged)
    (tmp_path / "text.tar.xz").write_text("no archive")
    for name in ("damaged", "text"):
        with pytest.raises(ValueError, match="cannot be read as an archive") as refused:
            source(tmp_path / f"{name}.tar.xz")
        assert "\n" not in str(refused.value)
    (folder / "qa1_test.txt").write_bytes(b"1 caf\xe9.\n")
    with pytest.raises(ValueError, match=r"qa1_test\.txt is not UTF-8 text"):
        source(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"lacks 60 of bAbI's 60 files: qa1_train\.txt to qa20_test\.txt;"):
        source(tmp_path / "none")
    with pytest.raises(ValueError, match="give the bAbI archive"):
        build(CatbAbISpec())


def test_a_replacement_file_excludes_stories_of_other_splits(folder):
    (folder / "qa3_train.txt").unlink()
    (folder / "en").mkdir()
    stand_in = TEXT.format(task="other", split="train")
    (folder / "en/qa3_three-supporting-facts_train.txt").write_text(stand_in)
    found = read_stories(folder)
    assert found.stand_ins == source(folder).stand_ins == {"qa3_train.txt": 1}
    stories = [story for story in found.by_split["train"] if story.task == 3]
    assert [story.words[1] for story in stories] == ["other"]  # Mary's is in qa3_valid.txt too


def test_a_run_reports_accuracy_per_task(folder, tmp_path):
    size = source(folder).vocab_size
    spec = small_run(folder, max_steps=2, evaluation={"sequences": 4, "batch_size": 4})
    run = build_run(spec, output=tmp_path / "run", device="cpu")
    summary = run.train()
    assert [one["set"] for one in summary["evaluation"]] == ["L16", *(f"qa{t}_L16" for t in TASKS)]
    assert all(0 <= one["accuracy"] <= 1 for one in summary["evaluation"])
    small = {
        **spec.model_dump(mode="json"),
        "model": {**spec.model_dump(mode="json")["model"], "vocab_size": 5},
    }
    with pytest.raises(ValueError, match=f"bAbI has {size} IDs, but the model has vocab_size 5"):
        build_run(RunSpec.model_validate(small), output=tmp_path / "small", device="cpu")


@pytest.mark.slow  # archives of a few stories are read by the tests above
@pytest.mark.skipif(not REAL.exists(), reason="the bAbI archive is not beside the repository")
def test_the_real_archive_has_the_expected_stories():
    stories = read_stories(REAL)
    assert {split: len(found) for split, found in stories.by_split.items()} == {
        "train": 54781,
        "valid": 6265,
        "test": 6267,
    }
    assert len(stories.vocabulary) == 179
    # The archive lacks qa3's training file; 200 stories of the small set replace it, 15 of them held out.
    assert sum(story.task == 3 for story in stories.by_split["train"]) == 185
    assert stories.stand_ins == {"qa3_train.txt": 185}
