"""Finding and building evaluation tasks; all problems are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_parts import install_extra
from trainer.specs.evaluation_tasks import EvaluationTaskSpec, HarnessTaskSpec

if TYPE_CHECKING:
    from trainer.evaluation.scores import EvalTask

NamedSpec = tuple[str, EvaluationTaskSpec]
"""A task's name in the results, and its spec."""


def find_specs(names: Sequence[str], *, data: Path) -> list[NamedSpec]:
    """Return the specs of tasks given as ``KIND``, ``KIND=FILE``, or an lm-eval YAML file.

    Raises:
        ValueError: lists all unknown kinds and missing files.

    """
    found: list[NamedSpec] = []
    complaints: list[str] = []
    for name in names:
        try:
            found.append(_spec(name))
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
    """Build the tasks and read their items.

    Raises:
        ValueError: an item cannot be read; names file and line.

    """
    if not specs:
        return []
    from trainer.evaluation.scores import EvalTask

    return [
        EvalTask(name=name, spec=spec, task=registry.build(spec, data=data), file=spec.locate(data))
        for name, spec in specs
    ]


def _spec(name: str) -> NamedSpec:
    kind, _, path = name.partition("=")
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


def _known_to_lm_eval(name: str) -> bool:
    """Whether lm-eval has a task of this name; its data may have to be downloaded."""
    if find_spec("lm_eval") is None:
        return False
    from lm_eval.tasks import TaskManager

    return name in TaskManager().all_subtasks


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
