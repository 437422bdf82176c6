"""The commands, file table and plugin of docs/evaluation.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from implicit_blocks import registry
from implicit_blocks.__main__ import parser as library_parser
from trainer.evaluation.command import parser
from trainer.specs.run import BenchmarksSpec

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_commands_can_be_parsed():
    lines = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    known = {"trainer.evaluate": parser(), "implicit_blocks": library_parser()}
    asked = [words for words in lines if words[0] == "python"]
    assert len(asked) == 6
    for words in asked:
        known[words[2]].parse_args(words[3:])


def test_the_table_of_files_is_that_of_the_specs():
    rows = {
        kind: cells.split(" | ")[1]
        for kind, cells in re.findall(r"^\| `(\w+)`(?:, `\w+`)?( \| .*\.jsonl`.*) \|$", PAGE, re.MULTILINE)
    }
    kinds = set(registry.kinds("evaluation_task")) - {"lm_eval"}
    assert rows.keys() == kinds - {"arc_challenge"}  # in one row with the easy part
    for kind, cell in rows.items():
        files = []
        for file in re.findall(r"`([^`]+)`", cell):
            name, _, packed = file.removesuffix("]").partition("[")
            files += [name, name + packed] if packed else [name]
        usual = registry.entry("evaluation_task", kind).spec.usual_files
        assert [file for file in files if not file.endswith(".lst")] == list(usual), kind


def test_the_callback_of_the_page_is_valid():
    (example,) = blocks("yaml")
    (callback,) = yaml.safe_load(example)["callbacks"]
    spec = BenchmarksSpec.model_validate(callback)
    assert [task.kind for task in spec.tasks] == ["lambada", "piqa"]


def test_the_plugin_of_the_page_works(tmp_path):
    namespace: dict[str, Any] = {}
    (example,) = blocks("python")
    exec(compile(example, "docs/evaluation.md", "exec", dont_inherit=True), namespace)
    with registry.isolated():
        namespace["register_components"](
            lambda *component: registry.add(*component, owner="acme", version="1")
        )
        spec = registry.entry("evaluation_task", "acme.rhyme").spec()
        assert spec.locate(tmp_path) is None
        task = registry.build(spec, data=tmp_path)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    assert [instance.args for instance in task.instances] == [("The cat sat on the", " mat")]
    assert set(spec.columns) <= set(task.aggregation())
