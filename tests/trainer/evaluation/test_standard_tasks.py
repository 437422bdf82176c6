"""Benchmarks from local files: the same requests as lm-eval's Hub datasets."""

from __future__ import annotations

import bz2
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks import registry
from trainer.evaluation.items import read_items

KINDS = (
    "lambada",
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "winogrande",
    "openbookqa",
    "boolq",
)


def spec_of(kind: str, **fields: Any) -> Any:
    return registry.entry("evaluation_task", kind).spec.model_validate(fields)


def requests(task: Any) -> list[tuple[Any, ...]]:
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def of_the_hub(kind: str, items: list[dict[str, Any]]) -> Any:
    """Return lm-eval's task with the data that it would have downloaded."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(str(files("lm_eval"))) / "tasks" / spec_of(kind).lm_eval_task
    config = load_yaml(path)
    held = {
        config.get(f"{name}_split"): Dataset.from_list(items) for name in ("training", "validation", "test")
    }
    config.pop("metadata")
    config.pop("tag", None)
    return ConfigurableTask(config={**config, "custom_dataset": lambda: held})


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_those_of_lm_eval(kind, benchmarks, as_released):
    ours, theirs = registry.build(spec_of(kind), data=benchmarks), of_the_hub(kind, as_released[kind])
    assert requests(ours) == requests(theirs)
    assert [ours.doc_to_target(doc) for doc in ours.eval_docs] == [
        theirs.doc_to_target(doc) for doc in theirs.eval_docs
    ]
    assert ours.aggregation() == theirs.aggregation()


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_form_gives_the_same(kind, benchmarks, as_released, write_lines, tmp_path):
    write_lines(tmp_path / "items.jsonl", as_released[kind])
    released = registry.build(spec_of(kind, path=str(tmp_path / "items.jsonl")), data=tmp_path)
    assert requests(released) == requests(registry.build(spec_of(kind), data=benchmarks))


def test_prompts_match_the_expected_text(benchmarks):
    asked = {kind: requests(registry.build(spec_of(kind), data=benchmarks)) for kind in KINDS}
    assert asked["lambada"][0] == ("He took the rope. The rope was wet, so he dried the", " rope")
    assert asked["hellaswag"][1] == (
        "Clean and jerk: A lady walks to a barbell. She grabs the pole. The lady",
        " rinses the roof.",
    )
    assert asked["hellaswag"][3][1] == " says. hello."
    assert asked["piqa"][0] == ("Question: Dry a brush.\nAnswer:", " Hang it up.")
    assert asked["arc_easy"][1] == ("Question: Which one gives light of its own?\nAnswer:", " the sun")
    assert asked["openbookqa"][4] == ("Predators eat", " lions")
    assert asked["winogrande"][:2] == [
        ("Ann was better than Eve so Ann", " got the job."),
        ("Ann was better than Eve so Eve", " got the job."),
    ]
    assert asked["boolq"][0] == (
        "Ethanol -- It takes energy.\nMuch of it.\nQuestion: does ethanol take energy?\nAnswer:",
        " no",
    )


@pytest.mark.parametrize(
    ("kind", "row", "asked"),
    [
        (
            "arc_easy",
            {"question": {"stem": "Ice?", "choices": [{"text": "a", "label": "1"}]}, "answerKey": "1"},
            ("Question: Ice?\nAnswer:", " a"),
        ),
        (
            "openbookqa",
            {"question": {"stem": "Ice is", "choices": [{"text": "a", "label": "A"}]}, "answerKey": "A"},
            ("Ice is", " a"),
        ),
        (
            "boolq",
            {"question": "is it", "title": "It", "answer": True, "passage": "It is."},
            ("It -- It is.\nQuestion: is it?\nAnswer:", " no"),
        ),
        ("lambada", {"text": "so he dried the rope"}, ("so he dried the", " rope")),
    ],
    ids=["arc", "openbookqa", "boolq", "lambada"],
)  # fmt: skip
def test_other_forms_of_the_data_give_the_same_requests(kind, row, asked, tmp_path, write_lines):
    write_lines(tmp_path / "items.jsonl", [row])
    task = registry.build(spec_of(kind, path=str(tmp_path / "items.jsonl")), data=tmp_path)
    assert requests(task)[0] == asked


def test_compressed_files_are_read(benchmarks):
    path = benchmarks / "hellaswag" / "hellaswag_val_full.txt"
    packed = path.with_suffix(".txt.bz2")
    packed.write_bytes(bz2.compress(path.read_bytes()))
    assert read_items("hellaswag", packed) == read_items("hellaswag", path)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "piqa",
            '{"goal": "x", "sol1": "a"}\n',
            r"line 1: unknown format of an item of piqa .*'sol2' is missing.*goal, sol1",
        ),
        ("piqa", '{"goal": "x", "sol1": "a", "sol2": "b"}\n', "'label' is missing"),
        ("piqa", '{"goal": "x", "sol1": "a", "sol2": "b", "label": 2}\n', "the answer index is 2.*2 choices"),
        (
            "lambada",
            '{"text": "so he"}\n{"text": 3}\n',
            "line 2: unknown format of an item of lambada .*3 is not text",
        ),
        ("lambada", '{"text": \n', "line 1: not JSON"),
        ("lambada", "[1]\n", "line 1: expected a JSON object, got a list"),
        ("lambada", "\n", "contains no items"),
        ("arc_easy", '{"query": "x", "choices": ["a"], "gold": 1}\n', "the answer index is 1.*1 choices"),
        (
            "openbookqa",
            '{"question_stem": "x", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}\n',
            "answer key 'B' is not one of A",
        ),
        (
            "winogrande",
            '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}\n',
            "no placeholder _",
        ),
        (
            "winogrande",
            '{"sentence": "a _ gap", "option1": "a", "option2": "b", "answer": ""}\n',
            "answer must be '1' or '2', got ''",
        ),
    ],
)
def test_items_that_cannot_be_read_are_named(kind, text, message, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_items(kind, path)


def test_truncated_files_are_reported(benchmarks, tmp_path):
    path = benchmarks / "hellaswag" / "hellaswag_val_full.txt"
    packed = tmp_path / "cut.txt.bz2"
    packed.write_bytes(bz2.compress(path.read_bytes())[:-20])
    with pytest.raises(ValueError, match=r"cut\.txt\.bz2 cannot be read"):
        read_items("hellaswag", packed)
    path.write_text(path.read_text().rpartition("\n")[0].rpartition("\n")[0])
    with pytest.raises(ValueError, match="not a multiple of 6"):
        read_items("hellaswag", path)
    (benchmarks / "piqa" / "valid-labels.lst").write_text("0\n")
    with pytest.raises(ValueError, match=r"more items than its label file \(1\)"):
        read_items("piqa", benchmarks / "piqa" / "valid.jsonl")
    (benchmarks / "piqa" / "valid-labels.lst").write_text("0\n0\n1\n1\n")
    with pytest.raises(ValueError, match="has 3 items, but its label file has 4"):
        read_items("piqa", benchmarks / "piqa" / "valid.jsonl")


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"piqa: no file .*piqa/valid\.jsonl or .*piqa\.jsonl"):
        registry.build(spec_of("piqa"), data=tmp_path)


def test_a_yaml_file_of_lm_eval_is_a_task(tmp_path, write_lines):
    write_lines(tmp_path / "items.jsonl", [{"q": "one and", "a": "two"}])
    (tmp_path / "mine.yaml").write_text(
        json.dumps(
            {
                "task": "mine",
                "dataset_path": "json",
                "dataset_kwargs": {
                    "data_files": {"test": str(tmp_path / "items.jsonl")},
                    "cache_dir": str(tmp_path),
                },
                "output_type": "loglikelihood",
                "test_split": "test",
                "doc_to_text": "{{q}}",
                "doc_to_target": " {{a}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            }
        )
    )
    task = registry.build(spec_of("lm_eval", path=str(tmp_path / "mine.yaml")), data=tmp_path)
    assert requests(task) == [("one and", " two")]


@pytest.fixture
def few_tasks_of_lm_eval(monkeypatch):
    """Limit lm-eval to three of its folders, because reading its 14,000 files takes 10 seconds."""
    from lm_eval.tasks._index import TaskIndex

    from trainer.evaluation import standard

    every, folders = TaskIndex._iter_yaml_files, ("wikitext", "mmlu/default", "arc")
    few = lambda root: (path for folder in folders for path in every(root / folder))  # noqa: E731  # one use
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(few))
    standard._read_index.cache_clear()
    yield
    standard._read_index.cache_clear()


@pytest.mark.usefixtures("few_tasks_of_lm_eval")
def test_tasks_groups_and_tags_of_lm_eval_are_known_by_name(tmp_path):
    from trainer.evaluation.tasks import find_specs

    for name in ("wikitext", "mmlu", "ai2_arc"):
        ((found, spec),) = find_specs([name], data=tmp_path)
        assert (found, spec.kind, spec.path, spec.locate(tmp_path)) == (name, "lm_eval", name, None)
    with pytest.raises(ValueError, match="wikitxt: unknown evaluation task"):
        find_specs(["wikitxt"], data=tmp_path)


@pytest.mark.usefixtures("few_tasks_of_lm_eval")
def test_the_index_of_lm_eval_is_read_once():
    from trainer.evaluation.standard import task_manager

    assert task_manager() is task_manager(None, include_defaults=True)


TASK = """\
task: NAME
tag: [odd]
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/items.jsonl}, cache_dir: FOLDER}
output_type: loglikelihood
test_split: test
doc_to_text: "{{q}}"
doc_to_target: " {{a}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture
def named_tasks(tmp_path, write_lines):
    """Write a directory of three tagged tasks: two form a group, and one has the name of a built-in task."""
    write_lines(tmp_path / "items.jsonl", [{"q": "one and", "a": "two"}])
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("mine_1", "mine_2", "piqa"):
        text = TASK.replace("NAME", name).replace("FOLDER", str(tmp_path))
        (folder / f"{name}.yaml").write_text(text)
    (folder / "group.yaml").write_text("group: mine\ntask: [mine_1, mine_2]\n")
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mine_2", ["mine_2"]), ("mine", ["mine_1", "mine_2"]), ("odd", ["mine_1", "mine_2", "piqa"])],
    ids=["task", "group", "tag"],
)
def test_names_of_a_directory_of_tasks(name, expected, named_tasks, tmp_path):
    from trainer.evaluation.tasks import build_tasks, find_specs

    found = find_specs([name], data=tmp_path, include_path=named_tasks)
    built = build_tasks(found, data=tmp_path)
    assert sorted(task.name for task in built) == expected
    assert all(requests(task.task) == [("one and", " two")] for task in built)


