"""The model card of an exported folder, ``README.md``: task, data, figures, convergence, and how to load it.

The facts come from the files of the run: ``spec.yaml``, ``manifest.json``, ``metrics.jsonl`` and
``evaluations.jsonl``. The header is that of the Hugging Face hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from implicit_blocks.checkpoints.find import CONFIG, SPEC, read_json
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.specs import ImplicitLMSpec, LanguageModelSpec, load_spec

CARD = "README.md"
_COLUMNS = {
    "set": "set",
    "length": "length",
    "sequences": "sequences",
    "loss": "loss",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "iterations": "iterations",
    "iterations_max": "max",
    "residual_max": "largest residual",
    "non_converged": "unconverged",
}
"""Columns of ``evaluations.jsonl`` in the card, and their headers; those of searches only where there are."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The records in the files of a run, up to one step.

    ``data`` is the source of the data with its settings, ``training`` the settings of the training; ``step``
    is the exported step, ``metrics`` the row of that training step, and ``evaluations`` the rows of the last
    evaluation up to it. Files that are missing or damaged leave their part empty.
    """

    name: str
    spec: Any
    manifest: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()


def read_run(run: Path, *, step: int | None = None) -> RunRecord:
    """Read the records of a run folder up to ``step``; None: up to the end of the run.

    Raises:
        ValueError: ``spec.yaml`` is not a valid spec.

    """
    manifest = next(iter(_rows(run / "manifest.json", whole=True)), {})
    metrics = [row for row in _rows(run / "metrics.jsonl") if step is None or _step(row) <= step]
    evaluations = [row for row in _rows(run / "evaluations.jsonl") if step is None or _step(row) <= step]
    last = max(map(_step, evaluations), default=0)
    return RunRecord(
        name=str(manifest.get("name", run.resolve().name)),
        spec=load_spec(run / SPEC),
        manifest=manifest,
        step=step if step is not None else (_step(metrics[-1]) if metrics else None),
        metrics=metrics[-1] if metrics else {},
        evaluations=[row for row in evaluations if _step(row) == last],
    )


def write_card(folder: Path, spec: Any, *, run: RunRecord | None, seed: int | None = None) -> None:
    """Write the card of an exported folder.

    Args:
        folder: the folder, which has ``config.json`` and the weights.
        spec: of the model.
        run: the run that trained the weights; None: unknown.
        seed: of random weights; None: the weights were loaded.

    """
    class_name = read_json(folder / CONFIG)["architectures"][0]
    parts = [_header(spec), _title(spec, run), _model(spec, class_name)]
    parts += [_origin(seed)] if run is None else [_training(run), _evaluation(run)]
    parts += [_use(spec, run), "## License\n\nUnknown: no license was stated for these weights.\n"]
    (folder / CARD).write_text("\n".join(parts), encoding="utf-8")


def _header(spec: Any) -> str:
    implicit = isinstance(spec, ImplicitLMSpec)
    own = isinstance(spec, LanguageModelSpec)
    tags = [*(["implicit-blocks"] if own else []), *(["fixed-point", "implicit-model"] if implicit else [])]
    lines = ["license: unknown", "library_name: transformers", "pipeline_tag: text-generation"]
    if tags:
        lines += ["tags:", *(f"- {tag}" for tag in tags)]
    return "\n".join(["---", *lines, "---", ""])


def _title(spec: Any, run: RunRecord | None) -> str:
    name = run.name if run is not None else "Exported model"
    if isinstance(spec, ImplicitLMSpec):
        what = "An implicit language model: each token's features are a fixed point of its layers."
    elif isinstance(spec, LanguageModelSpec):
        what = "An explicit language model."
    else:
        what = "A causal language model of transformers."
    return f"# {name}\n\n{what}\n"


def _model(spec: Any, class_name: str) -> str:
    rows = {"class": f"`{class_name}`"}
    if isinstance(spec, LanguageModelSpec):
        counted = count_parameters(spec)
        rows |= {
            "parameters": "" if counted is None else f"{counted.total:,}",
            "vocabulary": f"{spec.vocab_size:,}",
            "width": str(spec.d_model),
            "layers": str(spec.total_layers),
            "mixer": "mixed" if spec.mixer is None else f"`{spec.mixer.kind}`",
        }
    if isinstance(spec, ImplicitLMSpec):
        stopping, exit_ = spec.evaluation_stopping, spec.at_evaluation.exit.kind
        rows |= {
            "solver in evaluation": f"`{spec.at_evaluation.solver.kind}`, exit criterion `{exit_}`",
            "stopping in evaluation": f"tolerance {stopping.tolerance:g}, at most "
            f"{stopping.max_iterations} iterations",
            "gradient": f"`{spec.gradient.kind}`",
            "objective": f"`{spec.objective.kind}`",
        }
    return f"## Model\n\n{_facts(rows)}"


def _origin(seed: int | None) -> str:
    if seed is not None:
        return f"## Training\n\nNone: the weights are random (seed {seed}).\n"
    return "## Training\n\nUnknown: the weights were not read from a run.\n"


def _training(run: RunRecord) -> str:
    data, training = run.spec.data, run.spec.training
    known = data.model_dump(mode="json", exclude_defaults=True)
    shown = {name: Path(value).name if name == "path" else value for name, value in known.items()}
    identity = run.manifest.get("data") or {}
    rows = {
        "task": f"`{data.kind}`",
        "data": ", ".join(f"{name} `{_short(value)}`" for name, value in shown.items() if name != "kind"),
        "identity of the data": ", ".join(f"{name} `{_short(value)}`" for name, value in identity.items()),
        "sequence length": f"{data.seq_len} tokens",
        "steps": "" if run.step is None else f"{run.step:,} of {run.spec.total_steps:,}",
        "tokens": _count(run.metrics.get("tokens")),
        "batch size": f"{training.batch_size} sequences",
        "optimizer": f"`{training.optimizer.kind}`, schedule `{training.schedule.kind}`",
        "precision": f"`{training.precision}`",
        "seed": str(training.seed),
        "training loss": _number(run.metrics.get("loss")),
        "iterations in training": _number(run.metrics.get("iterations")),
        "unconverged in training": _percent(run.metrics.get("non_converged")),
        "device": str(run.manifest.get("device") or ""),
        "versions": ", ".join(
            f"{name} {version}" for name, version in (run.manifest.get("versions") or {}).items() if version
        ),
    }
    return f"## Training\n\n{_facts(rows)}"


def _evaluation(run: RunRecord) -> str:
    if not run.evaluations:
        return "## Evaluation\n\nThe run was not evaluated.\n"
    columns = [name for name in _COLUMNS if any(row.get(name) is not None for row in run.evaluations)]
    lines = [
        f"After step {max(map(_step, run.evaluations)):,}, on the run's own evaluation sets. Iterations are "
        "those of each sequence's slowest token; unconverged is the share of sequences over the tolerance.",
        "",
        f"| {' | '.join(_COLUMNS[name] for name in columns)} |",
        f"|{' --- |' * len(columns)}",
    ]
    if "iterations" not in columns:
        lines[0] = lines[0].partition(" Iterations")[0]
    for row in run.evaluations:
        cells = [
            _percent(row.get(name)) if name == "non_converged" else _number(row.get(name)) for name in columns
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["## Evaluation and convergence", "", *lines, ""])


def _use(spec: Any, run: RunRecord | None) -> str:
    own = isinstance(spec, LanguageModelSpec)
    trusted = ", trust_remote_code=True" if own else ""
    needs = (
        "Loading requires the package `implicit_blocks` with its extra `hf`, installed from a clone of its "
        "repository: `pip install -c constraints.txt -e '.[hf]'`. `trust_remote_code=True` imports the "
        "classes from it; after `import implicit_blocks.hf` the option is not needed.\n"
        if own
        else "Loading requires transformers.\n"
    )
    length = None if run is None else run.spec.data.seq_len
    limit = (
        "\nThe model accepts sequences of any length"
        + (f"; it was trained on sequences of {length} tokens.\n" if length is not None else ".\n")
        if own
        else ""
    )
    return f"""## Use

{needs}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trusted})
tokenizer = AutoTokenizer.from_pretrained("FOLDER")  # if the folder contains a tokenizer
```
{limit}"""


# ------------------------------------------------------------------------------------ files and formats


def _rows(path: Path, *, whole: bool = False) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line or one ``whole``; lines that are none are left out."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in [text] if whole else text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _facts(rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "| --- | --- |", *lines, ""])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float | int) else ""
