"""The standard benchmarks as lm-eval tasks, with lm-eval's prompts and metrics and items from a file."""

from __future__ import annotations

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


def build_harness_task(spec: HarnessTaskSpec, *, data: Path) -> Task:
    """Build a task of lm-eval by its YAML file or its name; ``data`` is unused.

    Raises:
        ValueError: the file defines no task, or several.
        FileNotFoundError: the file does not exist.

    """
    path = spec.locate(data)
    try:
        manager = TaskManager(include_defaults=path is None)
        loaded = manager.load([spec.path if path is None else str(path)])["tasks"]
    except FileNotFoundError as error:
        raise ValueError(f"{path}: its data are missing: {error}") from None
    if len(loaded) != 1:
        raise ValueError(f"{path} defines {len(loaded)} tasks; use a file with one")
    (task,) = loaded.values()
    return task
