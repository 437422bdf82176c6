"""Loading specs: names, paths, `extends`, overrides, and error messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks import registry
from implicit_blocks.describing import changes
from implicit_blocks.specs import (
    AndersonSpec,
    Mamba2Spec,
    PhantomSpec,
    SpecError,
    load_spec,
    resolve,
    spec_name,
)
from trainer.storage.run_folder import RunFolder, differences

Write = Callable[[str, str], str]

SMALL = """\
model:
  kind: implicit_lm
  d_model: 64
  n_layers: 1
  mixer: {kind: mamba2, head_dim: 32}
  solver: {kind: picard, damping: 0.5}
data: {kind: word_problem, group: S3, seq_len: 32}
training:
  max_steps: 100
  batch_size: 8
  optimizer: {kind: adamw, learning_rate: 1e-3}
phases:
  - {name: unrolled, until: 0.5, model: {gradient: {kind: unrolled}}}
  - {name: free}
"""


def error_of(name: str, overrides: list[str] | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(name, overrides or [])
    return str(caught.value)


def test_a_zoo_name_equals_its_path(write: Write) -> None:
    by_name = load_spec("word_problem_s3")
    assert load_spec("zoo/word_problem_s3.yaml") == by_name  # the working directory has no zoo
    assert load_spec("zoo/word_problem_s3") == by_name
    assert load_spec(write("mine.yaml", "extends: word_problem_s3\n")) == by_name


def test_names_may_have_dots(write: Write) -> None:
    assert load_spec("llama_1.3b").model.d_model == 2048
    assert load_spec("llama_1.3b_explicit").model.kind == "explicit_lm"
    assert {spec_name(name) for name in ("llama_1.3b", "zoo/llama_1.3b.yaml", "x/llama_1.3b.yml")} == {
        "llama_1.3b"
    }


def test_a_path_in_the_working_directory_takes_precedence_over_the_zoo(write: Write) -> None:
    path = write("zoo/word_problem_s3.yaml", SMALL)
    assert load_spec(path).training.max_steps == 100


@pytest.mark.parametrize("name", ["mamba_130m", "zoo/mamba_130m.yaml", "./mamba_130m.yaml"])
def test_an_unknown_name_suggests_the_nearest_one(write: Write, name: str) -> None:
    message = error_of(name)
    assert "no spec 'mamba_130m' in the zoo; did you mean 'mamba2_130m'? The zoo is the directory " in message
    assert "llama" not in message  # other names would not help
    assert ("does not exist" in message) == (name != "mamba_130m")


@pytest.mark.parametrize("folder", ["", "studies/"])
def test_an_unknown_path_suggests_a_file_of_the_same_directory(write: Write, folder: str) -> None:
    write(f"{folder}lm_paper.yaml", SMALL)
    write(f"{folder}extending.yaml", "extends: lm_paperr\n")
    hint = f"no spec 'lm_paperr' in the zoo; did you mean '{folder}lm_paper.yaml'? The zoo is the directory "
    assert hint in error_of(f"{folder}lm_paperr.yaml")
    assert hint in error_of(f"{folder}lm_paperr")
    assert "did you mean 'lm_paper.yaml'?" in error_of(f"{folder}extending.yaml")  # relative to that file


def test_the_list_of_known_specs_ends_with_a_full_stop(write: Write) -> None:
    assert re.search(r" and \d+ more\. The zoo is the directory ", error_of("./qqqqqq.yaml"))


def test_an_error_in_an_inherited_phase_says_how_to_remove_inherited_phases(write: Write) -> None:
    write("base.yaml", SMALL.replace("{gradient: {kind: unrolled}}", "{gradient: {steps: 2}}"))
    changed = "extends: base\nmodel: {gradient: {kind: last_loops}}\n"
    note = "\nthe phases are inherited from base.yaml:13:3; set phases: [] to remove them"
    message = error_of(write("mine.yaml", changed))
    assert "phases.0.model.gradient.steps: unknown key 'steps'" in message
    assert message.endswith(note)
    assert load_spec(write("mine.yaml", changed + "phases: []\n")).model.gradient.kind == "last_loops"
    assert "inherited" not in error_of("base", ["model.gradient.kind=last_loops"])  # its own phases


class TestExtends:
    def test_files_beside_paths_and_zoo_names(self, write: Write) -> None:
        write("base/parts.yaml", SMALL)
        write("beside.yaml", "extends: base/parts\nmodel: {n_layers: 2}")
        name = write("top.yaml", "extends: beside\ntraining: {max_steps: 7}")
        spec = load_spec(name)
        assert (spec.model.n_layers, spec.training.max_steps) == (2, 7)

    def test_later_entries_override_earlier_ones(self, write: Write) -> None:
        write("a.yaml", SMALL)
        write("b.yaml", "model: {n_layers: 2}\ntraining: {max_steps: 5}")
        name = write("c.yaml", "extends: [a, b]\ntraining: {max_steps: 6}")
        spec = load_spec(name)
        assert (spec.model.n_layers, spec.training.max_steps) == (2, 6)

    def test_a_base_may_be_extended_on_two_paths(self, write: Write) -> None:
        write("base.yaml", SMALL)
        write("left.yaml", "extends: base\nmodel: {n_layers: 2}")
        write("right.yaml", "extends: base\ntraining: {batch_size: 4}")
        spec = load_spec(write("both.yaml", "extends: [left, right]"))
        assert (spec.model.n_layers, spec.training.batch_size) == (1, 4)  # right comes last, with its base

    def test_circular_extends_are_rejected(self, write: Write) -> None:
        write("a.yaml", "model: {}\nextends: b")
        write("b.yaml", "extends: [c.yaml]")
        write("c.yaml", "extends: a")
        assert error_of("a.yaml") == (
            "c.yaml:1:10: extends: circular: a.yaml extends b.yaml extends c.yaml extends a.yaml; "
            "remove one of them"
        )
        write("self.yaml", "extends: self")
        assert error_of("self.yaml").startswith(
            "self.yaml:1:10: extends: circular: self.yaml extends self.yaml"
        )

    def test_a_file_extended_repeatedly_is_read_once(self, write: Write) -> None:
        write("f0.yaml", SMALL)
        for number in range(1, 40):
            write(f"f{number}.yaml", f"extends: [f{number - 1}, f{number - 1}]\n")
        assert load_spec("f39.yaml").model.d_model == 64

    def test_depth_number_and_values_of_extended_files_are_limited(self, write: Write) -> None:
        write("f0.yaml", SMALL)
        for number in range(1, 1200):
            write(f"f{number}.yaml", f"extends: f{number - 1}\n")
        assert error_of("f1199.yaml") == (
            "f1136.yaml:1:10: extends: more than 64 files deep; shorten the chain"
        )
        wide = write("wide.yaml", f"extends: [{', '.join(['f0'] * 257)}]\n")
        assert error_of(wide) == "wide.yaml:1:10: extends: more than 256 files in all; extend fewer"
        for number in range(3):
            write(f"b{number}.yaml", f"k{number}: &a [{'x, ' * 1000}]\nl{number}: [{'*a, ' * 40}]\n")
        message = error_of(write("bombs.yaml", "extends: [b0, b1, b2]"))
        assert message.startswith("b2.yaml:1:")
        assert "the spec has more than 100,000 values" in message

    @pytest.mark.parametrize(
        "name", ["x" * 300, f"{'x' * 300}.yaml", f"a/{'x' * 5000}", "", "/", "a\0b", "a\0b.yaml", ".", ".."]
    )
    def test_invalid_file_names_are_rejected(self, write: Write, name: str) -> None:
        assert len(error_of(name)) < 1500
        escaped = name.replace("\0", "")
        message = error_of(write("a.yaml", f'extends: "{escaped}"'))
        assert message.startswith("a.yaml:1:10: extends: ")
        assert len(message) < 1500

    @pytest.mark.parametrize("value", ["3", "[word_problem_s3, 3]", "{a: b}"])
    def test_extends_must_be_a_name_or_a_list_of_names(self, write: Write, value: str) -> None:
        assert "a.yaml:1:10: extends: should be a name, a path or a list of them" in error_of(
            write("a.yaml", f"extends: {value}")
        )

    def test_a_missing_file_is_reported_with_the_place(self, write: Write) -> None:
        message = error_of(write("a.yaml", "extends: base/word_problem_a6"))
        assert message.startswith(
            "a.yaml:1:10: extends: 'base/word_problem_a6' does not exist, and there is no spec"
        )
        assert "did you mean 'word_problem_a5'" in message


class TestErrors:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "kind: picard",
                "kind: picad",
                "x.yaml:6:18: model.solver.kind: unknown solver 'picad'; "
                f"did you mean 'picard'? Known: {', '.join(registry.kinds('solver'))}",
            ),
            (
                "damping: 0.5",
                "dampng: 0.5",
                "x.yaml:6:26: model.solver.dampng: unknown key 'dampng'; did you mean 'damping'? "
                "Known: damping, kind, undamped_first",
            ),
            (
                "damping: 0.5",
                "damping: 2",
                "x.yaml:6:35: model.solver.damping: should be less than or equal to 1; got 2",
            ),
            ("training:", "trainng:", "x.yaml:8:1: trainng: unknown key 'trainng'; did you mean 'training'?"),
            ("head_dim: 32", "head_dim: 48", "x.yaml:5:10: model.mixer: the inner width expand * d_model"),
            ("  d_model: 64\n", "", "x.yaml:2:3: model.d_model: is missing; add it"),
            ("seq_len: 32", "seq_len: 0", "x.yaml:7:48: data.seq_len: should be greater than 0; got 0"),
            (
                "max_steps: 100",
                "max_steps: -1",
                "x.yaml:9:14: training.max_steps: should be greater than 0; got -1",
            ),
            (
                "max_steps: 100",
                "max_tokens: many",
                "x.yaml:9:15: training.max_tokens: should be a valid integer",
            ),
            ("  max_steps: 100\n", "", "the length of the run is missing; give max_steps or max_tokens"),
            ("group: S3", "group: S99", "x.yaml:7:35: data.group: group 'S99' has more than 5040 elements"),
            (
                "group: S3",
                "group: D4",
                "x.yaml:7:35: data.group: group 'D4' is not known; use S_n, A_n or Z_n",
            ),
            (
                "{kind: unrolled}",
                "{kind: unroled}",
                "x.yaml:13:59: phases.0.model.gradient.kind: unknown gradient",
            ),
            (
                "{kind: unrolled}",
                "{steps: 0}",
                "x.yaml:13:60: phases.0.model.gradient.steps: should be greater than 0",
            ),
            ("{name: free}", "3", "phases.1: should be a mapping such as {key: value}; got 3"),
            (
                "phases:",
                "evaluation: {lengths: 32}\nphases:",
                "x.yaml:12:23: evaluation.lengths: should be a list such as [32]; got 32",
            ),
            (
                "phases:",
                "callbacks: {kind: wandb}\nphases:",
                "x.yaml:12:12: callbacks: should be a list such as [{'kind': 'wandb'}]; got {'kind'",
            ),
            (
                "phases:",
                "callbacks: null\nphases:",
                "x.yaml:12:12: callbacks: should be a list such as []; got None",
            ),
            ("until: 0.5", "until: 1.5", "x.yaml:13:29: phases.0.until: give a number of steps"),
            (
                "{name: free}",
                "{name: free, untill: 3}",
                "phases.1.untill: unknown key 'untill'; did you mean 'until'",
            ),
            ("max_steps: 100", "max_steps: [1", "not valid YAML"),
            ("n_layers: 1", "n_layers: 1\n  n_layers: 2", "x.yaml:5:3: key 'n_layers' is given twice"),
            (
                "data:",
                "kind: rum\ndata:",
                "x.yaml:7:7: kind: unknown run 'rum'; did you mean 'run'? Known: run",
            ),
        ],
    )
    def test_errors_have_place_value_and_remedy(self, write: Write, old: str, new: str, message: str) -> None:
        assert old in SMALL
        assert message in error_of(write("x.yaml", SMALL.replace(old, new)))

    def test_all_errors_are_reported(self, write: Write) -> None:
        text = (
            SMALL.replace("damping: 0.5", "damping: 5")
            .replace("S3", "Q3")
            .replace("batch_size: 8", "batch_size: 0")
        )
        places = [line.partition(": ")[0] for line in error_of(write("x.yaml", text)).splitlines()]
        assert places == ["x.yaml:6:35", "x.yaml:7:35", "x.yaml:10:15"]

    def test_the_place_is_in_the_extended_file(self, write: Write) -> None:
        write("base.yaml", SMALL.replace("damping: 0.5", "damping: 5"))
        assert error_of(write("x.yaml", "extends: base")).startswith("base.yaml:6:35: model.solver.damping")

    def test_an_explicit_model_has_no_solver(self, write: Write) -> None:
        text = "extends: word_problem_s3_explicit\nmodel: {solver: {kind: picard}}"
        assert "x.yaml:2:9: model.solver: unknown key 'solver'" in error_of(write("x.yaml", text))


class TestTwins:
    def test_the_explicit_twin_keeps_the_common_fields(self, write: Write) -> None:
        write("x.yaml", SMALL + "evaluation: {lengths: [64]}")
        spec: Any = load_spec(write("y.yaml", "extends: x\nmodel: {kind: explicit_lm}"))
        assert spec.model.model_dump()["mixer"] == Mamba2Spec(head_dim=32).model_dump()
        assert "solver" not in spec.model.model_dump()
        assert spec.model.weight_norm is False
        assert spec.phases == ()
        assert spec.evaluation.lengths == (64,)
        assert load_spec("x.yaml", ["model.kind=explicit_lm"]) == spec

    def test_phases_of_the_twin_are_kept(self, write: Write) -> None:
        write("x.yaml", SMALL)
        text = (
            "extends: x\nmodel: {kind: explicit_lm}\nphases: [{name: only, training: {max_grad_norm: 0.5}}]"
        )
        [phase] = load_spec(write("y.yaml", text)).phase_specs()
        assert (phase.name, phase.training.max_grad_norm) == ("only", 0.5)

    def test_switching_back_to_an_implicit_model_restores_its_defaults(self, write: Write) -> None:
        write("x.yaml", SMALL)
        write("y.yaml", "extends: x\nmodel: {kind: explicit_lm}")
        spec = load_spec(write("z.yaml", "extends: y\nmodel: {kind: implicit_lm}"))
        assert (spec.model.d_model, spec.model.gradient) == (64, PhantomSpec())


class TestOverrides:
    def test_the_overrides_of_the_readme_are_applied(self, write: Write) -> None:
        spec = load_spec(
            write("x.yaml", SMALL),
            [
                "data.group=A4",
                "data.identity_probability=0.25",
                "training.max_steps=200",
                "model.solver.kind=anderson",
            ],
        )
        assert (spec.data.group, spec.data.identity_probability, spec.total_steps) == ("A4", 0.25, 200)
        assert spec.model.solver == AndersonSpec()
        assert spec.model.vocab_size == 12

    @pytest.mark.parametrize("order", [1, -1])
    def test_kinds_are_applied_before_their_settings(self, write: Write, order: int) -> None:
        changes = ["model.solver.kind=anderson", "model.solver.memory=3"][::order]
        assert load_spec(write("x.yaml", SMALL), changes).model.solver == AndersonSpec(memory=3)

    def test_later_overrides_win_and_values_are_yaml(self, write: Write) -> None:
        tree = resolve(
            write("x.yaml", SMALL),
            [
                "training.seed=1",
                "training.seed=2",
                "training.max_grad_norm=null",
                "evaluation.lengths=[8, 1e1]",
                "model.solver={kind: anderson, memory: 2}",
                "data.path=a=b",
                "training.schedule.warmup=",
            ],
        )
        assert tree["training"]["seed"] == 2
        assert tree["training"]["max_grad_norm"] is None
        assert tree["training"]["schedule"] == {"warmup": None}
        assert tree["evaluation"] == {"lengths": [8, 10.0]}
        assert tree["model"]["solver"] == {"kind": "anderson", "memory": 2}
        assert tree["data"]["path"] == "a=b"

    @pytest.mark.parametrize("phase", ["unrolled", "0"])
    def test_list_elements_by_name_and_index(self, write: Write, phase: str) -> None:
        name = write("x.yaml", SMALL)
        spec = load_spec(name, [f"phases.{phase}.until=10", f"phases.{phase}.model.gradient.steps=3"])
        first, second = spec.phase_specs()
        assert (first.last_step, second.first_step) == (10, 10)
        assert first.model.gradient.model_dump() == {"kind": "unrolled", "steps": 3, "checkpointing": False}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                "model.solver.kind=picad",
                "command line, 'model.solver.kind=picad': model.solver.kind: unknown solver",
            ),
            ("model.solvr.kind=picard", "model.solvr: unknown key 'solvr'; did you mean 'solver'?"),
            ("trainig.max_steps=3", "trainig: unknown key 'trainig'; did you mean 'training'?"),
            ("model.d_model.width=3", "model.d_model: should be a valid integer; got {'width': 3}"),
            ("phases.fre.until=3", "'fre' is not an element of this list of 2; known: unrolled, free"),
            ("phases.2.until=3", "'2' is not an element"),
            ("training.max_steps=[3", "command line, 'training.max_steps=[3': not valid YAML"),
            ("training.max_steps", "'training.max_steps' is not an override; write path.to.key=value"),
            ("training..max_steps=3", "is not an override; write path.to.key=value"),
            ("=3", "is not an override; write path.to.key=value"),
            ("extend=word_problem_s3", "unknown key 'extend'; did you mean 'extends'?"),
            ("max_steps=3", "max_steps: unknown key 'max_steps'; did you mean 'training.max_steps'?"),
            ("training.learning_rate=1", "did you mean 'optimizer.learning_rate'?"),
            ("model.head_dim=1", "did you mean 'mixer.head_dim'?"),
            ("model.tolerance=1", "did you mean 'stopping.tolerance' or 'at_evaluation.stopping.tolerance'?"),
            ("model.damping=1", "did you mean 'solver.damping' or 'gradient.damping'"),
            ("data.head_dim=1", "unknown key 'head_dim'; known: "),
            ("model.solver=anderson", "model.solver: should be a mapping such as {kind: anderson}"),
        ],
    )
    def test_invalid_overrides_are_rejected(self, write: Write, change: str, message: str) -> None:
        assert message in error_of(write("x.yaml", SMALL), [change])


def test_the_zoo_takes_precedence_over_the_working_directory_for_bare_names(write: Write) -> None:
    write("mine.yaml", SMALL)
    write("first/spec.yaml", SMALL)
    write("word_problem_s3.yaml", SMALL)
    assert load_spec("mine") == load_spec("mine.yaml") == load_spec("first") == load_spec("./first")
    assert load_spec("word_problem_s3") != load_spec("./word_problem_s3.yaml") == load_spec("mine")


@pytest.mark.parametrize("changes", ["training.max_steps=3", {"training.max_steps": 3}])
def test_overrides_must_be_a_list(changes: Any) -> None:
    with pytest.raises(ValueError, match="overrides must be a list"):
        load_spec("word_problem_s3", changes)


def test_an_error_is_a_value_error_without_context(write: Write) -> None:
    with pytest.raises(ValueError, match=re.escape("x.yaml:1:1: nonsense: unknown")) as caught:
        load_spec(write("x.yaml", "nonsense: 1\n" + SMALL))
    assert caught.value.__suppress_context__


def test_messages_stay_short(write: Write) -> None:
    name = write("x.yaml", SMALL)
    deep = ".".join(["a"] * 2000)
    assert error_of(name, [f"{deep}=1"]).endswith("a path has at most 64 keys, this one has 2,000")
    assert len(error_of(name, [f"data.group=[{'x,' * 5000}]"])) < 2000
    assert len(error_of(name, [f"{'x' * 100_000}=1"])) < 2000
    message = error_of(write("y.yaml", SMALL + "".join(f"key{number}: 1\n" for number in range(500))))
    assert len(message.splitlines()) <= 21
    lengths = ", ".join(["-1"] * 500)
    message = error_of(name, [f"evaluation.lengths=[{lengths}]"])
    assert message.splitlines()[-1] == "and 480 more errors"


def test_extends_is_not_an_override(write: Write) -> None:
    message = error_of(write("x.yaml", SMALL), ["extends=word_problem_s3"])
    assert "'extends' is supported only in spec files" in message


def test_infinities_and_numeric_strings_round_trip_through_a_run_folder(write: Write) -> None:
    config = "{time_step_limit: [0.001, .inf], x: .nan, y: '1e3'}"
    model = f"{{kind: transformers, architecture: mamba2, config: {config}}}"
    text = SMALL.partition("data:")[2].partition("phases:")[0]
    spec = load_spec(write("x.yaml", f"model: {model}\ndata:{text}"))
    dumped = spec.model_dump(mode="json")
    folder = RunFolder(Path("run"))
    folder.create(spec=dumped, manifest={})
    folder.release()
    again = load_spec("run")
    assert again.model.config["time_step_limit"] == [0.001, math.inf]
    assert again.model.config["y"] == "1e3"
    assert differences(dumped, again.model_dump(mode="json")) == []  # so the run can be resumed
    assert differences({"a": math.nan}, {"a": math.inf}) != []
    assert changes(spec, again) == []


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("model.n_layers", "integer"),
        ("training.max_steps", "integer"),
        ("training.optimizer.learning_rate", "number"),
        ("model.stopping.tolerance", "number"),
    ],
)
def test_overrides_refuse_booleans_as_numbers(key: str, number: str) -> None:
    message = f"command line, '{key}=true': {key}: should be a valid {number}; got True"
    with pytest.raises(SpecError, match=re.escape(message)):
        load_spec("word_problem_s3", [f"{key}=true"])
