"""The fair comparison: one grid, choice and report on different text and seeds, refusals, marks."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from implicit_blocks import build
from trainer.data.token_files import write_tokens
from trainer.experiments.cli import main
from trainer.experiments.equal_compute.compare import (
    choose,
    converged_share,
    difference,
    interval,
    loss,
    marks,
    require_comparable,
)
from trainer.experiments.equal_compute.experiment import Settings, run, short
from trainer.experiments.equal_compute.flops import flops_per_token, optimizer_flops_per_step, run_flops
from trainer.experiments.equal_compute.grid import Grid
from trainer.experiments.equal_compute.measure import Measuring, long_sets
from trainer.experiments.equal_compute.plan import comparisons, looped_shape
from trainer.experiments.equal_compute.plot import frontier
from trainer.experiments.equal_compute.recipes import Recipe, spec_of
from trainer.experiments.equal_compute.runs import forget_compiled, read_results, train_recipes
from trainer.optim.capturable import newton_schulz_flops
from trainer.storage.files import read_json

BASE = Recipe(
    family="llama", layers=(0, 4, 0), learning_rate=2e-3, weight_decay=1.5, petaflops=1.0, vocab_size=64
)
LOOPED = replace(BASE, layers=(1, 2, 1), loops=3)
GRID = Grid(learning_rates=(1e-3, 2e-3, 4e-3), weight_decays=(0.75, 1.5, 3.0), shares=(0.6, 1.0))


def row(recipe: Recipe = BASE, *, choice: float = 4.0, report: float = 4.1, **changes):
    """Return the result of a run."""
    measured = {"choice": {"loss": choice}, "report": {"loss": report}}
    made = {
        "name": recipe.name, "recipe": recipe.as_row(), "text": {"tokens": 5}, "windows": {"report": 7},
        "flops": 1e15 * recipe.share, "parameters": 100, "epochs": 0.9, "steps": 10, "planned_steps": 10,
        "ended_early": None, "skipped_steps": 0, "measured": measured,
    }  # fmt: skip
    return {**made, **changes}


# ---------------------------------------------------------------------------------------- FLOPs, recipes


def test_a_looped_model_has_the_flops_of_the_stack_it_unrolls_to():
    deep = spec_of(replace(BASE, layers=(0, 8, 0)), Path("tokens")).model
    looped = spec_of(LOOPED, Path("tokens")).model
    assert flops_per_token(looped, length=512) == flops_per_token(deep, length=512)


def test_loops_without_gradient_are_counted_forward():
    full, last = (spec_of(one, Path("tokens")).model for one in (LOOPED, replace(LOOPED, gradient_loops=1)))
    core = full.stacks["core"].flops_per_token(512)
    assert flops_per_token(full, length=512) - flops_per_token(last, length=512) == 2 * 2 * core


@pytest.mark.parametrize(
    "recipe",
    [
        BASE,
        LOOPED,
        replace(LOOPED, loops_from=0.6, end_loops=8),
        replace(BASE, share=0.6),
        replace(LOOPED, optimizer="muon"),
    ],
)
def test_a_run_executes_its_budget(recipe):
    spent = run_flops(spec_of(recipe, Path("tokens"))) / 1e15
    assert spent == pytest.approx(recipe.share * recipe.petaflops, rel=2e-3)
    assert spent <= recipe.share * recipe.petaflops * (1 + 1e-3)


def test_the_products_of_muon_are_part_of_the_budget():
    plain, muon = (spec_of(replace(BASE, optimizer=kind), Path("tokens")) for kind in ("adamw", "muon"))
    assert optimizer_flops_per_step(plain) == 0.0
    shapes = [(256, 256), (768, 256), (704, 256), (704, 256), (256, 704)]
    assert optimizer_flops_per_step(muon) == 4 * newton_schulz_flops(shapes, steps=5)
    assert muon.training.max_steps < plain.training.max_steps


def test_a_damped_map_and_its_penalty_reach_the_model():
    recipe = replace(LOOPED, end_loops=8, residual_weight=2.0, damping=0.8)
    spec = spec_of(recipe, Path("tokens"))
    assert spec.model.injection.damping == 0.8
    weights = [phase.model.gradient.residual_weight for phase in spec.phase_specs()]
    assert weights == [0.0, 2.0]
    assert "damping 0.8, penalty 2" in recipe.shape


@pytest.mark.parametrize(
    "depth", [{"kind": "until_converged"}, {"kind": "uniform", "low": 1, "high": 5, "per": "sequence"}]
)
def test_a_model_whose_executed_loops_are_not_known_has_no_budget(depth):
    model = spec_of(LOOPED, Path("tokens")).model
    free = type(model).model_validate({**model.model_dump(), "depth": depth})
    with pytest.raises(ValueError, match=f"{depth['kind']}.*cannot be kept"):
        flops_per_token(free, length=512)
    assert flops_per_token(free, length=512, bound=True) > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": (1, 2, 1), "loops": 0}, "explicit model"),
        ({"layers": (0, 0, 0)}, "layers"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"loops_from": 0.5}, "loops_from"),
        ({"end_loops": 8}, "end_loops"),
        ({"layers": (1, 2, 1), "loops": 3, "end_loops": 8, "end_from": 1.0}, "end_loops"),
        ({"gate": 0.5}, "gate"),
        ({"damping": 0.8}, "damping"),
        ({"layers": (1, 2, 1), "loops": 3, "residual_weight": 1.0}, "residual_weight"),
        ({"optimizer": "sgd"}, "choose from adamw, muon"),
    ],
)
def test_recipes_that_no_model_has_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        replace(BASE, **change)


def test_an_unknown_field_of_a_recipe_is_refused():
    with pytest.raises(ValueError, match="depths"):
        Recipe.of({**BASE.as_row(), "depths": 1})


def test_a_budget_below_two_steps_is_refused():
    with pytest.raises(ValueError, match="raise petaflops"):
        spec_of(replace(BASE, petaflops=1e-9), Path("tokens"))


def test_every_point_of_a_grid_has_its_own_name():
    names = [one.name for side in (BASE, LOOPED) for one in GRID.points(side)]
    assert len(set(names)) == len(names) == 2 * 3 * 3 * 2


# ------------------------------------------------------------------------------------------------- grid


def test_the_best_value_at_an_edge_is_reported_and_the_grid_widened():
    best = replace(BASE, weight_decay=3.0, learning_rate=1e-3)
    assert GRID.edges(best) == ["the lowest learning rate", "the highest weight decay"]
    wider = GRID.widened([best])
    assert (wider.learning_rates[0], wider.weight_decays[-1]) == (5e-4, 6.0)
    assert wider.edges(best) == []
    assert GRID.widened([best, best]) == wider  # by one value, however many sides and comparisons lie there


def test_the_whole_budget_is_no_edge_but_the_smallest_share_is():
    assert GRID.edges(BASE) == []
    assert GRID.edges(replace(BASE, share=0.6)) == ["the lowest share of the budget"]


@pytest.mark.parametrize(
    "change", [{"learning_rates": ()}, {"weight_decays": (1.0, 1.0)}, {"shares": (2.0,)}, {"shares": (0.0,)}]
)
def test_grids_without_sense_are_refused(change):
    with pytest.raises(ValueError, match=r"rates|decays|share"):
        replace(GRID, **change)


def test_both_sides_of_a_comparison_have_the_same_grid_text_and_normalization():
    plans = comparisons(
        BASE, kinds=["equal_size", "free_size", "fresh_text"], families=["llama", "mamba2"],
        normalizations=["qk_norm", "weight_norm"], optimizers=["adamw", "muon"], shapes=["1-2-1x3+8@.8"],
        layers=[8], widths=[384], grid=GRID, fresh_petaflops=0.1,
    )  # fmt: skip
    assert len(plans) == len({plan.title for plan in plans}) == 24
    for plan in plans:
        common = {
            (one.family, one.weight_norm, one.qk_norm, one.optimizer, one.petaflops)
            for one in plan.implicit + plan.explicit
        }
        assert len(common) == 1
        tuned = [
            {(one.learning_rate, one.weight_decay, one.share) for one in plan.points(side, [0])}
            for side in ("implicit", "explicit")
        ]
        assert tuned[0] == tuned[1]


def test_looped_shapes_are_read_from_text():
    assert looped_shape("2-4-2x3k2@.6") == {
        "layers": (2, 4, 2), "loops": 3, "gradient_loops": 2, "loops_from": 0.6,
    }  # fmt: skip
    assert looped_shape("1-2-1x3+8@.8")["end_loops"] == 8
    with pytest.raises(ValueError, match="1-2-1x3"):
        looped_shape("2-4-2")


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": {"tokens": 6}}, "different text"),
        ({"windows": {"report": 8}}, "windows"),
        ({"flops": 1.04e15}, "4.0% more FLOPs"),
        ({"parameters": 104}, "parameters"),
        ({"epochs": 1.2}, "once"),
    ],
)
def test_sides_that_are_not_comparable_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        require_comparable([row(), row(LOOPED, **change)], equal_parameters=True, once=True)


def test_sides_within_the_margin_are_comparable_and_fewer_epochs_are_no_smaller_budget():
    fewer = replace(BASE, share=0.6)
    rows = [row(), row(fewer), row(LOOPED, flops=1.02e15, parameters=102)]
    assert require_comparable(rows, equal_parameters=True) is None


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="no run is finished"):
        require_comparable([])
    with pytest.raises(ValueError, match="no run is finished"):
        choose([])


def test_a_seed_cannot_choose_and_be_reported():
    with pytest.raises(ValueError, match="must not have chosen"):
        Settings(choosing_seeds=(0,), seeds=(0, 1))


# -------------------------------------------------------------------------------- choice and difference


def test_the_choice_reads_only_the_text_of_the_choice():
    better = replace(BASE, weight_decay=3.0)
    assert choose([row(choice=4.0, report=1.0), row(better, choice=3.9, report=9.0)]) == better


def test_the_choice_is_the_mean_over_seeds_and_needs_all_of_them():
    rows = [row(BASE.with_seed(seed), choice=value) for seed, value in ((0, 4.0), (1, 4.0))]
    lucky = replace(BASE, weight_decay=3.0)
    assert choose([*rows, row(lucky, choice=1.0)]) == BASE


def test_a_run_that_ended_early_is_never_chosen():
    lost = row(replace(BASE, weight_decay=3.0), measured=None, ended_early="the loss is not finite")
    assert choose([lost, row(choice=9.0)]) == BASE
    assert loss(lost, "choice") == math.inf


def test_averaged_weights_count_where_they_are_better_on_the_text_of_the_choice():
    averaged = {"choice": {"loss": 3.5}, "report": {"loss": 5.0}}
    assert loss(row(averaged=averaged), "report") == 5.0


def test_intervals_are_those_of_welch():
    # Two samples with variances 1 and 4: df = 5.88 for 5 values each, t = 2.571 at 5 degrees of freedom.
    values = [x * math.sqrt(1 / 2.5) for x in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    others = [2 * x + 1 for x in values]
    mean, low, high = interval(values, others)
    assert mean == pytest.approx(-1)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(2.571 * 1.0)
    assert interval([1.0], others) is None


def test_the_difference_is_relative_and_negative_where_the_implicit_side_is_better():
    ours = [row(LOOPED.with_seed(seed), report=value) for seed, value in enumerate((4.00, 4.02))]
    theirs = [row(BASE.with_seed(seed), report=value) for seed, value in enumerate((4.10, 4.12))]
    found = difference(ours, theirs)
    assert found["difference"] == pytest.approx(math.expm1(-0.1))
    assert found["below_with_every_seed"] is True
    low, high = found["interval"]
    assert low < found["difference"] < high


def test_marks_name_early_ends_skipped_steps_other_grids_and_missing_convergence():
    points = [{"max_iterations": 16, "token_converged": 1.0}, {"max_iterations": 32, "token_converged": 0.5}]
    measured = {**row()["measured"], "fixed_point": points}
    assert marks(row(), GRID) == []
    assert "ended early" in marks(row(steps=5))[0]
    assert "skipped" in marks(row(skipped_steps=1))[0]
    assert "not on the grid" in marks(row(replace(BASE, weight_decay=7.0)), GRID)[0]
    assert "did not converge" in marks(row(measured=measured))[0]
    assert "at most these FLOPs" in marks(row(replace(BASE, bounded=True)))[0]
    assert converged_share(row(measured=measured)) == 0.5


def test_the_frontier_has_the_points_that_none_to_the_left_lies_below():
    assert frontier([(3, 5.0), (1, 7.0), (2, 8.0), (4, 6.0)]) == [(1, 7.0), (3, 5.0)]


# ------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return tokens with a validation split beside them, and tokens of reported books."""
    folder = tmp_path_factory.mktemp("tokens")
    numbers = np.random.default_rng(0)
    for name, count in (("train", 400), ("validation", 200), ("books", 200)):
        write_tokens(folder / f"{name}.bin", numbers.integers(0, 64, count), vocab_size=64)
    return folder / "train.bin", folder / "books.bin"


