"""Finding and building the tasks that are asked for, and refusing all that can't be at once."""

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
"""A task's spec, and what the results call it."""


def find_specs(names: Sequence[str], *, data: Path) -> list[NamedSpec]:
    """Return the specs of tasks that are named: ``KIND``, ``KIND=FILE``, or a YAML file of lm-eval's.

    Raises:
        ValueError: kinds that there aren't, and files that are missing, all of them.

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
    """Look for all that the tasks need.

    Raises:
        ValueError: lm-eval is not installed, files are missing, all of them, or a name comes twice.

    """
    require_packages()
    _refuse(_missing(specs, data), of=len(specs))


def require_packages(*needed: str) -> None:
    """Refuse to go on without packages of the extra ``eval``: those named, or all.

    Raises:
        ValueError: naming those that are missing.

    """
    missing = [package for package in needed or ("transformers", "lm_eval") if find_spec(package) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: not installed; {install_extra('eval')}")


def build_tasks(specs: Sequence[NamedSpec], *, data: Path) -> list[EvalTask]:
    """Build the tasks; their items are read.

    Raises:
        ValueError: what can't be read, with file and line.

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
    if kind not in known:
        raise ValueError(
            f"{kind}: no evaluation task; {did_you_mean(kind, known)}{registry.absent_plugins()}"
        )
    spec = registry.entry("evaluation_task", kind).spec
    return kind, spec.model_validate({"path": path} if path else {})


def _missing(specs: Sequence[NamedSpec], data: Path) -> list[str]:
    complaints = []
    for number, (name, spec) in enumerate(specs):
        if name in dict(specs[:number]):
            complaints.append(f"{name}: named twice")
        try:
            spec.locate(data)
        except (ValueError, OSError) as error:
            complaints.append(str(error))
    return complaints


def _refuse(complaints: Sequence[str], *, of: int) -> None:
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in complaints)
        raise ValueError(f"these of {of} tasks can't be asked:{listed}")
