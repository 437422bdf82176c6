"""``python -m trainer.experiments language``: implicit models and explicit twins, and invalid requests."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from implicit_blocks.specs import load_spec
from trainer.data.tokenizing.command import main as tokenize
from trainer.experiments.cli import main, parser
from trainer.experiments.common.runs import train
from trainer.experiments.equal_compute.flops import run_flops
from trainer.experiments.language import experiment as language
from trainer.experiments.language.experiment import Settings, _plans, _training
from trainer.experiments.language.plot import draw

NARROW = [
    "model.vocab_size=40", "model.d_model=16", "model.n_layers=1", "data.seq_len=12", "data.dtype=uint16",
    "training.max_tokens=240", "training.batch_size=4", "training.precision=float32", "training.threads=1",
    "model.mixer.d_state=4", "model.mixer.head_dim=8", "evaluation.last_tokens=4",
]  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.random.default_rng(0).integers(40, size=500).astype(np.uint16).tofile(folder / "tokens.bin")
    return folder


def test_twins_are_trained_and_measured(tokens, tmp_path, capsys):
    folder = tmp_path / "out"
    arguments = ["language", "--data", str(tokens), "--specs", "books_5m_mamba2", "--bounded", "0.4", "0.8"]
    arguments += ["--self-iterations", "1", "3", "--multiples", "1", "2", "--sequences", "4"]
    arguments += ["--evaluations", "2", "--device", "cpu", "--output", str(folder)]
    arguments += ["--set", *NARROW, f"data.validation_path={tokens}"]
    assert main(arguments) == 0
    written = json.loads((folder / "language.json").read_text())
    implicit, explicit, other = written["runs"]
    assert [run["kind"] for run in written["runs"]] == ["implicit", "explicit", "curriculum"]
    assert (implicit["share"], explicit["share"], other["share"]) == (0.8, None, 0.4)
    assert implicit["tokens"] == explicit["tokens"] == 240
    for run in written["runs"]:
        assert [entry["length"] for entry in run["lengths"]] == [12, 24]
        assert [entry["sequences"] for entry in run["lengths"]] == [4, 2]
        seen = [entry["tokens"] for entry in run["curve"]]
        assert seen == sorted(seen)
        assert seen[-1] == 240
        spent = [entry["flops"] for entry in run["curve"]]
        assert spent == sorted(spent)
    assert implicit["curve"][-1]["flops"] > 1.5 * explicit["curve"][-1]["flops"]
    assert explicit["test_time_compute"] == []
    few, more = implicit["test_time_compute"]
    assert (few["iterations_max"], few["self_iterations"]) == (1, 1)
    assert more["iterations_max"] <= 3
    assert len(implicit["lengths"][0]["iterations_by_position"]) == 12
    assert (folder / "language.png").read_bytes().startswith(b"\x89PNG")
    assert "books_5m_mamba2-explicit-0" in capsys.readouterr().out


def test_the_loops_of_models_with_a_fixed_number_are_varied(tokens, tmp_path):
    (tmp_path / "looped.yaml").write_text(
        "extends: books_5m_mamba2\nphases: []\n"
        "model: {depth: {kind: fixed, loops: 2}, gradient: {kind: last_loops}, "
        "at_evaluation: {exit: {kind: fixed, loops: 2}}}\n"
    )
    folder = tmp_path / "out"
    arguments = ["language", "--data", str(tokens), "--specs", str(tmp_path / "looped.yaml"), "--bounded"]
    arguments += ["--self-iterations", "1", "3", "--multiples", "1", "--sequences", "4"]
    arguments += ["--evaluations", "1", "--device", "cpu", "--output", str(folder)]
    arguments += ["--set", *NARROW, f"data.validation_path={tokens}"]
    assert main(arguments) == 0
    compute = json.loads((folder / "language.json").read_text())["runs"][0]["test_time_compute"]
    assert [entry["iterations_max"] for entry in compute] == [1, 3]
    assert compute[0]["loss"] != compute[1]["loss"]


def test_without_other_shares_the_plot_shows_the_lead():
    def run(kind, perplexities, seed=0):
        curve = [
            {"tokens": 100 * n, "flops": 10.0 * n, "perplexity": p} for n, p in enumerate(perplexities, 1)
        ]
        length = {"multiple": 1, "loss": 2.0, "perplexity": perplexities[-1], "iterations_by_position": None}
        about = {"spec": "books", "seed": seed, "share": None, "kind": kind, "test_time_compute": []}
        return {**about, "run": f"{kind}-{seed}", "curve": curve, "lengths": [length]}

    runs = [
        run("implicit", [90.0, 45.0]),
        run("explicit", [100.0, 60.0]),
        run("implicit", [80.0, 40.0], seed=1),
    ]
    figure = draw({"specs": ["books"], "runs": runs})
    (lead,) = [axes for axes in figure.axes if axes.get_title().startswith("Lead")]
    pairs = [line.get_xydata().tolist() for line in lead.lines if line.get_marker() == "o"]
    assert pairs == [[[0.1, pytest.approx(10.0)], [0.2, pytest.approx(25.0)]]]  # of seed 1 there is one twin
    runs[1]["curve"][1]["flops"] = 40.0  # the implicit model's second point is a third of the way
    figure = draw({"specs": ["books"], "runs": runs, "settings": {"petaflops": 1.0}})
    (lead,) = [axes for axes in figure.axes if axes.get_title().startswith("Lead")]
    (pairs,) = [line.get_xydata().tolist() for line in lead.lines if line.get_marker() == "o"]
    between = 100.0 ** (2 / 3) * 60.0 ** (1 / 3)
    assert pairs == [[10.0, pytest.approx(10.0)], [20.0, pytest.approx(100 * (1 - 45 / between))]]
    tokens = figure.axes[0]
    assert [(line.get_alpha(), line.get_linestyle()) for line in tokens.lines] == [
        (1.0, "-"),
        (1.0, "--"),
        (0.4, "-"),  # the second seed, behind the first
    ]
    assert "further seeds faint" in figure.get_suptitle()


def test_measurements_are_cached_until_their_settings_change(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        language, "_measure", lambda run, settings, device: asked.append(settings) or {"x": 1}
    )
    finished = SimpleNamespace(folder=tmp_path, summary={"steps": 5})
    for settings in (Settings(), Settings(seeds=(1,)), Settings(sequences=3), Settings(multiples=(1,))):
        assert language._measured(finished, settings, None) == {"x": 1}
    assert [settings.sequences for settings in asked] == [None, 3, None]  # another seed is another run's
    finished.summary["steps"] = 6  # the run was trained on
    language._measured(finished, Settings(multiples=(1,)), None)
    assert len(asked) == 4


def test_runs_are_evaluated_regularly_at_their_training_length(tokens):
    settings = Settings(changes=(*NARROW, f"data.path={tokens}"), evaluations=2, bounded=(0.8,))
    for _, spec in _plans("books_5m_mamba2", tokens, settings, True):
        assert (spec.total_steps, spec.training.evaluate_every) == (5, 2)
        assert (spec.evaluation.lengths, spec.evaluation.length_multiples) == ((12,), ())


def test_skipped_batches_are_left_out_of_the_loss():
    losses = [4.0, None, 2.0, *[1.0] * 147, None, None, None, 3.0]
    rows = [{"tokens": 10 * step, "loss": loss} for step, loss in enumerate(losses, 1)]
    found = _training(rows)
    assert [entry["loss"] for entry in found] == [3.0, *[1.0] * 49, None, 3.0]
    assert found[0]["tokens"] == 30


def test_explicit_twins_may_have_a_learning_rate_of_their_own(tokens):
    rate = "training.optimizer.learning_rate"
    settings = Settings(bounded=(0.7,), changes=(*NARROW, f"{rate}=8e-3"), explicit_changes=(f"{rate}=4e-3",))
    plans = _plans("books_5m_mamba2", tokens, settings, True)
    found = {label["kind"]: spec.training.optimizer.learning_rate for label, spec in plans}
    assert found == {"implicit": 8e-3, "explicit": 4e-3, "curriculum": 8e-3}


@pytest.mark.parametrize("name", ["books_5m_residual", "books_5m_mamba2_residual"])
def test_each_side_of_the_default_models_has_its_tuned_recipe(tokens, name):
    given = parser().parse_args(["language", "--data", str(tokens)])
    assert name in given.specs
    plans = {label["kind"]: spec for label, spec in _plans(name, tokens, Settings(), True)}
    assert set(plans) == {"implicit", "explicit"}  # no curriculum: the number of loops is fixed
    for kind, zoo in (("implicit", name), ("explicit", f"{name}_explicit")):
        tuned = load_spec(zoo, [f"data.path={tokens}"])
        assert plans[kind].training.optimizer == tuned.training.optimizer
        assert plans[kind].total_tokens == tuned.total_tokens
        assert plans[kind].model == tuned.model


@pytest.mark.parametrize("name", ["books_5m_residual", "books_5m_mamba2_residual"])
def test_settings_of_the_search_are_ignored_by_explicit_twins_with_their_own_spec(tokens, name):
    settings = Settings(laptop=True, changes=("model.depth.loops=3",))
    plans = {label["kind"]: spec for label, spec in _plans(name, tokens, settings, True)}
    assert [plan.model.kind for plan in plans.values()] == ["implicit_lm", "explicit_lm"]
    assert {plan.model.d_model for plan in plans.values()} == {64}


@pytest.mark.parametrize("name", ["books_5m_residual", "books_5m_parcae", "books_5m"])
def test_every_model_executes_the_given_flops(tokens, name):
    settings = Settings(petaflops=0.5)
    for _, spec in _plans(name, tokens, settings, True):
        assert run_flops(spec, bound=True) == pytest.approx(0.5e15, rel=0.01)
        assert spec.phase_specs()[-1].last_step == spec.total_steps


def test_a_search_is_trained_until_it_executes_the_budget(tokens, tmp_path, capsys):
    folder = tmp_path / "out"
    arguments = ["language", "--data", str(tokens), "--specs", "books_5m_mamba2", "--bounded", "--petaflops"]
    arguments += ["1e-7", "--self-iterations", "1", "--multiples", "1", "--sequences", "4", "--device", "cpu"]
    changes = [one for one in NARROW if not one.startswith("training.max_tokens")]
    changes += [
        "phases=[]",
        "model.stopping={tolerance: 0.5, max_iterations: 32}",
        f"data.validation_path={tokens}",
    ]
    arguments += ["--evaluations", "2", "--output", str(folder)]
    assert main([*arguments, "--set", *changes]) == 0
    runs = json.loads((folder / "language.json").read_text())["runs"]
    for run in runs:
        assert run["curve"][-1]["flops"] == pytest.approx(1e8, rel=0.03), run["run"]
        assert run["budget_share"] == pytest.approx(1, abs=0.03)
    last = folder / "runs" / f"books_5m_mamba2-0-{runs[0]['steps']}"
    assert runs[0]["run"] == last.name  # where its weights are
    assert "*" not in capsys.readouterr().out
    (last / "summary.json").unlink()
    assert main([*arguments, "--only-finished", "--set", *changes]) == 0
    runs = json.loads((folder / "language.json").read_text())["runs"]
    assert runs[0]["budget_share"] < 0.97
    _, earlier, _, note, _ = capsys.readouterr().out.splitlines()
    assert earlier.startswith(f"{runs[0]['run']} *")
    assert note == "* The executed FLOPs differ from --petaflops by more than 3%."


def test_the_products_of_muon_are_part_of_the_budget(tokens, tmp_path):
    changes = [one for one in NARROW if not one.startswith("training.max_tokens")]
    changes += ["training.optimizer={kind: muon, learning_rate: 1e-3}", f"data.validation_path={tokens}"]
    settings = Settings(petaflops=1e-7, bounded=(), changes=tuple(changes))
    _, (_, explicit) = _plans("books_5m_mamba2", tokens, settings, True)
    finished = train(explicit, tmp_path / "run", name="run", device="cpu")
    assert language.curve(finished)[-1]["flops"] == pytest.approx(1e8, rel=0.03)


def test_a_budget_of_flops_excludes_a_number_of_tokens(tokens, capsys):
    arguments = ["language", "--data", str(tokens), "--specs", "books_5m_residual", "--petaflops"]
    assert main([*arguments, "0.5", "--set", "training.max_tokens=1e6"]) == 2
    assert "--petaflops" in capsys.readouterr().err
    assert main([*arguments, "1e-9", "--output", str(tokens.parent / "out")]) == 2
    assert "1e-09 PFLOP are below two steps" in capsys.readouterr().err
    assert main([*arguments, "-1", "--output", str(tokens.parent / "out")]) == 2
    assert "petaflops must be positive, got -1" in capsys.readouterr().err


def test_the_first_spec_trains_every_share_with_every_seed(tokens):
    settings = Settings(seeds=(0, 1), bounded=(0.7, 0.8), changes=tuple(NARROW))
    plans = [(label["run"], spec) for label, spec in _plans("books_5m_mamba2", tokens, settings, True)]
    twins = [f"books_5m_mamba2{kind}-{seed}" for seed in (0, 1) for kind in ("", "-explicit")]
    others = ["books_5m_mamba2-0.7-0", "books_5m_mamba2-0.7-1"]
    assert [name for name, _ in plans] == [*twins, *others]
    assert [(spec.training.seed, spec.phases[0].until) for name, spec in plans if name in others] == [
        (0, 0.7),
        (1, 0.7),
    ]
    assert [label["run"] for label, _ in _plans("books_5m_mamba2", tokens, settings, False)] == twins


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--specs", "books_5m_explicit"], "is of kind 'explicit_lm'; use runs of an implicit_lm"),
        (["--specs", "word_problem_s3"], "the data of word_problem_s3 are of kind 'word_problem'; use runs"),
        (["--set", "training.seed=1"], "--set training.seed=1 conflicts with --seeds"),
        (["--specs", "books_5m", "./books_5m"], "several specs have the name books_5m"),
        (["--only-finished"], "contains none of these runs finished; omit --only-finished to train them"),
        (["--bounded", "1.5"], "the share of the first phase must be above 0 and below 1, got 1.5"),
        (["--self-iterations", "0"], "self-iterations must be at least 1, got 0"),
    ],
)
def test_invalid_requests_are_refused(tokens, tmp_path, capsys, options, message):
    assert main(["language", "--data", str(tokens), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_spec_by_its_path_is_run_in_the_output(tokens, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: books_5m_mamba2\n")
    plans = _plans(str(path), tokens, Settings(bounded=(), changes=tuple(NARROW)), True)
    assert [(label["spec"], label["run"]) for label, _ in plans] == [
        ("mine", "mine-0"),
        ("mine", "mine-explicit-0"),
    ]


def test_tokens_without_validation_are_refused_before_training(tokens, tmp_path, capsys):
    arguments = ["language", "--data", str(tokens), "--specs", "books_5m_mamba2", "--device", "cpu"]
    assert main([*arguments, "--output", str(tmp_path / "out"), "--set", *NARROW]) == 2
    assert f"the tokens in {tokens} have no validation split" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_models_of_the_laptop_setting_learn(shared_data, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    books = shared_data / "classic-books/valid.txt.xz"
    made = [str(books), "--separator", "<|endoftext|>", "--train-tokenizer", "512"]
    assert tokenize([*made, "--output", str(tmp_path / "tokens")]) == 0
    arguments = ["language", "--data", str(tmp_path / "tokens"), "--setting", "laptop", "--device", "cpu"]
    arguments += ["--specs", "books_5m_mamba2", "books_5m", "--sequences", "32", "--evaluations", "4"]
    # The same few books are both splits: this tests the procedure, not the figures.
    changes = ["model.vocab_size=512", "training.threads=1", f"data.validation_path={tmp_path / 'tokens'}"]
    arguments += ["--output", str(tmp_path / "out"), "--set", *changes]
    assert main(arguments) == 0
    runs = {run["run"]: run for run in json.loads((tmp_path / "out/language.json").read_text())["runs"]}
    assert len(runs) == 6
    for run in runs.values():
        first, last = run["curve"][0], run["curve"][-1]
        assert last["perplexity"] < first["perplexity"] < 512, run["run"]
    (mamba2,) = (run for name, run in runs.items() if name == "books_5m_mamba2-0")
    one, *_, most = mamba2["test_time_compute"]
    assert most["loss"] < one["loss"]  # iterations are worth something
    assert mamba2["lengths"][-1]["perplexity"] < 1.2 * mamba2["lengths"][0]["perplexity"]
    assert (tmp_path / "out/language.png").stat().st_size > 10_000