TINY = {
    "width": 16, "length": 16, "batch_size": 2, "precision": "float32", "families": ("llama",),
    "shapes": ("1-1-1x2",), "layers": (4,), "learning_rates": (1e-2,), "weight_decays": (0.5, 1.0),
    "shares": (1.0,), "petaflops": 7.2e-8, "seeds": (1, 2), "sequences": 4, "side_by_side": 2,
    "kinds": ("equal_size",), "average": None,
}  # fmt: skip


def test_the_experiment_tunes_reports_and_continues(tokens, tmp_path, monkeypatch):
    data, report = tokens
    with_validation(monkeypatch, data.with_name("validation.bin"))
    text = run(tmp_path / "out", data, report, settings=Settings(**TINY), device="cpu")
    written = read_json(tmp_path / "out" / "equal_compute.json")
    assert [one["kind"] for one in written["comparisons"]] == ["equal_size"]
    for one in written["comparisons"]:
        assert one["result"]["seeds"] == [2, 2]
        assert one["title"] in text
        for side in one["sides"].values():
            assert not set(side["runs"]) & set(side["tuned"])
    assert (tmp_path / "out" / "equal_compute.png").is_file()
    before = {row["name"]: row["seconds"] for row in read_results(tmp_path / "out" / "runs")}
    again = run(tmp_path / "out", data, report, settings=Settings(**TINY, only_finished=True), device="cpu")
    assert again == text
    assert {row["name"]: row["seconds"] for row in read_results(tmp_path / "out" / "runs")} == before


