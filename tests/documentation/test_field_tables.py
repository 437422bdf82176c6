"""The tables of fields on the pages match the specs."""

from __future__ import annotations

import re
from pathlib import Path

import implicit_blocks as ib
from trainer.specs import run
from trainer.specs.run import CatbAbISpec, TrainingSpec, WordProblemSpec

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str, heading: str) -> set[str]:
    """Return the names in the first column of the table under a heading."""
    table = (DOCS / page).read_text(encoding="utf-8").partition(heading)[2]
    rows = re.findall(r"^\| (`[^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)", row)}


def test_the_table_of_model_fields_is_complete() -> None:
    assert first_cells("specs.md", "| field | meaning | default |") == set(ib.ImplicitLMSpec.model_fields)


def test_the_table_of_training_fields_has_existing_fields() -> None:
    named = first_cells("training.md", "| field of `training` |")
    assert named
    assert named < set(TrainingSpec.model_fields)


def test_the_list_of_fields_that_a_phase_may_change_is_complete() -> None:
    words = " ".join((DOCS / "specs.md").read_text(encoding="utf-8").split())
    message = words.partition("A phase may change")[2]
    _, model, training, data = re.split(r"- in `(?:model|training|data)`:", message.partition("```")[0])
    assert set(re.findall(r"`(\w+)`", model)) == set(ib.ImplicitLMSpec.changeable)
    assert set(re.findall(r"`(\w+)[`.]", training)) == run._CHANGEABLE
    changeable = WordProblemSpec.changeable | CatbAbISpec.changeable
    assert set(re.findall(r"`(\w+)`", data)) == changeable