def test_names_of_the_directory_precede_the_library_s(named_tasks, tmp_path):
    from trainer.evaluation.tasks import build_tasks, find_specs

    ((name, spec),) = find_specs(["piqa"], data=tmp_path, include_path=named_tasks)
    assert (name, spec.kind) == ("piqa", "lm_eval")
    with pytest.raises(ValueError, match="several of the groups contain mine_1; name each task once"):
        build_tasks(find_specs(["mine", "mine_1"], data=tmp_path, include_path=named_tasks), data=tmp_path)
    with pytest.raises(ValueError, match="absent is not a directory"):
        find_specs(["piqa"], data=tmp_path, include_path=tmp_path / "absent")


@pytest.mark.slow  # a few items of every file format are read by the tests above
def test_the_real_files_have_the_expected_numbers_of_items(shared_data):
    counts = dict(zip(KINDS, (5153, 10042, 1838, 2376, 1172, 1267, 500, 3270), strict=True))
    for kind, count in counts.items():
        path = spec_of(kind).locate(shared_data)
        assert path is not None
        assert len(read_items(kind, path)) == count
    other = read_items("lambada", shared_data / "lambada" / "lambada_test.jsonl")
    assert other == read_items("lambada", spec_of("lambada").locate(shared_data))
    begun = [
        item for item in read_items("hellaswag", spec_of("hellaswag").locate(shared_data)) if item["ctx_b"]
    ]
    assert 3200 < len(begun) < 3300  # those from ActivityNet; of the others the sentences are whole
