"""Hints for names of other libraries: ``lr`` for ``learning_rate``, ``ift`` for ``implicit_function``."""

from __future__ import annotations

import pytest

from implicit_blocks import registry
from implicit_blocks._utils.console import LIBRARY, TRAINER
from implicit_blocks._utils.hints import did_you_mean, nearest
from implicit_blocks._utils.synonyms import _SAME, PLACES
from implicit_blocks.specs import SpecError, load_spec
from implicit_blocks.specs.schema import run_schema


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lr=1e-3", "training.optimizer.learning_rate"),
        ("training.lr=1e-3", "optimizer.learning_rate"),
        ("training.optimizer.lr=1e-3", "learning_rate"),
        ("training.precision=bf16", "bfloat16"),
        ("training.bf16=true", "precision"),
        ("data.block_size=64", "seq_len"),
        ("model.stopping.tol=0.1", "tolerance"),
        ("tol=0.1", "model.stopping.tolerance"),
        ("model.solver.tau=0.5", "damping"),
        ("model.gradient.kind=ift", "implicit_function"),
        ("model.mixer.kind=mamba", "mamba2"),
        ("model.hidden_size=64", "d_model"),
        ("training.gradient_accumulation_steps=2", "micro_batch_size"),
    ],
)
def test_a_setting_named_as_elsewhere_is_refused_with_our_name(override: str, hint: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{hint}'"):
        load_spec("word_problem_s3", [override])


def test_a_known_name_is_preferred_to_a_similar_one() -> None:
    assert nearest("tau", ["damping", "tab"]) == "damping"
    assert nearest("tau", ["tab", "beta"]) == "tab"
    assert did_you_mean("LR", ["learning_rate", "eps"]).startswith("did you mean 'learning_rate'?")


def test_every_synonym_stands_for_a_name_that_exists() -> None:
    kinds = {kind for family in registry.families() for kind in registry.kinds(family)}
    schema = str(run_schema())
    options = {"output", "max_new_tokens", "spec"}
    unknown = [name for name in _SAME if name not in kinds | options and f"'{name}'" not in schema]
    assert unknown == []


def test_every_place_of_a_setting_exists() -> None:
    tree = load_spec("word_problem_s3", ["training.init_from.path=runs/none"]).model_dump()
    for path in PLACES.values():
        section = tree
        for key in path.split("."):
            assert key in section, path
            section = section[key]


def test_no_command_is_a_synonym_of_another() -> None:
    commands = [*TRAINER, *LIBRARY]
    assert all(nearest(command, commands) == command for command in commands)
