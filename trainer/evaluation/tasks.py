"""Finding and building evaluation tasks; all problems are reported together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_packages import install_extra
from trainer.specs.evaluation_tasks import EvaluationTaskSpec, HarnessTaskSpec

if TYPE_CHECKING:
    from trainer.evaluation.scores import EvalTask

NamedSpec = tuple[str, EvaluationTaskSpec]
"""A task's name in the results, and its spec."""


def find_specs(names: Sequence[str], *, data: Path, include_path: Path | None = None) -> list[NamedSpec]:
    """Return the specs of tasks given as ``KIND``, ``KIND=FILE``, an lm-eval YAML file, or a name of lm-eval.

    Args:
        names: the tasks.
        data: directory of the files of items.
        include_path: directory of lm-eval YAML files, whose names precede all others.

    Raises:
        ValueError: lists all unknown kinds and missing files.

    """
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"{include_path} is not a directory; give one with lm-eval YAML files")
    found: list[NamedSpec] = []
    complaints: list[str] = []
    for name in names:
        try:
            found.append(_spec(name, include_path))
        except ValueError as error:
            complaints.append(str(error))
    _refuse([*complaints, *_missing(found, data)], of=len(names))
    return found


def locate_all(specs: Sequence[NamedSpec], *, data: Path) -> None:
    """Check that everything the tasks need is available.

    Raises:
        ValueError: lm-eval is not installed, files are missing (all are listed), or a name is repeated.

    """
    require_packages()
    _refuse(_missing(specs, data), of=len(specs))


def require_packages(*needed: str) -> None:
    """Require packages of the extra ``eval``: those given, or all.

    Raises:
        ValueError: names the missing packages.

    """
    missing = [package for package in needed or ("transformers", "lm_eval") if find_spec(package) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: not installed; {install_extra('eval')}")


def build_tasks(specs: Sequence[NamedSpec], *, data: Path) -> list[EvalTask]:
    """Build the tasks and read their items; a group or tag of lm-eval gives each of its tasks.

    Raises:
        ValueError: an item cannot be read (names file and line), or a task is in several groups.

    """
    if not specs:
        return []
    from trainer.evaluation.scores import EvalTask
    from trainer.evaluation.standard import load_harness_tasks

    built = []
    for name, spec in specs:
        if isinstance(spec, HarnessTaskSpec):
            tasks = load_harness_tasks(spec, data=data)
            named = dict(zip([name], tasks.values(), strict=True)) if len(tasks) == 1 else tasks
        else:
            named = {name: registry.build(spec, data=data)}
        file = spec.locate(data)
        built += [EvalTask(name=each, spec=spec, task=task, file=file) for each, task in named.items()]
    repeated = [name for name, count in Counter(task.name for task in built).items() if count > 1]
    if repeated:
        raise ValueError(f"several of the groups contain {', '.join(repeated)}; name each task once")
    return built


def _spec(name: str, include_path: Path | None = None) -> NamedSpec:
    kind, _, path = name.partition("=")
    if include_path is not None and _known_to_lm_eval(name, include_path):
        return name, HarnessTaskSpec(path=name, include_path=str(include_path))
    if kind.endswith((".yaml", ".yml")):
        return Path(kind).stem, HarnessTaskSpec(path=kind)
    known = registry.kinds("evaluation_task")
    if kind not in known and _known_to_lm_eval(name):
        return name, HarnessTaskSpec(path=name)
    if kind not in known:
        raise ValueError(
            f"{kind}: unknown evaluation task; {did_you_mean(kind, known)}{registry.absent_plugins()}"
        )
    spec = registry.entry("evaluation_task", kind).spec
    return kind, spec.model_validate({"path": path} if path else {})


def _known_to_lm_eval(name: str, include_path: Path | None = None) -> bool:
    """Whether lm-eval, or the directory alone, has a task, group or tag of this name.

    Its data may have to be downloaded.
    """
    if find_spec("lm_eval") is None:
        return False
    from trainer.evaluation.standard import task_manager

    manager = task_manager() if include_path is None else task_manager(include_path, include_defaults=False)
    return name in manager.all_tasks


def _missing(specs: Sequence[NamedSpec], data: Path) -> list[str]:
    complaints = []
    for number, (name, spec) in enumerate(specs):
        if name in dict(specs[:number]):
            complaints.append(f"{name}: given twice")
        try:
            spec.locate(data)
        except (ValueError, OSError) as error:
            complaints.append(str(error))
    return complaints


def _refuse(complaints: Sequence[str], *, of: int) -> None:
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in complaints)
        raise ValueError(f"{len(complaints)} of {of} tasks cannot be run:{listed}")
