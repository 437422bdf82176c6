"""The results of an evaluation: ``results.json``, ``table.md``, the plot, and optionally the responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.evaluation.eval_model import EvalModel
from trainer.evaluation.evaluate import EvaluationResult
from trainer.evaluation.plot import draw, panels
from trainer.evaluation.tables import length_table, paper_table, task_table
from trainer.reporting.metrics import json_value
from trainer.storage.files import sha256_of, write_atomically, write_json
from trainer.storage.run_folder import versions

if TYPE_CHECKING:
    from trainer.evaluation.scores import EvalTask, Scores

FORMAT = 1
RUNNING = "the evaluation is in progress, or was killed"
"""``incomplete`` of results that are written while further tasks run."""
_PACKAGES = ("lm_eval", "transformers", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a complete or interrupted evaluation, with its model and settings."""

    eval_model: EvalModel
    settings: Mapping[str, Any]
    tasks: Sequence[EvalTask]
    scores: Sequence[Scores]
    lengths: Sequence[EvaluationResult]
    incomplete: str | None = None
    """Why the evaluation ended early; None: it is complete."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The errors of tasks that could not be run, by name."""

    def text(self) -> str:
        """Return the tables in Markdown."""
        fields = {name: value for name, value in self.settings.items() if value is not None}
        settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())
        parts = [
            f"{self.eval_model.name}: {self.eval_model.weights}",
            f"{'Zero-shot; ' if self.scores else ''}{settings}",
        ]
        if self.incomplete is not None:
            parts.append(f"INCOMPLETE: the evaluation ended early: {self.incomplete}")
        if self.scores:
            parts += [paper_table(self.scores), task_table(self.scores)]
        if self.lengths:
            parts.append(length_table(self.lengths))
        parts += [f"FAILED: {name}: {error}" for name, error in self.failed.items()]
        return "\n\n".join(parts) + "\n"

    def as_row(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        files = {task.name: task.file for task in self.tasks if task.file is not None}
        return {
            "format": FORMAT,
            "name": self.eval_model.name,
            "checkpoint": str(self.eval_model.weights),
            "model": self.eval_model.spec.model_dump(mode="json"),
            "settings": dict(self.settings),
            "incomplete": self.incomplete,
            "failed": dict(self.failed),
            "versions": {**versions(), **{p: version(p) for p in _PACKAGES if find_spec(p) is not None}},
            "files": {name: {"path": str(file), "sha256": sha256_of(file)} for name, file in files.items()},
            "results": [scores.as_row() for scores in self.scores],
            "lengths": [result.as_row(by_position=False) for result in self.lengths],
        }

    def write(self, folder: Path, *, samples: bool = False) -> list[Path]:
        """Write the files of the output directory, each atomically, over those of earlier calls.

        Args:
            folder: output directory.
            samples: also write ``samples.jsonl``, the response to every item.

        """
        drawn = panels(self.scores, self.lengths)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "results.json", json_value(self.as_row()))
        write_atomically(folder / "table.md", self.text())
        if samples:
            rows = (json_value(row) for scores in self.scores for row in scores.samples())
            lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
            write_atomically(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
        if drawn and self.incomplete != RUNNING and find_spec("matplotlib") is not None:
            draw(drawn, folder / "evaluation.png", title=self.eval_model.name)
        return sorted(folder.iterdir())