def test_the_average_with_the_lowest_perplexity_on_the_choosing_text_is_measured(
    tokens, tmp_path, monkeypatch
):
    data, report = tokens
    with_validation(monkeypatch, data.with_name("validation.bin"))
    settings = Settings(**{**TINY, "weight_decays": (0.5,), "seeds": (1,), "average": (0.5, 0.9)})
    run(tmp_path / "out", data, report, settings=settings, device="cpu")
    rows = read_results(tmp_path / "out" / "runs")
    assert {row["side"] for row in rows} == {"explicit", "implicit"}
    for row in rows:
        found = row["averaged"]
        assert [one["decay"] for one in found["averages"]] == [0.5, 0.9]
        best = min(found["averages"], key=lambda one: one["choice"])
        assert (best["decay"], best["choice"]) == (found["decay"], found["choice"]["perplexity"])
        assert row["recipe"]["seed"] == 0 or "lengths" in row["measured"] | found


def with_validation(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let recipes read their validation tokens from this file."""
    from trainer.experiments.equal_compute import recipes

    plain = recipes._tree

    def tree(recipe, data, steps):
        made = plain(recipe, data, steps)
        return {**made, "data": {**made["data"], "validation_path": str(path)}}

    monkeypatch.setattr(recipes, "_tree", tree)


def test_tokens_without_a_validation_split_are_refused(tokens, tmp_path):
    data, report = tokens
    recipe = replace(BASE, width=16, length=16, batch_size=2, precision="float32", petaflops=2e-8)
    with pytest.raises(ValueError, match="--validation"):
        train_recipes([recipe], tmp_path, data=data, report=report, device="cpu", log=lambda text: None)


def test_a_report_without_tokens_is_refused_before_training(tokens, tmp_path, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("trained")

    monkeypatch.setattr("trainer.experiments.equal_compute.experiment.train_recipes", never)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        run(tmp_path / "out", tokens[0], tmp_path / "empty", settings=Settings(**TINY), device="cpu")


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_long_sequences_are_measured_with_both_rotary_scalings_and_the_model_is_as_before(tokens, family):
    recipe = replace(LOOPED, family=family, width=16, length=16, batch_size=2, precision="float32")
    spec = spec_of(recipe, tokens[0])
    model = build(spec.model).double()
    for parameter in model.parameters():  # attention that depends on positions
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    look = Measuring(model, spec, device=torch.device("cpu"))
    long, _ = long_sets(spec, tokens[1], sequences=1)
    rows = [look._length_row(long, "float32", loops=3)["loss"]]
    scaled = look._scaled_lengths(long, "float32", loops=3)
    rows += [row["loss"] for row in scaled]
    assert [row["scaling"] for row in scaled] == (["linear", "llama3"] if family == "llama" else [])
    assert len(set(rows)) == len(rows)
    assert look._length_row(long, "float32", loops=3)["loss"] == rows[0]


def test_a_recipe_given_twice_is_refused(tokens, tmp_path):
    with pytest.raises(ValueError, match="given twice"):
        train_recipes([BASE, BASE], tmp_path, data=tokens[0], report=tokens[1], device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, at its import
def test_runs_are_evaluated_without_compiled_layers():
    model = build(spec_of(replace(LOOPED, width=16), Path("tokens")).model)
    model.compile_layers()  # would compile at the first call, which is not made
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert len(compiled) >= 4
    forget_compiled(model)
    assert all(module._compiled_call_impl is None for module in compiled)


def test_the_result_of_another_recipe_is_not_taken_for_finished(tokens, tmp_path):
    (tmp_path / f"{BASE.name}.json").write_text('{"recipe": {"width": 8}}')
    with pytest.raises(ValueError, match="width"):
        train_recipes([BASE], tmp_path, data=tokens[0], report=tokens[1], device="cpu", log=lambda text: None)


def test_only_finished_runs_without_any_are_refused_by_the_command(tokens, tmp_path, capsys):
    data, report = tokens
    given = ["equal-compute", "--data", str(data), "--report", str(report), "--only-finished"]
    assert main([*given, "--output", str(tmp_path / "out")]) == 2
    assert "no comparison has finished runs" in capsys.readouterr().err


def test_an_unknown_shape_is_refused_by_the_command(tokens, tmp_path, capsys):
    data, report = tokens
    given = ["equal-compute", "--data", str(data), "--report", str(report), "--shapes", "1-2"]
    assert main([*given, "--output", str(tmp_path / "out")]) == 2
    assert "looped shape" in capsys.readouterr().err


def test_short_rows_have_last_and_averaged_weights():
    sets = {on: {"loss": 4.0, "perplexity": value} for on, value in (("choice", 54.6), ("report", 60.3))}
    better = {on: {**one, "loss": 3.9, "perplexity": one["perplexity"] - 1} for on, one in sets.items()}
    made = row(measured=sets, averaged=better, side="explicit", shape="4 layers", tokens=1, seconds=1.0,
               captured=True)  # fmt: skip
    found = short(made)
    assert found["weights"] == {
        "last": {"choice": 54.6, "report": 60.3}, "averaged": {"choice": 53.6, "report": 59.3},
    }  # fmt: skip
    assert found["report"] == 59.3
