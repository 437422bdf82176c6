"""Ten tasks by their names, once by ``python -m trainer.evaluate`` and once by ``lm_eval --model hf``.

    python benchmarks/lm_eval_tasks.py --model exported --data data [--limit 40]

The tasks are lm-eval's own configurations, of which only the source of the items is replaced by files under
``--data``, because neither program shall download anything. Both commands get the names of the tasks and the
directory with the configurations; WikiText is the beginning of two articles. The table has every metric of
both, and the program fails if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from report import RESULTS, machine

from implicit_blocks import registry
from trainer.evaluation.items import read_items

TASKS = {  # name in lm-eval: our kind, whose files it reads
    "lambada_openai": "lambada",
    "lambada_standard": "lambada",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "arc_easy": "arc_easy",
    "arc_challenge": "arc_challenge",
    "winogrande": "winogrande",
    "openbookqa": "openbookqa",
    "boolq": "boolq",
    "wikitext": "",
}
FILES = {"lambada_standard": "lambada/lambada_test.jsonl", "wikitext": "wikitext-2/valid.txt"}
CONFIGURATIONS = {
    "lambada_standard": "lambada/lambada_standard.yaml",
    "wikitext": "wikitext/wikitext.yaml",
}
ARTICLES, CHARACTERS = 2, 4000
TOLERANCE = 1e-4
"""Largest relative difference of perplexities; accuracies are equal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="an exported folder with a tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="directory of the task files")
    parser.add_argument("--limit", type=int, default=40, help="items of each task")
    parser.add_argument("--output", type=Path, default=RESULTS / "lm_eval_tasks.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tasks, work = Path(folder) / "tasks", Path(folder)
        for name in TASKS:
            write_task(name, arguments.data, tasks, limit=arguments.limit)
        ours = evaluate_ours(arguments.model, tasks, work / "ours")
        theirs = evaluate_theirs(arguments.model, tasks, work / "theirs")
    rows = []
    for name in TASKS:
        for metric, value in theirs[name].items():
            row = {"task": name, "items": ours[name]["items"], "metric": metric}
            rows.append({**row, "ours": ours[name][metric], "lm_eval": value})
    described = {**machine(), "lm_eval": version("lm_eval"), "transformers": version("transformers")}
    result = {"machine": described, "limit": arguments.limit, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['task']:<18}{row['metric']:<18}{row['ours']:>14.6g}{row['lm_eval']:>14.6g}")
    different = [row["task"] for row in rows if not equal(row)]
    if different:
        sys.exit(f"different: {', '.join(sorted(set(different)))}")


def equal(row: dict[str, Any]) -> bool:
    """Whether both values of a row are the same, up to rounding of a perplexity or its logarithm."""
    allowed = 1e-6 if row["metric"].startswith("acc") else TOLERANCE
    return bool(abs(row["ours"] - row["lm_eval"]) <= allowed * max(1.0, abs(row["lm_eval"])))


def write_task(name: str, data: Path, folder: Path, *, limit: int) -> None:
    """Write the configuration of a task of lm-eval with items from a file under ``data``."""
    folder.mkdir(exist_ok=True)
    if name == "wikitext":
        items = [{"page": page[:CHARACTERS]} for page in articles(data / FILES[name])[:ARTICLES]]
        own = CONFIGURATIONS[name]
    else:
        spec = registry.entry("evaluation_task", TASKS[name]).spec()
        path = data / FILES[name] if name in FILES else spec.locate(data)
        items = read_items(TASKS[name], path)[:limit]
        own = CONFIGURATIONS.get(name, spec.lm_eval_task)
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items), "utf-8")
    included = Path(str(files("lm_eval"))) / "tasks" / own
    configuration = {
        "include": str(included),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"test": str(folder / f"{name}.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration), "utf-8")


def articles(path: Path) -> list[str]:
    """Return the articles of WikiText, which begin with a line ``= Title =``."""
    text = path.read_text(encoding="utf-8")
    starts = [found.start() for found in re.finditer(r"^ ?= [^=].*[^=] = *$", text, re.MULTILINE)]
    return [text[first:last] for first, last in zip(starts, [*starts[1:], None], strict=True)]


def evaluate_ours(model: Path, tasks: Path, output: Path) -> dict[str, Any]:
    """Return the results of ``python -m trainer.evaluate`` by task."""
    call("trainer.evaluate", "--checkpoint", model, "--include-path", tasks, "--output", output,
         "--device", "cpu", "--tasks", *TASKS)  # fmt: skip
    (result,) = json.loads((output / "results.json").read_text())["results"]
    found: dict[str, Any] = result["tasks"]
    return found


def evaluate_theirs(model: Path, tasks: Path, output: Path) -> dict[str, Any]:
    """Return the metrics of ``lm_eval --model hf`` by task."""
    call("lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True",
         "--include_path", tasks, "--device", "cpu", "--batch_size", 8, "--output_path", output,
         "--tasks", ",".join(TASKS))  # fmt: skip
    (path,) = output.rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if name.endswith(",none") and "_stderr" not in name
        }
        for task, metrics in found.items()
    }


def call(module: str, *arguments: Any) -> None:
    """Run a module of this interpreter, offline."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, env=environment)


if __name__ == "__main__":
    main()
