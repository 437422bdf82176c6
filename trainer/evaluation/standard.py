"""The standard benchmarks as lm-eval tasks, with lm-eval's prompts and metrics and items from a file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml  # no public function loads a configuration without its data

from trainer.evaluation.items import read_items
from trainer.specs.evaluation_tasks import HarnessTaskSpec, StandardTaskSpec

_LOADED_BY = ("dataset_path", "dataset_name", "dataset_kwargs", "training_split", "fewshot_split", "include")
_STRUCTURE = ("tag", "group", "task_list")


def build_standard(spec: StandardTaskSpec, *, data: Path) -> Task:
    """Build the task from lm-eval's own configuration; nothing is downloaded.

    Raises:
        ValueError: the file cannot be read.
        FileNotFoundError: the file does not exist.

    """
    path = spec.locate(data)
    assert path is not None
    items = read_items(spec.kind, path)
    config: dict[str, Any] = load_yaml(Path(str(files("lm_eval"))) / "tasks" / spec.lm_eval_task)
    split = config.get("test_split") or config["validation_split"]
    kept = {name: value for name, value in config.items() if name not in (*_LOADED_BY, *_STRUCTURE)}
    kept |= {"task": spec.kind, "validation_split": None, "test_split": split, "num_fewshot": 0}
    # lm-eval passes a task's logged metadata to the function that builds its data.
    kept["metadata"] = {"version": config["metadata"]["version"]}
    return ConfigurableTask(config={**kept, "custom_dataset": lambda **_: {split: Dataset.from_list(items)}})


def task_manager(include_path: Path | None = None, *, include_defaults: bool = True) -> TaskManager:
    """Return lm-eval's index of tasks, groups and tags; reading all of lm-eval's takes seconds, once."""
    return _read_index(include_path, include_defaults)


@cache  # of positional arguments: for a cache, a default and the same value given are different calls
def _read_index(include_path: Path | None, include_defaults: bool) -> TaskManager:
    return TaskManager(
        include_path=None if include_path is None else str(include_path), include_defaults=include_defaults
    )


def load_harness_tasks(spec: HarnessTaskSpec, *, data: Path) -> dict[str, Task]:
    """Load a task, or all tasks of a group or tag, by their names in lm-eval; ``data`` is unused.

    Raises:
        ValueError: the items of a task are missing.
        FileNotFoundError: the file does not exist.

    """
    path = spec.locate(data)
    included = None if spec.include_path is None else Path(spec.include_path)
    name = spec.path if path is None else str(path)
    loaded: dict[str, Task]
    try:
        try:
            loaded = task_manager(included, include_defaults=path is included is None).load([name])["tasks"]
        except KeyError:  # a group that names tasks of lm-eval
            loaded = task_manager(included).load([name])["tasks"]
    except FileNotFoundError as error:
        raise ValueError(f"{spec.path}: its data are missing: {error}") from None
    return loaded


def build_harness_task(spec: HarnessTaskSpec, *, data: Path) -> Task:
    """Build a task of lm-eval by its YAML file or its name; ``data`` is unused.

    Raises:
        ValueError: it is a group of several tasks, or the items are missing.
        FileNotFoundError: the file does not exist.

    """
    loaded = load_harness_tasks(spec, data=data)
    if len(loaded) != 1:
        raise ValueError(f"{spec.path} defines {len(loaded)} tasks; use a file with one")
    (task,) = loaded.values()
    return task
